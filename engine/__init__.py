"""A Hugging Face model behind KV slots, and what makes its passes fast. Every program of ours runs
this before PyTorch's compiler is imported. That one runs the kernels that it finds in its cache,
which by default lies where another account can have made it: in the temporary folder."""
import atexit
import os
import shutil
import tempfile
from pathlib import Path

PRIVATE = ".saguaro-"  # begins the names of folders in the temporary folder
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # PyTorch itself sets it to the default
SHARED = os.path.join(tempfile.gettempdir(), "torchinductor_")
if os.environ.get(CACHE, SHARED).startswith(SHARED):
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "saguaro")
        folder.mkdir(0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        if folder.stat().st_uid != getattr(os, "getuid", int)():  # on Windows all are 0
            raise PermissionError
    except (OSError, RuntimeError):  # there is no home, or none that can be written
        folder = tempfile.mkdtemp(prefix=PRIVATE)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[CACHE] = str(folder)
