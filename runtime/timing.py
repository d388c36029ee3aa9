"""When each piece of work began and ended; work that takes as long as on other hardware."""
import time
from contextlib import contextmanager
from typing import Any

import torch

SPIN = 0.0003  # seconds by which a sleep may be late


class Stopwatch:
    """When each piece of a model's work began and ended: `with watch("verify"): ...`. A GPU takes
    the times itself (CUDA events), so that the host need not wait for it.

    Paced, work takes at least `pace` seconds for every pass in it, as on the hardware whose latency
    that is: if it was done sooner, it sleeps for the rest. This assumes that a pass takes as long
    for one token as for hundreds (RESULTS.md, Method)."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pace = 0.0  # off
        self.marks = []  # (work, start, end)
        self.passes = 0  # the model counts them
        self.kept = 0    # those whose work was done in time

    @contextmanager
    def __call__(self, work: str):
        start = self.now()
        due = time.perf_counter()
        before = self.passes
        yield
        if self.pace:
            self.wait(due, self.passes - before)
        self.marks.append((work, start, self.now()))

    def wait(self, start: float, passes: int) -> None:
        """Until so many passes may end."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        due = start + passes * self.pace
        if time.perf_counter() <= due:
            self.kept += passes
        time.sleep(max(0.0, due - time.perf_counter() - SPIN))
        while time.perf_counter() < due:
            pass

    def now(self) -> "float | torch.cuda.Event":
        """Seconds; or an event that the GPU has yet to reach."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> dict[str, Any]:
        """Of all work since the last reading: "spans", (work, start, end) in seconds, and "pace",
        (kept, passes)."""
        marks = self.marks
        pace = (self.kept, self.passes if self.pace else 0)
        self.marks = []
        self.kept = 0
        self.passes = 0
        if self.device.type == "cuda":
            last = self.now()
            last.synchronize()
            now = time.perf_counter()
            marks = [(work, *(now - event.elapsed_time(last) / 1000 for event in events))
                     for work, *events in marks]
        return {"spans": marks, "pace": pace}
