"""Counts that influence no decision: which of the draft's guesses each bonus token was.

The table of these ranks tells what a cache of any other shape or budget would have held of the very
same outcomes, and which a (section 4.1) and r (Def. 11) fit them.
"""
import math
from statistics import linear_regression

import torch

from cache import Outcome, Speculation


class RankCounts:
    """`table` `[2, K+1, n+1]`: how often, by who drafted, k tokens were accepted and the bonus
    token was the guess of that rank; the last column: none of the n guesses."""

    def __init__(self, lookahead: int, num_guesses: int):
        self.num_guesses = num_guesses
        self.table = torch.zeros(2, lookahead + 1, num_guesses + 1, dtype=torch.long)

    def count(self, speculation: Speculation, outcome: Outcome, ranked: torch.Tensor) -> None:
        """Of active rows. `ranked` `[B, K+1, n]`: the guesses by k, the likeliest first. Round 0
        (K = 0) and rounds without guesses are not counted."""
        if ranked.shape[1] == 1:
            return
        guesses = ranked[torch.arange(len(ranked)), outcome.num_accepted]
        found = guesses == outcome.bonus[:, None]
        rank = found.long().argmax(1).where(found.any(1), ranked.shape[-1])
        active = ~outcome.finished
        index = (speculation.source[active], outcome.num_accepted[active], rank[active])
        self.table.index_put_(index, torch.tensor(1), accumulate=True)


# ---- of a table `[K+1, n+1]` ----

def counted_hit_rate(table: torch.Tensor, fan_out: list[int]) -> float:
    """The share of the outcomes that a cache of shape F_0..F_K would have held."""
    held = torch.arange(table.shape[1] - 1) < torch.tensor(fan_out)[:, None]
    return float(table[:, :-1][held].sum() / table.sum())


def counted_acceptance_rate(table: torch.Tensor) -> float:
    """The maximum-likelihood a: tokens accepted / tokens verified, up to the first rejection."""
    times = table.sum(1).double()
    accepted = float(times @ torch.arange(len(times)).double())
    return accepted / (accepted + float(times[:-1].sum()))


def counted_miss_rates(table: torch.Tensor) -> list[float]:
    """The share of bonus tokens not among the draft's F likeliest, for F = 1..n."""
    ranks = table.sum(0).double()
    return (1 - ranks.cumsum(0)[:-1] / ranks.sum()).tolist()


def fit_power_law(miss_rates: list[float]) -> float:
    """The r of miss(F) proportional to F^-r (Def. 11), for miss rates of F = 1, 2, ...: minus the
    least-squares slope of log miss rate against log F. Kept within 0.1 and 10; with fewer than two
    misses to fit, 1."""
    points = [(math.log(F), math.log(miss)) for F, miss in enumerate(miss_rates, 1) if miss > 0]
    if len(points) < 2:
        return 1.0
    slope = linear_regression(*zip(*points)).slope
    return min(max(-slope, 0.1), 10.0)
