"""Processes: starting the second rank, a rank that died, the one sentence of an error.

torchrun starts all ranks. `python saguaro.py` is rank 0, and starts the draft's rank itself, as
`run.Saguaro` does: under torchrun the error of a wrong file is 46 lines and status 1, not one
sentence and status 2, and a start takes a third more CPU time (measured). The standard input of the
draft's rank is a pipe, which closes when rank 0 ends, however that ends. The two meet in a file
that no other account may read.
"""
import builtins
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Callable, Iterator

from cli.settings import DecodingSettings, Settings, parse
from engine import PRIVATE, until_exit
from engine.errors import UserError, first_line, lacks_memory, printable

STORE = "SAGUARO_STORE"  # set where rank 0 has started rank 1: the file in which they meet
WAS_STARTED = STORE in os.environ and os.environ.get("RANK") == "1"  # this rank, by rank 0
GRACE = 2  # seconds in which rank 0 may itself find the fault that ends the draft's rank
REQUIRED = ("torch", "transformers", "tqdm", "matplotlib")  # imported by commands
GONE = ("closed by peer", "reset by peer", "broken pipe", "no route", "timed out",
        "another rank is gone")  # of gloo, and of `run.placement`
RANK_0 = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


def launch(kind: type[DecodingSettings], module: str, read: Callable = parse) -> None:
    """Run `module.main(settings)` as this program; never returns. First `read` gives the settings
    and the second rank is started, then the module is imported: torch takes seconds."""
    def main() -> None:
        prepare_process()
        settings = read(kind)
        if WAS_STARTED:
            threading.Thread(target=exit_with_target, daemon=True).start()
        if settings.mode == "ssd" and is_alone():
            start_second_rank(module)
        if is_rank_0() and sys.stderr.isatty():
            print("loading ...", file=sys.stderr, flush=True)
        importlib.import_module(module).main(settings)

    if hasattr(builtins, "__IPYTHON__"):  # its process, and its Ctrl-C, are not ours to change
        sys.exit(f"in IPython and notebooks start it as !python {Path(sys.argv[0]).name}")
    status = exit_status(main)
    if status == 0 and sys.modules["torch.distributed"].is_initialized():
        sys.modules["torch.distributed"].destroy_process_group()
    if status:
        leave(status)
    if WAS_STARTED:
        threading.Event().wait()  # for `exit_with_target`: rank 0 may still open the store
    sys.exit(0)  # Python's own end, for whoever profiles or debugs


def is_alone() -> bool:
    """Return whether no launcher has started other ranks."""
    return os.environ.get("WORLD_SIZE", "") in ("", "1")


def is_rank_0() -> bool:
    """Return whether this is rank 0, by its launcher. Without one RANK may mean something else."""
    return is_alone() or os.environ.get("RANK", "0") == "0"


def prepare_process() -> None:
    """Let Ctrl-C end every rank at once, text be printed whatever the output's encoding, and ranks
    choose their own cores."""
    # the first process of a container gets no signal for which it has no handler
    ends = signal.SIG_DFL if os.getpid() > 1 else lambda *_: leave(128 + signal.SIGINT)
    signal.signal(signal.SIGINT, ends)
    if hasattr(signal, "SIGCHLD"):  # where a launcher ignores it, no status would be heard
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # whoever started it has closed it: nobody reads
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    sys.stdout.reconfigure(errors="backslashreplace")
    os.environ["OMP_PROC_BIND"] = "false"  # else importing torch may bind both ranks to one core
    # threads that wait give up their cores sooner: beside busy programs, twice the speed
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    gc.set_threshold(100_000)  # a garbage collection would delay a pass
    from tqdm import tqdm  # here, so that one sentence says what is missing
    tqdm.set_lock(threading.RLock())  # its own lock, for processes, would outlive Ctrl-C


def start_second_rank(module: str) -> None:
    """Be rank 0 of two, beside a rank 1 that runs the same command."""
    os.environ |= RANK_0 | LOOPBACK | {STORE: new_store()}
    # sys.argv names this program, also in a debugger
    program = ["-m", module] if "." in module else sys.argv[:1]
    draft = start_rank_1([*program, *sys.argv[1:]], {})
    threading.Thread(target=exit_with_draft, args=(draft,), daemon=True).start()


def new_store() -> str:
    """Return the path of a new file in which two ranks can meet."""
    # not in a folder of its own: once that is removed, a store that is opened or closed looks for
    # it for five minutes, in which no other thread of its process can run
    opened, store = tempfile.mkstemp(prefix=PRIVATE)
    os.close(opened)
    return store


def start_rank_1(program: list[str], environment: dict[str, str]) -> subprocess.Popen:
    """Start a program of Python's as rank 1 beside this process, with its environment but for the
    given variables. It leaves when its standard input closes. Both use nothing but loopback."""
    environment = os.environ | RANK_0 | LOOPBACK | environment | {"RANK": "1", "LOCAL_RANK": "1"}
    # in a session of its own it is not ended by a terminal's Ctrl-C before it has tidied up
    draft = subprocess.Popen([sys.executable, *program], env=environment, start_new_session=True,
                             stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    if hasattr(os, "register_at_fork"):  # what is forked from this process would hold it open
        os.register_at_fork(after_in_child=lambda: draft.stdin.close())
    return draft


def assist() -> None:
    """Be the draft's process of a `run.Saguaro`, which writes the settings, a line of JSON."""
    sys.argv[0] = "the draft's process"  # in errors
    launch(Settings, "run.assist", lambda kind: kind(**json.loads(sys.stdin.readline())))


def leave(status: int) -> None:
    """Exit at once, from any thread. Python's own end can take ten seconds. Meanwhile the groups
    would be closed, and the other ranks would blame this one in their own words."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    if until_exit:
        until_exit.cleanup()
    with suppress(OSError, KeyError):
        os.unlink(os.environ[STORE])  # last: another thread may open it, and make it anew
    os._exit(status)


def exit_status(main: Callable[[], None]) -> int:
    """Call main, and report errors in one line. Returns the exit status, the models being gone."""
    try:
        main()
        sys.stdout.flush()
    except UserError as problem:
        report(f"error: {problem}")
        return 2
    except ModuleNotFoundError as problem:
        if problem.name not in REQUIRED:
            raise
        report(f"error: {problem}: is the virtual environment active (. .venv/bin/activate), and "
               "requirements.txt installed in it?")
        return 2
    except BrokenPipeError:  # standard output is closed
        return 141
    except OSError as problem:  # a disk is full
        report(problem)
        return 1
    except (RuntimeError, MemoryError, ImportError) as problem:
        return status_of_rank(problem)
    return 0


def status_of_rank(problem: Exception) -> int:
    """Report that this rank lacks memory, or another rank. Returns the exit status. Raises what is
    neither."""
    name = f"rank {os.environ.get('RANK', 0)}"
    if lacks_memory(problem):
        report(f"error: {name} lacks memory or threads ({first_line(problem)}): allow more, or "
               "try more target ranks, or a smaller --batch-size, --max-new-tokens or --budget")
        return 2
    if not is_gone(problem):
        raise problem
    time.sleep(2 * GRACE)  # meanwhile that one, or `exit_with_draft`, reports why
    report(f"{name} stops: another rank is gone")
    return 1


def is_gone(problem: Exception) -> bool:
    """Return whether an exception means that another rank has ended."""
    return any(sign in str(problem).lower() for sign in GONE)


def report(problem: Exception | str) -> None:
    """Print it. Where all ranks meet an error rank 0 speaks, and the others end with it."""
    time.sleep(0 if is_rank_0() else GRACE)
    print(printable(f"{Path(sys.argv[0]).name}: {problem}"), file=sys.stderr, flush=True)


# ---- threads that watch ----

def exit_with_draft(draft: subprocess.Popen) -> None:
    """Exit when the draft's rank has failed. It says why if it can."""
    status = draft.wait()
    if status < 0:
        report(f"the draft's rank has ended with status {status}")
    if status:
        leave(2 if status == 2 else 1)


def exit_with_target() -> None:
    """Exit soon after rank 0 has ended, however it ended: then standard input closes."""
    os.read(0, 1)
    leave(1)


@contextmanager
def watch(waits: str, seconds: float, limit: float) -> Iterator[None]:
    """Say for what this rank `waits`, if the block takes longer than so many seconds. Exit at the
    `limit`, whatever library the main thread is in."""
    def exit_in_vain() -> None:
        if not done.wait(seconds):
            print(waits, file=sys.stderr, flush=True)
        if not done.wait(limit - seconds):
            report(f"error: {limit} seconds are over: {waits}")
            os._exit(2)

    done = threading.Event()
    threading.Thread(target=exit_in_vain, daemon=True).start()
    try:
        yield
    finally:
        done.set()
