"""Processes: parsing before torch is imported, starting the second rank, Ctrl-C, a rank that died,
and the one sentence of an error.

torchrun starts all ranks. `python saguaro.py` is rank 0, and starts the draft's rank itself.
"""
import atexit
import gc
import importlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Callable

from runtime.settings import DecodingSettings, UserError, in_standard_input, parse, read_prompts

interrupted = threading.Event()  # Ctrl-C
decoding = threading.Event()     # until then Ctrl-C simply ends the process


def launch(kind: type[DecodingSettings], module: str) -> None:
    """Run `module.main(settings)` as this program; never returns. Importing the module takes
    seconds, with torch, so the settings are parsed, and the second rank is started, before."""
    handle_interrupt()
    settings = start(kind)
    run(settings, importlib.import_module(module).main)
    sys.exit()


def start(kind: type[DecodingSettings]) -> DecodingSettings:
    """The settings of this run, checked; the other rank is on its way."""
    gc.set_threshold(100_000)  # imports make many objects, no garbage: searching them took 0.6 s
    # threads that wait for each other give their cores back sooner: 1.4 times as fast beside two
    # busy programs, as fast alone
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        settings = parse(kind)
        if not in_standard_input(settings):
            read_prompts(settings)
    except UserError as problem:
        fail(problem, is_reporter=os.environ.get("LOCAL_RANK", "0") == "0")
    if "RANK" in os.environ:  # started by torchrun, or by another rank
        threading.Thread(target=exit_with_parent, args=(os.getppid(),), daemon=True).start()
    if settings.mode == "ssd" and os.environ.get("WORLD_SIZE", "1") == "1":
        start_draft_rank()
    if os.environ.get("RANK", "0") == "0" and sys.stderr.isatty():
        print("loading ...", file=sys.stderr, flush=True)
    return settings


def start_draft_rank() -> None:
    """Become rank 0 of two, and start rank 1 with the same command line."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2",
                   "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # of a torchrun with one process
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each rank sets its own number of threads
    draft = subprocess.Popen([sys.executable, *sys.orig_argv[1:]],
                             env=os.environ | {"RANK": "1", "LOCAL_RANK": "1"})
    threading.Thread(target=exit_with_child, args=(draft,), daemon=True).start()
    atexit.register(draft.kill)


def run(settings: DecodingSettings, main: Callable[[DecodingSettings], None]) -> None:
    """Call main. Report user errors in one line; exit silently on an interrupt or a closed pipe."""
    import torch
    import torch.distributed as dist
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    is_draft = 0 < rank == world_size - 1 and settings.mode == "ssd"
    name = f"rank {rank} ({'draft' if is_draft else 'target'})"
    try:
        main(settings)
        sys.stdout.flush()
    except UserError as problem:  # until the ranks meet, all find the same faults
        if rank > 0 and dist.is_initialized():
            time.sleep(2)  # if rank 0 found it, too, it ends all ranks meanwhile
        fail(problem, is_reporter=rank == 0 or dist.is_initialized())
    except OSError as problem:  # standard output is closed, or full
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
            fail(f"{name} lacks memory ({reason}): a smaller --batch-size, --max-new-tokens or "
                 "--budget may help, or more target ranks")
        if "closed by peer" not in message and "reset by peer" not in message:
            raise
        if not interrupted.is_set():
            time.sleep(2)  # the other may have reported why, and then its launcher ends this one
            print(f"{name} stops: another rank is gone", file=sys.stderr)
            sys.exit(1)
    if dist.is_initialized():
        if torch.cuda.is_initialized():
            gc.collect()  # NCCL would wait for ever for the end of graphs with its collectives
        dist.destroy_process_group()
    if interrupted.is_set():
        sys.exit(130)


def report(problem: Exception | str) -> None:
    print(f"{Path(sys.argv[0]).name}: {problem}", file=sys.stderr, flush=True)


def fail(problem: UserError | str, is_reporter: bool = True) -> None:
    """One sentence, exit status 2. Of several ranks with the same fault one reports it, and the
    others leave it the time."""
    if is_reporter:
        if decoding.is_set():
            print(flush=True)  # the text that was streamed ends in the middle of a line
        report(f"error: {problem}")
    else:
        time.sleep(3)
    sys.exit(2)


# ---- threads that watch ----

def handle_interrupt() -> None:
    """On Ctrl-C decoding ends at the next round; before it, and at a second Ctrl-C, everything ends
    at once. A thread does this: the main one may be waiting for a rank that has stopped."""
    signals, pressed = socket.socketpair()
    pressed.setblocking(False)
    signal.set_wakeup_fd(pressed.detach())
    signal.signal(signal.SIGINT, lambda *_: None)

    def wait() -> None:
        first = math.inf
        while signals.recv(1):
            now = time.monotonic()
            if not decoding.is_set() or now > first + 1:
                os._exit(130)  # a second late: torchrun passes on what the terminal sent already
            interrupted.set()
            first = min(first, now)

    threading.Thread(target=wait, daemon=True).start()


def exit_with_child(draft: subprocess.Popen) -> None:
    """Exit when the draft's rank has failed, even where this rank is not waiting for it."""
    status = draft.wait()
    if status == 0:
        return
    if status == 2:  # the draft's rank has reported why
        os._exit(2)
    time.sleep(2)  # this rank may find out by itself, and report it
    report(f"the draft's rank has ended with status {status}")
    os._exit(1)


def exit_with_parent(parent: int) -> None:
    """Exit soon after torchrun, or whoever started this rank, has been killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
