"""Processes: starting the second rank, a rank that died, the one sentence of an error.

torchrun starts all ranks. `python saguaro.py` is rank 0, and starts the draft's rank itself, which
tells rank 0 of its errors on standard output, where it prints nothing else. Its standard input is a
pipe in which nothing is written: it closes when rank 0 ends, however that ends.
"""
import atexit
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator

from tqdm import tqdm

from cli.settings import DecodingSettings, parse
from cli.text import visible
from engine.errors import UserError

STARTED = "SAGUARO_STARTED"  # set in a rank that rank 0 has started
STORE_FD = "SAGUARO_STORE_FD"  # set in that rank 0: the socket of the store where they meet
GRACE = 2  # seconds in which rank 0 may itself find the fault that ended the draft's rank
GONE = ("closed by peer", "reset by peer", "broken pipe", "no route", "timed out")


def launch(kind: type[DecodingSettings], module: str) -> None:
    """Run `module.main(settings)` as this program; never returns. First the settings are parsed and
    the second rank is started, then the module is imported: torch takes seconds."""
    prepare_process()
    settings = start(kind)
    run(settings, importlib.import_module(module).main)
    sys.exit()


def prepare_process() -> None:
    """Let Ctrl-C end every rank at once, and text be printed whatever the output's encoding, or if
    it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    sys.stdout.reconfigure(errors="backslashreplace")
    # waiting threads give their cores back sooner: twice as fast beside busy programs
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    gc.set_threshold(100_000)  # a garbage collection would delay a pass
    tqdm.set_lock(threading.RLock())  # its own lock, for processes, would outlive Ctrl-C


def start(kind: type[DecodingSettings]) -> DecodingSettings:
    """Parse and check the settings of this run; start the other rank."""
    try:
        settings = parse(kind)
    except UserError as problem:
        fail(problem)
    if STARTED in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:  # by rank 0, or by torchrun
        threading.Thread(target=exit_with_parent, args=(os.getppid(),), daemon=True).start()
    if settings.mode == "ssd" and os.environ.get("WORLD_SIZE", "1") == "1":
        start_draft_rank()
    if os.environ.get("RANK", "0") == "0" and sys.stderr.isatty():
        print("loading ...", file=sys.stderr, flush=True)
    return settings


def start_draft_rank() -> None:
    """Become rank 0 of two, and start rank 1 with the same command line. They use nothing but this
    machine's loopback, and a port that is theirs from now on."""
    listener = socket.create_server(("127.0.0.1", 0))
    loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]),
                   "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0",
                   # both join a store, as torchrun's ranks do; `Placement.join` starts it
                   "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
                   "GLOO_SOCKET_IFNAME": "".join(loopback)}
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each rank sets its own number of threads
    environment = os.environ | {"RANK": "1", "LOCAL_RANK": "1", STARTED: "1"}
    draft = subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=environment,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, errors="replace")
    threading.Thread(target=exit_with_draft, args=(draft,), daemon=True).start()
    atexit.register(draft.kill)
    os.environ[STORE_FD] = str(listener.detach())


def run(settings: DecodingSettings, main: Callable[[DecodingSettings], None]) -> None:
    """Call main, and report user errors in one line."""
    import torch
    name = f"rank {os.environ.get('RANK', 0)}"
    try:
        main(settings)
        sys.stdout.flush()
    except UserError as problem:
        fail(problem)
    except OSError as problem:  # standard output is closed, or a disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(problem, BrokenPipeError):
            sys.exit(141)
        report(problem)
        sys.exit(1)
    except (RuntimeError, MemoryError) as problem:
        message = str(problem)
        out_of_memory = isinstance(problem, (torch.OutOfMemoryError, MemoryError))
        if out_of_memory or "allocate memory" in message:
            reason = ". ".join(message.split(". ")[:2])
            fail(f"{name} lacks memory ({reason}): try more target ranks, or a smaller "
                 "--batch-size, --max-new-tokens or --budget")
        if not any(sign in message.lower() for sign in GONE):
            raise
        time.sleep(2 * GRACE)  # meanwhile `exit_with_draft` reports why
        report(f"{name} stops: another rank is gone")
        sys.exit(1)
    if torch.distributed.is_initialized():
        gc.collect()  # NCCL would wait for ever for the end of graphs with its collectives
        torch.distributed.destroy_process_group()


def report(problem: Exception | str) -> None:
    file = sys.stdout if STARTED in os.environ else sys.stderr
    print(visible(f"{Path(sys.argv[0]).name}: {problem}"), file=file, flush=True)


def fail(problem: UserError | str) -> None:
    """Print one sentence, and exit with status 2."""
    report(f"error: {problem}")
    sys.exit(2)


# ---- threads that watch ----

def exit_with_draft(draft: subprocess.Popen) -> None:
    """Exit when the draft's rank has failed, and report why."""
    error = draft.stdout.read()
    if draft.wait() == 0:
        return
    time.sleep(GRACE)
    if not error or draft.returncode < 0:  # the gloo of PyTorch 2.10 prints there
        report(f"the draft's rank has ended with status {draft.returncode}")
    print(visible(error), end="", file=sys.stderr, flush=True)
    os._exit(2 if draft.returncode == 2 else 1)


def exit_with_parent(parent: int) -> None:
    """Exit soon after rank 0, or torchrun, whose process `parent` is, has been killed."""
    if STARTED in os.environ:
        os.read(0, 1)  # standard input, until it closes
    while STARTED not in os.environ and os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


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
