"""A Hugging Face model behind KV slots. This runs before PyTorch's compiler is imported, which runs
what it finds in its cache: by default in the temporary folder, where others could have made it."""
import os
import tempfile
from contextlib import suppress
from pathlib import Path

PRIVATE = ".saguaro-"  # begins the names of what lies in the temporary folder
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # PyTorch itself sets it to the default
until_exit = None  # the folder of this process alone, if it needs one
with suppress(FileNotFoundError):  # there is no temporary folder: who needs one says so
    SHARED = os.path.join(tempfile.gettempdir(), "torchinductor_")
    if os.environ.get(CACHE, SHARED).startswith(SHARED):
        try:
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "saguaro")
            folder.mkdir(0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)  # fails if it is another account's
        except (OSError, RuntimeError):  # there is no home, or none that can be written
            until_exit = tempfile.TemporaryDirectory(prefix=PRIVATE)
            folder = until_exit.name
        os.environ[CACHE] = str(folder)
    # kernels in CuTe DSL: what was compiled of them lies in the temporary folder by default, too
    os.environ.setdefault("QUACK_CACHE_DIR", os.path.join(os.environ[CACHE], "quack"))
