"""The speculation cache: which outcomes to prepare for, and the speculations prepared (section
4.1).

A verification ends in an outcome v = (k, t*): k of the K drafted tokens accepted, then the bonus
token t*. The speculation cache (Def. 4) maps likely outcomes to the speculation that should follow
each. Its shape is the fan-out F_0..F_K (Def. 10): F_k bonus tokens are guessed for "k accepted",
sum_k F_k = budget. With acceptance rate a,

    P(k accepted) = a^k (1 - a)  for k < K,   a^K  for k = K,

and the bonus token escapes the draft's top F guesses with probability proportional to F^-r (Def.
11, the power law). Then the best shape is a capped geometric series (Thm. 12):

    F_k = F_0 a^(k/(1+r))  for k < K,         F_K = F_0 a^(K/(1+r)) (1-a)^(-1/(1+r)).
"""
import math
from collections import defaultdict
from statistics import linear_regression
from typing import Any, NamedTuple

import torch

# Who answers for a row: the cache; a backup (section 4.3); not this drafter, but another.
PRIMARY, BACKUP, NOBODY = 0, 1, -1
BLIND_ACCEPTANCE = 0.2  # first guess of the acceptance rate of a backup without a model


class Outcome(NamedTuple):
    """What one verification decided, for a batch of B rows, in host memory."""
    num_accepted: torch.Tensor  # [B] k, drafted tokens accepted; -1: the row has ended
    bonus: torch.Tensor         # [B] t*, the token the target added itself

    @property
    def ended(self) -> torch.Tensor:
        """Which rows `[B]` have ended."""
        return self.num_accepted < 0


class Speculation(NamedTuple):
    """K drafted tokens per row."""
    tokens: torch.Tensor  # [B, K]
    q: torch.Tensor       # [B, K, V] what they were drawn from; V = 0 when greedy: point masses
    source: torch.Tensor  # [B] PRIMARY, BACKUP, or NOBODY: no answer of this drafter's; host memory

    @classmethod
    def empty(cls, rows: int) -> "Speculation":
        """K = 0: what prefill (round 0) and autoregressive decoding verify."""
        return cls(torch.zeros(rows, 0, dtype=torch.long), torch.zeros(rows, 0, 0),
                   torch.full((rows,), BACKUP))


# ---- the shape: F_0..F_K ----

def acceptance_distribution(acceptance_rate: float, lookahead: int) -> list[float]:
    """P(k of K = `lookahead` tokens accepted), k = 0..K, at a = `acceptance_rate` for each token.

    >>> acceptance_distribution(0.5, 2)
    [0.5, 0.25, 0.25]
    """
    a = acceptance_rate
    return [a ** k * (1 - a) for k in range(lookahead)] + [a ** lookahead]


def geometric_fan_out(budget: int, lookahead: int, acceptance_rate: float,
                      miss_exponent: float) -> list[int]:
    """F_0..F_K: the integers of sum `budget` that minimise the misses sum_k P(k) F_k^-r (Thm. 12).

    Every guess goes where it lowers the sum most. As further guesses for the same k lower it less
    and less, these are simply the largest gains of all, and it is Theorem 12's closed form wherever
    that is integral. The power law says nothing of F = 0; we let the first guess halve the miss
    rate (0^-r counts as 2), so that a small budget leaves some F_k = 0, the unlikeliest k first.

    >>> geometric_fan_out(budget=35, lookahead=1, acceptance_rate=9/25, miss_exponent=1.0)
    [20, 15]
    """
    miss = [2.0, *(F ** -miss_exponent for F in range(1, budget + 1))]
    likelihood = acceptance_distribution(acceptance_rate, lookahead)
    gains = [(P * (miss[F] - miss[F + 1]), k) for k, P in enumerate(likelihood)
             for F in range(budget)]
    chosen = [k for _, k in sorted(gains, reverse=True)[:budget]]
    return [chosen.count(k) for k in range(lookahead + 1)]


def uniform_fan_out(budget: int, lookahead: int, *_) -> list[int]:
    """F_0..F_K as equal as integers of sum `budget` can be: what Theorem 12 improves on.

    >>> uniform_fan_out(12, 4)
    [3, 3, 2, 2, 2]
    """
    return [(budget + lookahead - k) // (lookahead + 1) for k in range(lookahead + 1)]


def fan_out_shape(policy: str, budget: int, lookahead: int, acceptance_rate: float,
                  miss_exponent: float) -> list[int]:
    """F_0..F_K by the policy of that name, or as it stands there: "4,3,2,1,2"."""
    if policy[0].isdigit():
        return [int(F) for F in policy.split(",")]
    return globals()[f"{policy}_fan_out"](budget, lookahead, acceptance_rate, miss_exponent)


def fit_power_law(miss_rates: list[float]) -> float:
    """The r of miss(F) proportional to F^-r (Def. 11), for miss rates of F = 1, 2, ...: minus the
    least-squares slope of log miss rate against log F. Kept within 0.1 and 10; with fewer than two
    misses to fit, 1."""
    points = [(math.log(F), math.log(miss)) for F, miss in enumerate(miss_rates, 1) if miss > 0]
    if len(points) < 2:
        return 1.0
    return min(max(-linear_regression(*zip(*points)).slope, 0.1), 10.0)


class Estimate:
    """a and r of one source of speculations (the primary, a backup), as decoding shows them. What
    is given counts as much as `PRIOR` observations."""
    PRIOR = 10

    def __init__(self, acceptance_rate: float, miss_exponent: float, depth: int):
        """First guesses of a and r; `depth`: how many ranks of guesses are told apart."""
        self.judged, self.accepted = self.PRIOR, self.PRIOR * acceptance_rate
        found = 1 - torch.arange(1, depth + 1).double() ** -miss_exponent / 2  # 0 counts as 2
        self.prior_ranks = self.PRIOR * torch.cat([torch.zeros(1), found, torch.ones(1)]).diff()
        self.ranks = torch.zeros(depth + 1, dtype=torch.long)  # bonus tokens; the last: beyond all

    def observe(self, num_accepted: torch.Tensor, rank: torch.Tensor, lookahead: int) -> None:
        """Verifications of this source's speculations, `[n]` each: how many tokens were accepted,
        and how many tokens did the draft think likelier than the bonus token?"""
        self.judged += int((num_accepted + 1).clamp(max=lookahead).sum())
        self.accepted += int(num_accepted.sum())
        deepest = len(self.ranks) - 1
        self.ranks += torch.bincount(rank.clamp(max=deepest), minlength=deepest + 1)

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.judged

    @property
    def miss_rates(self) -> list[float]:
        """The share of bonus tokens not among the draft's F likeliest, for F = 1..depth."""
        ranks = self.prior_ranks + self.ranks
        return (1 - ranks.cumsum(0)[:-1] / ranks.sum()).tolist()

    @property
    def miss_exponent(self) -> float:
        return fit_power_law(self.miss_rates)

    def hit_rate(self, fan_out: list[int]) -> float:
        """Probability that the outcome is in a cache of shape F_0..F_K."""
        miss = [1.0, *self.miss_rates]
        likelihood = acceptance_distribution(self.acceptance_rate, len(fan_out) - 1)
        return sum(P * (1 - miss[F]) for P, F in zip(likelihood, fan_out))


class FanOut:
    """The shape of the cache after the primary and after the backup, and which backup: decided by
    what was counted so far. Nothing that is timed decides."""

    def __init__(self, lookahead: int, budget: int, policy: str = "geometric",
                 backup: str = "neural", acceptance_rate: float = 0.8, miss_exponent: float = 1.0):
        """`policy` as in `fan_out_shape`; `backup` by name, or auto; first guesses of a and r."""
        self.lookahead, self.budget, self.policy, self.choice = lookahead, budget, policy, backup
        known = {name: Estimate(acceptance_rate, miss_exponent, budget)
                 for name in ("primary", "neural")}
        self.estimates = defaultdict(
            lambda: Estimate(BLIND_ACCEPTANCE, miss_exponent, budget), known)
        self.critical_batch_size = None

    def start(self, rows: int) -> None:
        """A batch of so many rows begins: choose its backup, and the shapes to begin with."""
        self.backup = self.choice if self.choice != "auto" else self.choose_backup(rows)
        self.shapes = [self.shape("primary"), self.shape(self.backup)]  # PRIMARY's, BACKUP's

    def shape(self, name: str) -> list[int]:
        """F_0..F_K for the verification of a speculation of this source."""
        estimate = self.estimates[name]
        return fan_out_shape(self.policy, self.budget, self.lookahead, estimate.acceptance_rate,
                             estimate.miss_exponent)

    def observe(self, source: torch.Tensor, outcome: Outcome, rank: torch.Tensor) -> None:
        """Count a verification: who drafted, `source` `[B]`; its outcome; and the `rank` `[B]` of
        the bonus token among the draft's guesses, 0 for the first."""
        for kind, name in ((PRIMARY, "primary"), (BACKUP, self.backup)):
            rows = ~outcome.ended & (source == kind)
            if rows.any():
                self.estimates[name].observe(outcome.num_accepted[rows], rank[rows], self.lookahead)
                self.shapes[kind] = self.shape(name)

    def choose_backup(self, rows: int) -> str:
        """Theorem 17. T_p = 1 and T_b = K / (K + 1) are what a well chosen K makes true."""
        primary, tokens = self.estimates["primary"], {
            name: expected_tokens(self.estimates[name].acceptance_rate, self.lookahead)
            for name in ("primary", "neural", "fast")}
        self.critical_batch_size = critical_batch_size(
            primary.hit_rate(self.shape("primary")), *tokens.values(),
            T_p=1.0, T_neural=self.lookahead / (self.lookahead + 1), T_fast=0.0)
        return "neural" if rows < self.critical_batch_size else "fast"

    def report(self) -> dict[str, Any]:
        """What was learnt and chosen, for --json."""
        primary, backup = self.estimates["primary"], self.estimates[self.backup]
        b = self.critical_batch_size
        return {"acceptance_rate_primary": primary.acceptance_rate,
                "acceptance_rate_backup": backup.acceptance_rate,
                "miss_exponent": primary.miss_exponent,
                "bonus_ranks": (primary.ranks + backup.ranks).tolist(),
                "fan_out": self.shapes[PRIMARY], "fan_out_after_backup": self.shapes[BACKUP],
                "backup": self.backup,
                "critical_batch_size": None if b is None or math.isinf(b) else b}


# ---- the cache ----

def likely_outcomes(scores: torch.Tensor, fan_out: torch.Tensor) -> Outcome:
    """The outcomes to prepare for: for each k the F_k bonus tokens of highest score, `[B, budget]`.

    scores `[B, K+1, V]`: the draft's, -inf for what cannot be; fan_out `[B, K+1]`, rows of one sum.
    Where F_k exceeds V, the last guess is repeated.

    >>> scores = torch.tensor([[[3.0, 1.0, 2.0, 0.0], [0.0, 9.0, 8.0, 7.0]]])
    >>> likely_outcomes(scores, torch.tensor([[1, 2]]))
    Outcome(num_accepted=tensor([[0, 1, 1]]), bonus=tensor([[0, 1, 2]]))
    """
    most, vocab_size = int(fan_out.max()), scores.shape[-1]
    ranked = scores.topk(min(most, vocab_size)).indices
    ranked = ranked[..., torch.arange(most, device=ranked.device).clamp(max=vocab_size - 1)]
    guessed = torch.arange(most, device=ranked.device) < fan_out.to(ranked.device)[..., None]
    rows = len(scores)  # in every one of them as many are guessed
    return Outcome(guessed.nonzero()[:, 1].view(rows, -1), ranked[guessed].view(rows, -1))


def bonus_rank(scores: torch.Tensor, outcome: Outcome) -> torch.Tensor:
    """How many tokens had a higher score `[B, K+1, V]` than the bonus token, `[B]`: of a hit, fewer
    than F_k."""
    at_k = scores[torch.arange(len(scores)), outcome.num_accepted]
    return (at_k > at_k.gather(1, outcome.bonus[:, None].to(scores.device))).sum(1).cpu()


def matches(guesses: Outcome, outcome: Outcome) -> torch.Tensor:
    """Which of the guesses `[B, n]` is the outcome `[B]`?"""
    return ((guesses.num_accepted == outcome.num_accepted[:, None])
            & (guesses.bonus == outcome.bonus[:, None]))


class SpeculationCache(NamedTuple):
    """S^T (Def. 4): for every row n guessed outcomes, and the speculation prepared for each."""
    guesses: Outcome      # num_accepted, bonus: [B, n], in host memory
    tokens: torch.Tensor  # [B, n, K]
    q: torch.Tensor       # [B, n, K, V]; V = 0 when greedy

    @classmethod
    def empty(cls, rows: int, lookahead: int, like: torch.Tensor) -> "SpeculationCache":
        """Guesses nothing, so that every look-up misses; q has width, type and device of `like`
        `[V]`."""
        no_outcome = torch.full((rows, 1), -2)
        return cls(Outcome(no_outcome, no_outcome), like.new_zeros(rows, 1, lookahead).long(),
                   like.new_zeros(rows, 1, lookahead, len(like)))

    def look_up(self, outcome: Outcome) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`(tokens [B, K], q [B, K, V], hit [B])`: what was prepared for the outcome; where there
        is no hit it means nothing.

        >>> guesses = Outcome(torch.tensor([[0, 0, 1]]), torch.tensor([[7, 8, 7]]))
        >>> prepared = torch.tensor([[[1, 2], [3, 4], [5, 6]]])
        >>> cache = SpeculationCache(guesses, prepared, torch.zeros(1, 3, 2, 0))
        >>> tokens, q, hit = cache.look_up(Outcome(torch.tensor([1]), torch.tensor([7])))
        >>> tokens, hit
        (tensor([[5, 6]]), tensor([True]))
        """
        match = matches(self.guesses, outcome)
        row, branch = torch.arange(len(match)), match.long().argmax(1)
        return self.tokens[row, branch], self.q[row, branch], match.any(1)


# ---- what it is worth, in units of one verification ----

def expected_tokens(acceptance_rate: float, lookahead: int) -> float:
    """E(a, K) = (1 - a^(K+1)) / (1 - a): the accepted tokens and the bonus token of a round
    (Leviathan et al. 2023).

    >>> expected_tokens(0.5, 2)
    1.75
    """
    return sum(acceptance_rate ** k for k in range(lookahead + 1))


def throughput(hit_rate: float, tokens_hit: float, tokens_miss: float, T_p: float, T_b: float,
               batch_size: float = 1) -> float:
    """Tokens per row and verification time of SSD at batch size b (Cor. 16):

        (p E_hit + (1-p) E_miss) / (p^b max(1, T_p) + (1 - p^b) (1 + T_b)).

    At b = 1 this is Theorem 7, the speedup over autoregressive decoding; at p = 0, plain SD.

    >>> throughput(hit_rate=0.5, tokens_hit=4, tokens_miss=2, T_p=0.8, T_b=0.5)
    2.4
    """
    all_hit = hit_rate ** batch_size
    return ((hit_rate * tokens_hit + (1 - hit_rate) * tokens_miss)
            / (all_hit * max(1.0, T_p) + (1 - all_hit) * (1 + T_b)))


def speedup_over_sd_bounds(hit_rate: float, tokens_hit: float, tokens_sd: float,
                           T_sd: float) -> tuple[float, float]:
    """Between what SSD's speed over plain SD lies, if its backup is its primary and T_p <= 1 (Cor.
    9); with tokens_hit = tokens_sd the lower bound is at least 1 (Cor. 8):

        (1 + T_SD) / (1 + T_SD (1 - p)) * E_hit / E_SD  <=  speedup  <=  (1 + T_SD) E_hit / E_SD."""
    most = (1 + T_sd) * tokens_hit / tokens_sd
    return most / (1 + T_sd * (1 - hit_rate)), most


def critical_batch_size(hit_rate: float, tokens_hit: float, tokens_neural: float,
                        tokens_fast: float, T_p: float, T_neural: float, T_fast: float) -> float:
    """b* (Thm. 17): the neural backup has the higher `throughput` below this batch size, the fast
    one above. 0 if the fast backup is better at every size, infinity if the neural is.
    `tokens_*`: expected tokens of the round that follows a hit, a neural and a fast backup.

    >>> round(critical_batch_size(0.8, 4, 4, 1, T_p=1, T_neural=0.5, T_fast=0), 2)
    1.95
    """
    neural, fast = (hit_rate * tokens_hit + (1 - hit_rate) * tokens
                    for tokens in (tokens_neural, tokens_fast))
    at_once = max(1.0, T_p)
    # neural wins iff gain(x) > 0, linear in x = p^b, which falls from 1 (b = 0) to 0 (b = infinity)
    at_zero = neural * (1 + T_fast) - fast * (1 + T_neural)
    slope = fast * (1 + T_neural - at_once) - neural * (1 + T_fast - at_once)
    if hit_rate == 1 or at_zero >= 0:
        return math.inf
    if hit_rate == 0 or at_zero + slope <= 0:
        return 0.0
    return math.log(-at_zero / slope) / math.log(hit_rate)
