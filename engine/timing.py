"""Times every piece of work, and can let it take as long as on other hardware."""
import time
from contextlib import contextmanager

import torch

SPIN = 0.0003  # seconds by which a sleep may be late


class PacedClock:
    """Records when each piece of a model's work began and ended: `with clock("verify"): ...`. A GPU
    takes the times itself (CUDA events), so that the host need not wait for it.

    With a `pace`, work takes at least so many seconds for every pass in it, as on hardware of that
    latency: work that was done sooner sleeps for the rest. This assumes that a pass takes as long
    for one token as for hundreds (docs/RESULTS.md, Method)."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pace = 0.0  # off
        self.marks = []  # (work, start, end, passes, done in time for the pace)
        self.passes = 0  # in the work at hand; the model counts them

    @contextmanager
    def __call__(self, work: str):
        start = self.now()
        begun = time.perf_counter()
        self.passes = 0
        yield
        in_time = self.wait(begun + self.passes * self.pace) if self.pace else None
        self.marks.append((work, start, self.now(), self.passes, in_time))

    def wait(self, due: float) -> bool:
        """Sleep until the work at hand may end. Returns False if it has ended too late."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        in_time = time.perf_counter() <= due
        time.sleep(max(0.0, due - time.perf_counter() - SPIN))
        while time.perf_counter() < due:
            pass
        return in_time

    def now(self) -> "float | torch.cuda.Event":
        """Return the time in seconds, or an event that the GPU has yet to reach."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> list[tuple[str, float, float, int, bool | None]]:
        """Return all work since the last reading: (work, start, end, passes, in time), in seconds.
        In time is None if there was no pace."""
        marks = self.marks
        self.marks = []
        if self.device.type != "cuda":
            return marks
        last = self.now()
        last.synchronize()
        now = time.perf_counter()
        in_seconds = []
        for work, start, end, *how in marks:
            started = now - start.elapsed_time(last) / 1000
            ended = now - end.elapsed_time(last) / 1000
            in_seconds.append((work, started, ended, *how))
        return in_seconds
