"""The draft's process of a `Saguaro`, where no launcher has started one: both its ends.

The user's program is rank 0, and holds the target. Rank 1 holds the draft, and only assists: before
each batch it hears with which settings it is decoded, and how many came before. A batch depends on
nothing else, so a process that is started anew goes on where another has ended. A benchmark's rank
1 assists, too.
"""
import json
import os
import subprocess
import sys
import time
import weakref
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from cli.launch import LOOPBACK, STORE, new_store, start_rank_1
from cli.settings import ROOT, Settings, read_prompts
from engine.errors import UserError
from run.decoder import Decoder
from run.job import Job, Models
from run.placement import Placement, gather, leave_groups

end_of_last = None  # ends the last process: PyTorch has one default group in a program


def job_of_calls(settings: Settings, environment: dict[str, str] | None = None) -> Job:
    """Return a job whose texts come call by call. Of those in the settings only the length counts,
    for buffers."""
    has_prompts = settings.prompt or settings.prompts is not None
    rows = read_prompts(settings) if has_prompts else []
    return Job(settings, Placement(settings, environment), rows)


# ---- rank 0: the user's program ----

class DraftProcess:
    """Starts rank 1, and ends it with this object, or with this program, however that ends."""

    def __init__(self, settings: Settings):
        self.settings = settings  # with which the draft is loaded
        self.process = None
        self.end = lambda: None

    def be_there(self, placement: Placement) -> None:
        """Start the process, anew if it has ended. Raises `UserError` if there is no such draft."""
        if self.process and self.end.alive and self.process.poll() is None:
            return
        if self.process:
            print("starting the draft's process anew ...", file=sys.stderr, flush=True)
        self.start(placement)
        with placement.raising_together():
            pass  # the draft is loaded there

    def start(self, placement: Placement) -> None:
        """Start the process, in the place of another `Saguaro`'s, and join it."""
        global end_of_last
        if end_of_last:
            end_of_last()
        if dist.is_initialized():
            raise UserError("this program has a process group, and PyTorch lets it have one: leave "
                            "it by torch.distributed.destroy_process_group(), or take "
                            "Saguaro(in_turns=True)")
        placement.store = new_store()
        modules = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        self.process = start_rank_1(["-Pc", "from cli.launch import assist; assist()"],
                                    {STORE: placement.store, "PYTHONPATH": modules})
        self.end = end_of_last = weakref.finalize(
            self, end, self.process, placement.store, torch.get_num_threads(), os.getpid())
        self.process.stdin.write(json.dumps(asdict(self.settings)).encode() + b"\n")
        self.process.stdin.flush()
        while not os.path.getsize(placement.store):  # PyTorch is imported there
            if self.process.poll() is not None:
                raise UserError(f"the draft's process has ended: status {self.process.returncode}")
            time.sleep(0.01)
        # PyTorch's hook would begin every line of a traceback with [rank0]
        with patch.dict(os.environ, LOOPBACK), patch.object(sys, "excepthook", sys.excepthook):
            # Ranks meet under a group's number, and PyTorch counts one that failed to form, too. It
            # counts from 0 again once a default group was left.
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            dist.destroy_process_group()
            placement.join({})


def end(process: subprocess.Popen, store: str, threads: int, owner: int) -> None:
    """Leave the group, and end rank 1, which has nothing to tidy up."""
    if os.getpid() == owner:  # not where a process that was forked from it ends
        leave_groups()
        process.kill()
        process.communicate()
        Path(store).unlink(missing_ok=True)
        torch.set_num_threads(threads)


# ---- rank 1: the draft's process ----

def main(settings: Settings) -> None:
    """Load the draft, and decode what rank 0 asks for. This process ends with rank 0."""
    job = job_of_calls(settings)
    job.placement.join({})
    with job.placement.raising_together():
        draft = job.load_draft()
    decode_as_asked(job.models(None, draft))


def decode_as_asked(models: Models) -> None:
    """Be rank 1: decode each batch that rank 0 asks for, until it asks for none."""
    asked = gather(None)[0]
    while asked:
        decoder = Decoder(Settings(**asked["settings"]), models)
        decoder.num_batches = asked["num_batches"]
        try:
            decoder([])
        except UserError:  # that rank 0 has raised, too
            if decoder.midway:
                raise
        asked = gather(None)[0]
