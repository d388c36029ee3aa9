"""When each piece of work began and ended; passes that take as long as on other hardware."""
import time
from contextlib import contextmanager

import torch

SPIN = 0.0003  # seconds by which a sleep may be late


class Stopwatch:
    """When each piece of work began and ended: `with watch("verify"): ...`. A GPU takes the times
    itself (CUDA events), so that the host need not wait for it."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.marks = []  # (work, start, end)

    @contextmanager
    def __call__(self, work: str):
        start = self.now()
        yield
        self.marks.append((work, start, self.now()))

    def now(self) -> "float | torch.cuda.Event":
        """Seconds; or an event that the GPU has yet to reach."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> list[tuple[str, float, float]]:
        """(work, start, end), in seconds, of all work since the last reading."""
        marks = self.marks
        self.marks = []
        if self.on_gpu:
            last = self.now()
            last.synchronize()
            now = time.perf_counter()
            marks = [(work, *(now - event.elapsed_time(last) / 1000 for event in events))
                     for work, *events in marks]
        return marks


class Pace:
    """Makes every decoding pass take at least `seconds`, as on the hardware whose latency that is:
    a pass that was computed faster sleeps for the rest. 0: off.

    This assumes that a pass takes as long for one token as for hundreds (RESULTS.md, Method)."""

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds
        self.passes = 0  # since the last reading
        self.kept = 0    # those that were fast enough

    @contextmanager
    def __call__(self):
        due = time.perf_counter() + self.seconds
        yield
        if not self.seconds:
            return
        self.passes += 1
        self.kept += time.perf_counter() <= due
        time.sleep(max(0.0, due - time.perf_counter() - SPIN))
        while time.perf_counter() < due:
            pass

    def read(self) -> tuple[int, int]:
        """(kept, passes) since the last reading."""
        counts = self.kept, self.passes
        self.kept = 0
        self.passes = 0
        return counts
