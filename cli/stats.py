"""Counts and times of decoding, and the speedup that Theorem 7 predicts from them; --trace."""
import json
import math
import socket
from dataclasses import dataclass, field
from typing import Any, Sequence

import torch.distributed as dist

from cache import BACKUP, PRIMARY, Outcome, Speculation, throughput
from cli.placement import Placement
from cli.settings import open_for_writing
from draft_worker import Plan


@dataclass
class Stats:
    """Counts and times (seconds) of decoding; prefill, and the token that it yields, are apart."""
    lookahead: int = 0
    choices: dict[str, Any] = field(default_factory=dict)  # see `choices`; none: no draft
    in_turns: bool = False      # one process does the work of two, so times mean nothing
    tokens: int = 0             # new tokens, with those of prefill
    prefill_tokens: int = 0     # one a prompt
    prefill_seconds: float = 0.0
    seconds: float = 0.0        # decoding, wall clock
    rounds: int = 0
    row_rounds: int = 0         # rounds, once for every active row
    accepted: int = 0
    rejected: int = 0           # at most one per row and round
    hits: int = 0
    hit_tokens: int = 0         # of rounds after a hit
    log: list[tuple[int, int, float]] = field(default_factory=list)  # (rows, tokens, seconds)
    spans: list[tuple[str, float, float]] = field(default_factory=list)  # (work, start, end)
    traced: list[dict[str, Any]] = field(default_factory=list)  # rounds, as events of --trace
    punctual_passes: int = 0    # of both models, in work done in time for --pace
    paced_passes: int = 0       # in all paced work
    guess_counts: list = field(default_factory=list)  # see `GuessCounts`

    def count_round(self, is_prefill: bool, seconds: float,
                    rows: list[tuple[int, int, bool]]) -> None:
        """Count one round; `rows`: (tokens accepted, tokens kept, hit) of each active row."""
        num_kept = sum(kept for _, kept, _ in rows)
        self.tokens += num_kept
        if is_prefill:
            self.prefill_tokens += num_kept
            self.prefill_seconds += seconds
            return
        self.seconds += seconds
        self.rounds += 1
        self.row_rounds += len(rows)
        self.log.append((len(rows), num_kept, seconds))
        for accepted, kept, hit in rows:
            self.accepted += accepted
            self.rejected += accepted < self.lookahead
            self.hits += hit
            self.hit_tokens += kept * hit

    def trace_round(self, number: int, now: float, speculation: Speculation, outcome: Outcome,
                    last_round: list[tuple[int, int, list[int]]]) -> None:
        """Remember a round for --trace; `last_round`: see `Sequences`."""
        hits = (speculation.source == PRIMARY).tolist()
        for row, k, _ in last_round:
            told = {"prompt": self.prefill_tokens - len(hits) + row, "round": number,
                    "drafted": speculation.tokens[row].tolist(), "hit": hits[row],
                    "source": "cache" if hits[row] else "backup", "k": k,
                    "t*": int(outcome.bonus[row])}
            self.traced.append({"name": "round", "ph": "i", "s": "t", "pid": 0, "tid": 0,
                                "ts": 1e6 * now, "args": told})

    def add(self, spans: Sequence[tuple[str, float, float]] = (),
            pace: tuple[int, int] = (0, 0), guess_counts: list | None = None) -> None:
        """Add what a worker measured in a batch. `pace`: (punctual passes, paced passes);
        `guess_counts`: of all batches so far."""
        self.spans += spans
        self.punctual_passes += pace[0]
        self.paced_passes += pace[1]
        self.guess_counts = guess_counts or self.guess_counts

    def seconds_of(self, work: str) -> list[float]:
        """Seconds of each piece of this work."""
        return [end - start for name, start, end in self.spans if name == work]

    def mean_seconds(self, work: str) -> float | None:
        seconds = self.seconds_of(work)
        return ratio(sum(seconds), len(seconds))

    def summary(self) -> dict[str, Any]:
        """The statistics of `--output`; None: not measured. `acceptance_rate`: the a of the paper's
        geometric model, by maximum likelihood. T_p (a pre-speculation: trunk and tree) and T_b (a
        backup) are in units of a verification."""
        decoded = self.tokens - self.prefill_tokens
        K = self.lookahead
        verify = self.mean_seconds("verify")
        trunk = self.mean_seconds("trunk")
        tree = self.mean_seconds("tree")
        seconds = None if self.in_turns else self.seconds
        names = ("guess_counts", "guess_counts_after_backup")
        return {
            "tokens": self.tokens,
            "seconds": seconds,
            "tokens_per_second": ratio(decoded, seconds),
            "rounds": self.rounds,
            "tokens_per_round": ratio(decoded, self.row_rounds),
            "acceptance_rate": ratio(self.accepted, self.accepted + self.rejected),
            "hit_rate": ratio(self.hits, self.row_rounds) if K else None,
            "E_hit": ratio(self.hit_tokens, self.hits),
            "E_miss": ratio(decoded - self.hit_tokens, self.row_rounds - self.hits),
            "verifier_utilisation": ratio(sum(self.seconds_of("verify")), seconds),
            "T_p": ratio(trunk + tree, verify) if trunk and tree else None,
            "T_b": ratio(self.mean_seconds("backup"), verify),
            "prefill_seconds": self.prefill_seconds,
            "pace_kept": ratio(self.punctual_passes, self.paced_passes),
        } | self.choices | dict(zip(names, self.guess_counts))


def choices(plan: Plan, downweight: float) -> dict[str, Any]:
    """The choices of sections 4.1 to 4.3, as `--output` names them. `critical_batch_size` None: it
    chose nothing, or the neural backup is better at every size."""
    b = plan.critical_batch_size
    return {"fan_out": plan.fan_out[PRIMARY], "fan_out_after_backup": plan.fan_out[BACKUP],
            "downweight": downweight, "backup": plan.backup,
            "critical_batch_size": None if b == math.inf else b}


def write_trace(path: str, placement: Placement, stats: Stats) -> None:
    """Write the work of every rank, and the rounds, in Chrome's Trace Event Format (microseconds).
    Ranks of one machine share its clock. All ranks call this, and rank 0 writes."""
    holds = {"verify": placement.holds_target}  # all other work is the draft's
    spans = [span for span in stats.spans if holds.get(span[0], placement.holds_draft)]
    ranks = [(socket.gethostname(), spans)] * placement.world_size
    if placement.world_size > 1:
        dist.all_gather_object(ranks, ranks[0])
    events = stats.traced
    for rank, (machine, spans) in enumerate(ranks):
        name = f"rank {rank}, {placement.devices[rank]}, by the clock of {machine}"
        track = {"pid": rank, "tid": 0}
        events.append(track | {"name": "process_name", "ph": "M", "args": {"name": name}})
        events += [track | {"name": work, "ph": "X", "ts": 1e6 * start, "dur": 1e6 * (end - start)}
                   for work, start, end in spans]
    if placement.rank == 0:
        with open_for_writing("--trace", path) as file:
            json.dump({"traceEvents": events}, file)


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def theorem_7(summary: dict[str, Any], batch_size: int = 1) -> float:
    """The speedup over autoregressive decoding that Theorem 7 (in a batch, Cor. 16) predicts from
    the parts measured. What was not measured, such as E_miss without a miss, counts as 0."""
    parts = [summary[name] or 0.0 for name in ("hit_rate", "E_hit", "E_miss", "T_p", "T_b")]
    return throughput(*parts, batch_size)
