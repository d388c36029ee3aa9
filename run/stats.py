"""Counts and times of decoding, and the speedup that Theorem 7 predicts from them; --trace."""
import math
from dataclasses import dataclass, field
from typing import Any

from cache import BACKUP, PRIMARY, RowRound, throughput
from draft_worker import Plan


@dataclass
class Stats:
    """Collects what was decoded, and its times in seconds."""
    choices: dict[str, Any] = field(default_factory=dict)  # see `choices_of`; none: no draft
    in_turns: bool = False    # one process does the work of two, so times mean nothing
    # (number, start, end, active rows) of every round; round 0 of a batch is its prefill
    log: list[tuple[int, float, float, list[RowRound]]] = field(default_factory=list)
    # (rank, work, start, end, passes, in time) of all ranks, without prefill: `PacedClock.read`
    spans: list[tuple[int, str, float, float, int, bool | None]] = field(default_factory=list)
    guesses: tuple[list, list] = ([], [])  # `GuessCounts.tables`

    def add(self, ranks: list[tuple[list, list]]) -> None:
        """Add, of every rank, the spans of a batch, and `GuessCounts.tables` of all so far."""
        for rank, (spans, guesses) in enumerate(ranks):
            self.spans += [(rank, *span) for span in spans]
            self.guesses = guesses or self.guesses

    def seconds_of(self, work: str) -> list[float]:
        """Return the seconds of each piece of this work."""
        return [end - start for _, name, start, end, *_ in self.spans if name == work]

    def mean_seconds(self, work: str) -> float | None:
        seconds = self.seconds_of(work)
        return ratio(sum(seconds), len(seconds))

    def summary(self) -> dict[str, Any]:
        """Return the statistics, None for what was not measured. `acceptance_rate` is the paper's
        a (not with blocks), by maximum likelihood. T_p (trunk and tree), T_b: in verifications."""
        decoding = [(end - start, rows) for number, start, end, rows in self.log if number > 0]
        prefill = [(end - start, rows) for number, start, end, rows in self.log if number == 0]
        seconds = None if self.in_turns else sum(seconds for seconds, _ in decoding)
        rows = [row for _, rows in decoding for row in rows]
        after_hit = [len(row.new_tokens) for row in rows if row.source == PRIMARY]
        after_miss = [len(row.new_tokens) for row in rows if row.source == BACKUP]
        tokens = sum(after_hit + after_miss)
        accepted = sum(row.num_accepted for row in rows)
        rejected = sum(row.num_accepted < len(row.drafted) for row in rows)  # at most 1 each
        verify = self.mean_seconds("verify")
        ahead = [self.mean_seconds(work) for work in ("trunk", "tree")]
        paced = [(passes, in_time) for *_, passes, in_time in self.spans if in_time is not None]
        budget = sum(self.choices.get("fan_out", []))
        means = {name: [round(budget * F / sum(total), 1) for F in total] for name, total in
                 zip(("fan_out", "fan_out_after_backup"), self.guesses[1]) if any(total)}
        return {
            "tokens": tokens + sum(len(rows) for _, rows in prefill),
            "seconds": seconds,
            "tokens_per_second": ratio(tokens, seconds),
            "rounds": len(decoding),
            "tokens_per_round": ratio(tokens, len(rows)),
            "acceptance_rate": ratio(accepted, accepted + rejected),
            "hit_rate": ratio(len(after_hit), sum(row.drafted != [] for row in rows)),  # ar: 0
            "E_hit": ratio(sum(after_hit), len(after_hit)),
            "E_miss": ratio(sum(after_miss), len(after_miss)),
            "verifier_utilisation": ratio(verify, ratio(seconds, len(decoding))),
            "T_p": ratio(sum(ahead), verify) if all(ahead) else None,
            "T_b": ratio(self.mean_seconds("backup"), verify),
            "prefill_seconds": sum(seconds for seconds, _ in prefill),
            "pace_kept": ratio(sum(passes * in_time for passes, in_time in paced),
                               sum(passes for passes, _ in paced)),
        } | self.choices | means

    def trace(self, devices: list[str]) -> dict[str, Any]:
        """Return the work of every rank and, beside rank 0's, the rounds of every row of its batch,
        in Chrome's Trace Event Format (whole microseconds: a round ends where the next begins)."""
        spans = [(rank, 0, *span, {}) for rank, *span, _, _ in self.spans]
        prompts = 0
        for number, start, end, rows in self.log:
            if number == 0:
                first, prompts = prompts, prompts + len(rows)
            for row, source, drafted, k, bonus, kept in rows:
                told = {"prompt": first + row, "round": number, "drafted": drafted, "k": k,
                        "t*": bonus, "kept": len(kept), "hit": source == PRIMARY,
                        "source": ("cache", "backup")[source]}
                spans.append((0, 1 + row, "round", start, end, told))
        # viewers take process 0 and thread 0 for the idle ones of Linux
        events = [{"name": work, "ph": "X", "pid": 1 + rank, "tid": 1 + track, "args": told,
                   "ts": round(1e6 * start), "dur": round(1e6 * end) - round(1e6 * start)}
                  for rank, track, work, start, end, told in spans]
        for rank, device in enumerate(devices):
            title = {"name": f"rank {rank}, {device}, by the clock of its machine"}
            events.append({"name": "process_name", "ph": "M", "pid": 1 + rank, "args": title})
        return {"traceEvents": events}


def choices_of(plan: Plan, downweight: float) -> dict[str, Any]:
    """Return the choices of sections 4.1 to 4.3, as `--output` names them. `critical_batch_size` is
    None if it chose nothing, or if the neural backup is better at every size."""
    b = plan.critical_batch_size
    return {"fan_out": plan.fan_out[PRIMARY], "fan_out_after_backup": plan.fan_out[BACKUP],
            "downweight": downweight, "backup": plan.backup,
            "critical_batch_size": None if b == math.inf else b}


def theorem_7(summary: dict[str, float | None], batch_size: int = 1) -> float:
    """Return the `throughput` by what was measured, under the names of `Stats.summary`.
    What was not measured, such as E_miss without a miss, counts as 0."""
    names = ("hit_rate", "E_hit", "E_miss", "T_p", "T_b")
    return throughput(*(summary[name] or 0.0 for name in names), batch_size)


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None
