"""Times every piece of work, and can let it take as long as on other hardware."""
import time
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

SPIN = 0.0003  # seconds by which a sleep may be late


class PacedClock:
    """Records when each piece of a model's work began and ended: `with clock("verify"): ...`. A GPU
    takes the times itself (CUDA events), so that the host need not wait for it. There the work is
    also an NVTX range of this name.

    With a `pace`, work takes at least so many seconds for every pass in it, as on hardware of that
    latency: work that was done sooner sleeps for the rest. This assumes that a pass takes as long
    for one token as for hundreds (RESULTS.md, Method)."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pace = 0.0  # off
        self.marks = []  # (work, start, end)
        self.passes = 0           # in the work at hand; the model counts them
        self.paced_passes = 0     # in all paced work
        self.punctual_passes = 0  # in paced work that was done in time

    @contextmanager
    def __call__(self, work: str):
        start = self.now()
        begun = time.perf_counter()
        self.passes = 0
        on_gpu = self.device.type == "cuda"
        with torch.cuda.nvtx.range(work) if on_gpu else nullcontext():
            yield
        if self.pace:
            self.wait(begun + self.passes * self.pace)
        self.marks.append((work, start, self.now()))

    def wait(self, due: float) -> None:
        """Sleep until the work at hand may end."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.paced_passes += self.passes
        if time.perf_counter() <= due:
            self.punctual_passes += self.passes
        time.sleep(max(0.0, due - time.perf_counter() - SPIN))
        while time.perf_counter() < due:
            pass

    def now(self) -> "float | torch.cuda.Event":
        """The time in seconds, or an event that the GPU has yet to reach."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> dict[str, Any]:
        """The times of all work since the last reading: "spans", (work, start, end) in seconds, and
        "pace", (punctual passes, paced passes)."""
        marks = self.marks
        pace = (self.punctual_passes, self.paced_passes)
        self.marks = []
        self.punctual_passes = 0
        self.paced_passes = 0
        if self.device.type == "cuda":
            last = self.now()
            last.synchronize()
            now = time.perf_counter()
            marks = [(work, *(now - event.elapsed_time(last) / 1000 for event in events))
                     for work, *events in marks]
        return {"spans": marks, "pace": pace}
