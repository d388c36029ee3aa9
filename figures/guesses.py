"""What a table of `GuessCounts` says of other caches: hits, acceptance, misses, the best shape.

`table` `[K+1, n+1]`: how often k tokens were accepted and the bonus token was the draft's guess
number 0 to n-1 or, in the last column, none of them.
"""
import math
from statistics import linear_regression

import torch


def counted_hit_rate(table: torch.Tensor, fan_out: list[int]) -> float:
    """The share of the outcomes that a cache of shape F_0..F_K would have held."""
    guesses = table[:, :-1]
    hits = sum(row[:F].sum() for row, F in zip(guesses, fan_out))
    return float(hits / table.sum())


def counted_acceptance_rate(table: torch.Tensor) -> float:
    """The maximum-likelihood a: tokens accepted / tokens verified, up to the first rejection."""
    times = table.sum(1).double()
    k = torch.arange(len(times)).double()
    accepted = float(times @ k)
    rejected = float(times[:-1].sum())
    return accepted / (accepted + rejected)


def counted_miss_rates(table: torch.Tensor) -> list[float]:
    """The share of bonus tokens not among the draft's F likeliest, for F = 1..n."""
    times = table.sum(0).double()
    within = times.cumsum(0)[:-1]
    return (1 - within / times.sum()).tolist()


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
