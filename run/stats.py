"""Counts and times of decoding, and the speedup that Theorem 7 predicts from them; --trace."""
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from cache import BACKUP, PRIMARY, RowRound, throughput
from draft_worker import Plan


class TimedRound(NamedTuple):
    """Holds a round of a batch, and when it began and ended, in seconds."""
    number: int  # 0: the batch's prefill
    start: float
    end: float
    rows: list[RowRound]  # the active ones

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Span(NamedTuple):
    """Holds a piece of a rank's work, as `PacedClock.read` tells it."""
    rank: int
    work: str
    start: float
    end: float
    passes: int
    in_time: bool | None  # None: there was no pace


@dataclass
class Stats:
    """Collects what was decoded, and its times in seconds."""
    choices: dict[str, Any] = field(default_factory=dict)  # see `choices_of`; none: no draft
    in_turns: bool = False  # one process does the work of two, so times mean nothing
    log: list[TimedRound] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)  # of all ranks, without prefill
    guess_counts: list = field(default_factory=list)  # sums of `GuessCounts.table`,
    fan_outs: list = field(default_factory=list)      # and of `GuessCounts.fan_outs`

    def add(self, reports: list[dict[str, Any]]) -> None:
        """Add what each rank reports of a batch: its spans, `GuessCounts.tables` (of the rank that
        drafts), and the rounds (of rank 0)."""
        for rank, report in enumerate(reports):
            self.spans += [Span(rank, *span) for span in report["spans"]]
            for number, start, end, rows in report["rounds"]:
                rows = [RowRound(*row) for row in rows]
                self.log.append(TimedRound(number, start, end, rows))
            if report["guesses"]:
                guess_counts, fan_outs = report["guesses"]
                self.guess_counts = added(self.guess_counts, guess_counts)
                self.fan_outs = added(self.fan_outs, fan_outs)

    def seconds_of(self, work: str) -> list[float]:
        """Return the seconds of each piece of this work."""
        return [span.end - span.start for span in self.spans if span.work == work]

    def mean_seconds(self, work: str) -> float | None:
        seconds = self.seconds_of(work)
        return ratio(sum(seconds), len(seconds))

    def pace_kept(self) -> float | None:
        """Return the share of the passes that were done in time for the pace."""
        paced = [span for span in self.spans if span.in_time is not None]
        kept = sum(span.passes for span in paced if span.in_time)
        return ratio(kept, sum(span.passes for span in paced))

    def mean_fan_outs(self) -> dict[str, list[float]]:
        """Return the mean F_0..F_K, after a hit and after a backup, where an idea has chosen them
        round by round."""
        means = {}
        for name, total in zip(("fan_out", "fan_out_after_backup"), self.fan_outs):
            if any(total):
                budget = sum(self.choices["fan_out"])
                means[name] = [round(budget * F / sum(total), 1) for F in total]
        return means

    def summary(self) -> dict[str, Any]:
        """Return the statistics, None for what was not measured. `acceptance_rate` is the paper's
        a (not with blocks), by maximum likelihood. T_p (trunk and tree), T_b: in verifications."""
        prefill = [timed for timed in self.log if timed.number == 0]
        decoding = [timed for timed in self.log if timed.number > 0]
        seconds = None if self.in_turns else sum(timed.seconds for timed in decoding)
        rows = [row for timed in decoding for row in timed.rows]
        after_hit = [len(row.new_tokens) for row in rows if row.source == PRIMARY]
        after_miss = [len(row.new_tokens) for row in rows if row.source == BACKUP]
        tokens = sum(after_hit + after_miss)
        verify = self.mean_seconds("verify")
        ahead = [self.mean_seconds(work) for work in ("trunk", "tree")]
        return {
            "tokens": tokens + sum(len(timed.rows) for timed in prefill),
            "seconds": seconds,
            "tokens_per_second": ratio(tokens, seconds),
            "rounds": len(decoding),
            "tokens_per_round": ratio(tokens, len(rows)),
            "acceptance_rate": acceptance_rate(rows),
            "hit_rate": ratio(len(after_hit), sum(row.drafted != [] for row in rows)),  # ar: 0
            "E_hit": ratio(sum(after_hit), len(after_hit)),
            "E_miss": ratio(sum(after_miss), len(after_miss)),
            "verifier_utilisation": ratio(verify, ratio(seconds, len(decoding))),
            "T_p": ratio(sum(ahead), verify) if all(ahead) else None,
            "T_b": ratio(self.mean_seconds("backup"), verify),
            "prefill_seconds": sum(timed.seconds for timed in prefill),
            "pace_kept": self.pace_kept(),
        } | self.choices | self.mean_fan_outs()

    def trace(self, devices: list[str]) -> dict[str, Any]:
        """Return the work of every rank and, beside rank 0's, the rounds of every row of its batch,
        in Chrome's Trace Event Format (whole microseconds: a round ends where the next begins)."""
        events = []
        for rank, device in enumerate(devices):
            title = {"name": f"rank {rank}, {device}, by the clock of its machine"}
            events.append({"name": "process_name", "ph": "M", "pid": 1 + rank, "args": title})
        for span in self.spans:
            events.append(trace_slice(span.rank, 0, span.work, span.start, span.end, {}))
        num_prompts = 0
        for timed in self.log:
            if timed.number == 0:
                first = num_prompts  # of this batch
                num_prompts += len(timed.rows)
            for row in timed.rows:
                facts = {"prompt": first + row.row, "round": timed.number, "drafted": row.drafted,
                         "k": row.num_accepted, "t*": row.bonus, "kept": len(row.new_tokens),
                         "hit": row.source == PRIMARY,
                         "source": "cache" if row.source == PRIMARY else "backup"}
                track = 1 + row.row
                events.append(trace_slice(0, track, "round", timed.start, timed.end, facts))
        return {"traceEvents": events}


def trace_slice(rank: int, track: int, name: str, start: float, end: float,
                facts: dict[str, Any]) -> dict[str, Any]:
    begin = round(1e6 * start)
    # viewers take process 0 and thread 0 for the idle ones of Linux
    return {"name": name, "ph": "X", "pid": 1 + rank, "tid": 1 + track, "args": facts,
            "ts": begin, "dur": round(1e6 * end) - begin}


def acceptance_rate(rows: list[RowRound]) -> float | None:
    """Return the paper's a by maximum likelihood: of the tokens verified, up to the first
    rejection, the share that was accepted. None: nothing was verified."""
    accepted = sum(row.num_accepted for row in rows)
    rejected = sum(row.num_accepted < len(row.drafted) for row in rows)  # at most 1 each
    return ratio(accepted, accepted + rejected)


def choices_of(plan: Plan, downweight: float) -> dict[str, Any]:
    """Return the choices of sections 4.1 to 4.3, as `--output` names them. `critical_batch_size` is
    None if it chose nothing, or if the neural backup is better at every size."""
    b = plan.critical_batch_size
    return {"fan_out": plan.fan_out[PRIMARY], "fan_out_after_backup": plan.fan_out[BACKUP],
            "downweight": downweight, "backup": plan.backup,
            "critical_batch_size": None if b == math.inf else b}


def theorem_7(summary: dict[str, float | None], batch_size: int = 1) -> float:
    """Return the `throughput` by what was measured, under the names of `Stats.summary`.
    What was not measured, such as E_miss without a miss, counts as 0. Where T_p > 1 a miss, too,
    waits for the pre-speculation: see `cache.throughput`."""
    names = ("hit_rate", "E_hit", "E_miss", "T_p", "T_b")
    hit_rate, E_hit, E_miss, T_p, T_b = [summary[name] or 0.0 for name in names]
    late = max(0.0, T_p - 1)
    return throughput(hit_rate, E_hit, E_miss, T_p, T_b + late, batch_size)


def added(total: list, table: list) -> list:
    """Return the sum of two nested lists of numbers, of which the first may be empty."""
    return (torch.tensor(total) + torch.tensor(table)).tolist() if total else table


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None
