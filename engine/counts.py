"""Counts which of the draft's guesses were right, for bench.py and its figures."""
import math
from statistics import linear_regression

import torch


class GuessCounts:
    """`table` `[2, K+1, n+1]`: how often, by who drafted, k tokens were accepted and the bonus
    token was the draft's guess number 0 to n-1, or, in the last column, none of its n guesses. So
    it tells what a cache of any other shape would have held of the very same outcomes."""

    def __init__(self, lookahead: int, num_guesses: int):
        self.num_guesses = num_guesses
        self.table = torch.zeros(2, lookahead + 1, num_guesses + 1, dtype=torch.long)
        self.last = None  # the guesses of the round under way

    def next_round(self, guesses: torch.Tensor, source: torch.Tensor, text: torch.Tensor,
                   length: torch.Tensor) -> None:
        """Count what became of the last round's guesses, and keep this round's: `guesses`
        `[B, K+1, n]`, for every k the likeliest bonus token first, after what `source` `[B]`
        drafted. The last outcome is read off the end of the verified `text` `[B, W]`, of `length`
        `[B]`: so nothing is counted while the target waits. Round 0 (K = 0) does not count."""
        last = self.last
        self.last = (guesses, source, length) if guesses.shape[1] > 1 else None
        if last and self.last:
            last_guesses, last_source, last_length = last
            k = length - last_length - 1
            active = k >= 0  # a finished row has not grown
            found = last_guesses[torch.arange(len(k)), k] == text.gather(1, length[:, None] - 1)
            number = found.long().argmax(1).where(found.any(1), self.num_guesses)
            index = (last_source[active], k[active], number[active])
            self.table.index_put_(index, torch.tensor(1), accumulate=True)


# ---- of such a table `[K+1, n+1]` ----

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
    times = table.sum(0).double()
    return (1 - times.cumsum(0)[:-1] / times.sum()).tolist()


def fit_power_law(miss_rates: list[float]) -> float:
    """The r of miss(F) proportional to F^-r, for miss rates of F = 1, 2, ...: minus the slope of
    log miss rate against log F, kept within 0.1 and 10; with fewer than two misses, 1."""
    points = [(math.log(F), math.log(miss)) for F, miss in enumerate(miss_rates, 1) if miss > 0]
    if len(points) < 2:
        return 1.0
    slope = linear_regression(*zip(*points)).slope
    return min(max(-slope, 0.1), 10.0)


def fit_shape(table: torch.Tensor) -> dict[str, float]:
    """The settings for Theorem 12's shape, a and r."""
    return {"acceptance_rate": counted_acceptance_rate(table),
            "miss_exponent": fit_power_law(counted_miss_rates(table))}
