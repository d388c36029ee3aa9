"""Placement of ranks: devices, cores, process groups."""
import atexit
import json
import os
import secrets
import sys
import threading
import traceback
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Iterator, Mapping

import torch
import torch.distributed as dist

from cli.launch import STORE, is_alone, is_gone, watch
from cli.settings import DecodingSettings
from engine.errors import UserError, reported_as

# A rank may load 140 GB, or be stopped by Ctrl-Z. The death of one closes its sockets: at once.
PATIENCE = timedelta(days=1)
IN_TURN = threading.Lock()  # held while several ranks decode
BROKEN_OFF = threading.Event()  # set once a batch broke off, on whose end the other ranks wait
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds, and in how many


class Placement:
    """Says which rank this process is and where it computes: rank r of a machine on GPU r, if there
    is one, else on the CPU. In ssd the last of several ranks holds the draft, others the target."""
    draft_process = None  # see run/assist.py, if this process has started it
    assisted = False  # does rank 1 decode what rank 0 asks for? Else it runs the same lines

    def __init__(self, settings: DecodingSettings, environment: Mapping[str, str] | None = None):
        """`environment` says which rank this is. None: this process's own, if a launcher wrote
        it."""
        if environment is None:  # RANK=16 may be the rank of somebody's LoRA
            environment = {} if is_alone() else os.environ
        self.store = environment.get(STORE)
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        given = [environment.get(name, value) for name, value in alone.items()]
        with reported_as(f"a launcher has set {', '.join(alone)} to {given}", ValueError):
            self.rank, self.world_size, local_rank, local_world_size = map(int, given)
            if not 0 <= self.rank < self.world_size:
                raise ValueError("ranks count from 0, up to WORLD_SIZE")
        self.draft_rank = self.world_size - 1 if settings.mode == "ssd" else 0
        # the ranks that hold the target: those before the draft's own, or all
        self.tp_size = self.draft_rank or self.world_size
        self.holds_draft = self.rank == self.draft_rank and settings.mode != "ar"
        self.device = device_of(local_rank, settings.device)
        self.devices = [str(self.device)]  # of all ranks
        self.world_group = None  # the default one, of gloo, unless every rank has a GPU
        self.cores = cores_of(local_rank, local_world_size)
        if "GOMP_SPINCOUNT" in os.environ:  # a command; the threads of scripts are their own affair
            threads = threads_for(len(self.cores), local_world_size)
            if self.device.type == "cuda" or any(settings.pace):
                threads = 1  # of several, one is late whenever another program runs
            torch.set_num_threads(threads)
        # cuDNN, which PyTorch prefers on Hopper, plans its attention anew for every length of text
        torch.backends.cuda.enable_cudnn_sdp(False)

    def join(self, asked: dict[str, Any]) -> dist.ProcessGroup | None:
        """Meet the other ranks. Returns the group of those that hold the target, if there are
        several. Groups with a GPU for every rank use NCCL, others gloo. Raises `UserError`, on
        every rank, naming what differs if not all were `asked` the same."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        elif not self.draft_process and hasattr(os, "sched_setaffinity"):
            with suppress(OSError):  # some sandboxes forbid it
                os.sched_setaffinity(0, self.cores)  # or ranks that wake each other share one
        if self.device.type == "cpu":  # threads that share a core spin while they wait
            torch.set_num_threads(min(len(self.cores), torch.get_num_threads()))
        waits = f"rank {self.rank} of {self.world_size} waits for the others to start"
        asked = {name: str(value) for name, value in asked.items()}
        where = f" in {self.store} (see TMPDIR)" if self.store else ""
        with (watch(waits, 10, 600),
              reported_as(f"the ranks cannot meet{where}", (RuntimeError, ValueError))):
            if not dist.is_initialized():  # else an earlier `Job`, or the script, has a group
                self.meet()
            ranks = gather((str(self.device), asked))
        differ = {}
        for _, others in ranks:
            differ |= others.items() ^ asked.items()  # by name
        if differ:
            names = ", ".join(sorted(differ))
            raise UserError(f"all ranks must be started with the same {names}")
        self.devices = [device for device, _ in ranks]
        if "cpu" not in self.devices:
            self.world_group = self.new_group(self.world_size)
        return self.new_group(self.tp_size) if self.tp_size > 1 else None

    def meet(self) -> None:
        """Join the default group."""
        store = dist.FileStore(self.store, 2) if self.store else None
        given = {"store": store, "rank": self.rank, "world_size": 2} if store else {}
        dist.init_process_group("gloo", timeout=PATIENCE, **given)
        atexit.register(leave_groups)
        if store:  # gloo takes whoever connects first, from any account, for the other rank
            store.set(str(self.rank), secrets.token_hex())
            words = torch.tensor([list(store.get(str(rank))) for rank in range(2)])  # [2, 64]
            heard = list(torch.zeros_like(words))
            dist.all_gather(heard, words[self.rank])
            if not torch.stack(heard).equal(words):
                raise UserError("another program has connected in the place of a rank")

    @contextmanager
    def raising_together(self) -> Iterator[None]:
        """Raise on all ranks the `UserError` that one of them raises in this block."""
        problem = None
        try:
            yield
        except UserError as raised:
            problem = raised
        problems = gather(problem and str(problem)) if self.world_size > 1 else []
        for said in filter(None, problems):
            problem = problem or UserError(said)
        if problem:
            raise problem

    def new_group(self, size: int) -> dist.ProcessGroup:
        """Make a group of the first `size` ranks."""
        backend = "gloo" if "cpu" in self.devices[:size] else "nccl"
        group = dist.new_group(list(range(size)), PATIENCE, backend)
        if backend == "nccl" and self.rank < size:  # connects at the first message: now
            atexit.unregister(leave_groups)  # where graphs live, or a rank is gone, NCCL would wait
            with watch(f"rank {self.rank} waits for NCCL to connect {size} GPUs: try "
                       "NCCL_P2P_DISABLE=1; NCCL_DEBUG=INFO tells more", 20, 300):
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)
                torch.cuda.synchronize(self.device)
        return group

    @property
    def on_gpus(self) -> bool:
        """Return whether this rank, and all that hold the same model, compute on GPUs."""
        peers = self.devices[:self.tp_size] if self.rank < self.tp_size else self.devices[-1:]
        return "cpu" not in peers


def device_of(local_rank: int, asked: str) -> torch.device:
    """Return the device of a rank of this machine, by --device."""
    if asked == "cuda":
        with reported_as("--device cuda", (AssertionError, RuntimeError)):
            torch.cuda.init()
    # the driver may list GPUs that this PyTorch cannot use
    may_use_gpus = asked != "cpu" and torch.cuda.is_available()
    if may_use_gpus and local_rank < torch.cuda.device_count():
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def cores_of(local_rank: int, local_world_size: int) -> list[int]:
    """Return the cores of a rank of this machine: an equal share of those that are allowed."""
    cores = list(range(os.cpu_count() or 1))
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // local_world_size)
    first = local_rank * share % len(cores)
    return cores[first:first + share]


def threads_for(cores: int, local_world_size: int) -> int:
    """Return how many threads a rank has for so many cores: no more than its share of a container's
    quota, and than somebody chose."""
    threads = cores
    with suppress(OSError, ValueError):  # there is no such file, or it says "max"
        allowed, period = map(int, CPU_QUOTA.read_text().split())
        threads = max(1, min(threads, allowed // (period * local_world_size)))
    by_torchrun = "1" if "TORCHELASTIC_RUN_ID" in os.environ else None  # if nobody chose
    if os.environ.get("OMP_NUM_THREADS") not in (None, by_torchrun):
        threads = min(threads, torch.get_num_threads())
    return threads


def leave_groups() -> None:
    """Leave all groups. Gloo's threads need Python to drop what they sent, and abort it if it is
    ending. They live as long as their group does, so nothing of ours holds one that was left."""
    # a message that failed holds its group, by its traceback
    for problem in (sys.exception(), getattr(sys, "last_value", None)):
        if problem:
            traceback.clear_frames(problem.__traceback__)
    if dist.is_initialized():
        dist.destroy_process_group()


if hasattr(os, "register_at_fork"):  # what is forked has none of gloo's threads to wait for
    os.register_at_fork(after_in_child=lambda: atexit.unregister(leave_groups))


@contextmanager
def in_turn() -> Iterator[None]:
    """Keep the messages of all decoders of this program apart, or ranks would wait for ever. Says
    in one sentence, and not in gloo's, that another rank is gone."""
    if BROKEN_OFF.is_set():
        raise UserError("a batch broke off, and the other ranks are still at work on it: end all")
    if not IN_TURN.acquire(blocking=False):
        raise UserError("another decoder of this program is at work with other ranks: one at a "
                        "time, or take Saguaro(in_turns=True)")
    try:
        yield
    except RuntimeError as problem:
        if not is_gone(problem):
            raise
        traceback.clear_frames(problem.__traceback__)  # they hold the group
        raise RuntimeError("another rank is gone: its own report says why") from None
    finally:
        IN_TURN.release()


def gather(value: Any) -> list:
    """Return the `value` of each rank: numbers, texts, lists and dictionaries. They travel as JSON:
    what PyTorch's own function sends is a program, which would be run here."""
    text = json.dumps(value).encode()
    length = torch.tensor(len(text))
    dist.all_reduce(length, dist.ReduceOp.MAX)
    padded = bytearray(text.ljust(int(length)))
    message = torch.frombuffer(padded, dtype=torch.uint8)
    texts = [torch.empty_like(message) for _ in range(dist.get_world_size())]
    dist.all_gather(texts, message)
    return [json.loads(bytes(text.tolist())) for text in texts]
