"""The speculation cache: which outcomes to prepare for, and the speculations prepared (Def. 4, section 4.1).

A verification ends in an outcome v = (k, t*): k of the K drafted tokens accepted, then the bonus token t*. The
speculation cache (Def. 4) maps likely outcomes to the speculation that should follow each. Its shape is the
fan-out F_0..F_K: F_k bonus tokens are guessed for "k accepted", sum_k F_k = budget. With acceptance rate a,

    P(k accepted) = a^k (1 - a)  for k < K,   a^K  for k = K,

and the bonus token escapes the draft's top F guesses with probability proportional to F^-r (Def. 11, the power
law). Then the best shape is a capped geometric series (Thm. 12):

    F_k = F_0 a^(k/(1+r))  for k < K,         F_K = F_0 a^(K/(1+r)) (1-a)^(-1/(1+r)).
"""
import heapq
import itertools
import math
import statistics
from dataclasses import dataclass, field
from typing import Iterable, NamedTuple

import torch


class Outcome(NamedTuple):
    """What one verification decided, for a batch of B rows, in host memory."""
    num_accepted: torch.Tensor  # [B] k, the number of drafted tokens accepted; negative: the row is finished
    bonus: torch.Tensor         # [B] t*, the token the target added itself


class Speculation(NamedTuple):
    """K drafted tokens per row."""
    tokens: torch.Tensor        # [B, K]
    q: torch.Tensor | None      # [B, K, V] the distributions they were drawn from; None: point masses (greedy)
    hit: torch.Tensor           # [B] bool, in host memory: served from the cache, or drafted after a miss?

    @classmethod
    def empty(cls, rows: int) -> "Speculation":
        """K = 0: what prefill (round 0) and autoregressive decoding verify."""
        return cls(torch.zeros(rows, 0, dtype=torch.long), None, torch.zeros(rows, dtype=torch.bool))


def acceptance_distribution(acceptance_rate: float, lookahead: int) -> list[float]:
    """P(k of `lookahead` tokens accepted) for k = 0..K, when each is accepted with probability `acceptance_rate`."""
    a = acceptance_rate
    return [a ** k * (1 - a) for k in range(lookahead)] + [a ** lookahead]


def geometric_fan_out(budget: int, lookahead: int, acceptance_rate: float, miss_exponent: float) -> list[int]:
    """F_0..F_K: the integers of sum `budget` that minimise the miss probability sum_k P(k) F_k^-r (Thm. 12).

    Guess by guess, each goes where it lowers the sum most; for convex terms this greedy choice is optimal, and it
    is Theorem 12's closed form wherever that is integral. The power law says nothing of F = 0; we let the first
    guess halve the miss rate (0^-r counts as 2), so that a small budget leaves some F_k = 0, the unlikeliest k
    first."""
    likelihood = acceptance_distribution(acceptance_rate, lookahead)

    def gain(k: int, fan_out: int) -> float:
        return likelihood[k] * ((fan_out ** -miss_exponent if fan_out else 2.0) - (fan_out + 1) ** -miss_exponent)

    fan_out = [0] * (lookahead + 1)
    heap = [(-gain(k, 0), k) for k in range(lookahead + 1)]
    heapq.heapify(heap)
    for _ in range(budget):
        k = heap[0][1]
        fan_out[k] += 1
        heapq.heapreplace(heap, (-gain(k, fan_out[k]), k))
    return fan_out


def uniform_fan_out(budget: int, lookahead: int) -> list[int]:
    """F_0..F_K as equal as integers of sum `budget` can be: the shape that Theorem 12 improves on."""
    return [(budget + lookahead - k) // (lookahead + 1) for k in range(lookahead + 1)]


def branches(fan_out: list[int]) -> torch.Tensor:
    """F_0..F_K guess by guess, `[2, budget]`: the k that each is for, and its rank among those for the same k."""
    return torch.tensor([(k, rank) for k, F in enumerate(fan_out) for rank in range(F)]).T


class FanOut:
    """The cache's shape: one for rounds that verify the primary's speculation, one for the backup's (F^b, section
    4.1).

    `policy` is "uniform", "geometric" (Theorem 12 with the given a and r) or "auto": Theorem 12 with a and r
    estimated as decoding goes. a comes from counts of accepted and rejected tokens, apart for primary and backup; r
    from the rank at which bonus tokens stood among the draft's guesses, as the slope of log miss rate against log
    F. What is given is the prior, worth `PRIOR` observations."""
    PRIOR = 10

    def __init__(self, policy: str, budget: int, lookahead: int, acceptance_rate: float, backup_acceptance_rate: float,
                 miss_exponent: float):
        self.policy, self.budget, self.lookahead = policy, budget, lookahead
        self.miss_exponent = miss_exponent
        self.accepted = {source: self.PRIOR * rate for source, rate in
                         ((True, acceptance_rate), (False, backup_acceptance_rate))}  # by "was it a hit?"
        self.judged = {True: float(self.PRIOR), False: float(self.PRIOR)}
        miss = [1.0, *(fan_out ** -miss_exponent / 2 for fan_out in range(1, budget + 1)), 0.0]
        self.prior_ranks = [self.PRIOR * (more - less) for more, less in itertools.pairwise(miss)]
        self.ranks = [0] * (budget + 1)  # bonus tokens by rank among the guesses; the last: beyond all of them
        self.reshape()

    def observe(self, hit: torch.Tensor, num_accepted: torch.Tensor, rank: torch.Tensor) -> None:
        """What one verification showed, each `[B]`: was its speculation the primary's, how many of its tokens were
        accepted, and the rank of the bonus token among the draft's guesses at that position (from 0; `budget` or
        more: beyond all)."""
        for source, k in zip(hit.tolist(), num_accepted.tolist()):
            self.accepted[source] += k
            self.judged[source] += min(k + 1, self.lookahead)
        for place in rank.tolist():
            self.ranks[min(place, self.budget)] += 1
        if self.policy == "auto":
            self.miss_exponent = fit_power_law(self.miss_rates())
            self.reshape()

    def acceptance_rate(self, hit: bool) -> float:
        """a_p (`hit`) or a_b: per-token acceptance rate of the primary's or the backup's speculations."""
        return self.accepted[hit] / self.judged[hit]

    def miss_rates(self) -> list[float]:
        """The share of bonus tokens not among the draft's F likeliest, for F = 1..budget."""
        ranks = [prior + seen for prior, seen in zip(self.prior_ranks, self.ranks)]
        total = sum(ranks)
        return [1 - found / total for found in itertools.accumulate(ranks[:-1])]

    def reshape(self) -> None:
        self.shapes = {source: self.shape(self.acceptance_rate(source)) for source in (False, True)}
        self.branches = torch.stack([branches(shape) for shape in self.shapes.values()])

    def shape(self, acceptance_rate: float) -> list[int]:
        if self.policy == "uniform":
            return uniform_fan_out(self.budget, self.lookahead)
        return geometric_fan_out(self.budget, self.lookahead, min(acceptance_rate, 1.0), self.miss_exponent)

    def table(self, hit: torch.Tensor) -> torch.Tensor:
        """The `branches` of every row, `[B, 2, budget]`: the primary's where `hit` `[B]`, else the backup's."""
        return self.branches[hit.long()]


def fit_power_law(miss_rates: list[float]) -> float:
    """The r of miss(F) proportional to F^-r (Def. 11): minus the least-squares slope of log miss rate against log F,
    F = 1, 2, ... Kept within 0.1 and 10; with fewer than two misses to fit, 1."""
    points = [(math.log(fan_out), math.log(miss)) for fan_out, miss in enumerate(miss_rates, start=1) if miss > 0]
    if len(points) < 2:
        return 1.0
    return min(max(-statistics.linear_regression(*zip(*points)).slope, 0.1), 10.0)


def rank_guesses(logits: torch.Tensor, drafted: torch.Tensor, depth: int) -> torch.Tensor:
    """The draft's candidates for the bonus token at every position, likeliest first: `[B, K+1, depth]`.

    logits `[B, K+1, V]`: the draft's own, before each drafted token and after the last; drafted `[B, K]`. The
    drafted token s_{k+1} cannot be the bonus token after a rejection (p < q there), so it comes last for k < K.
    `depth` is capped at V."""
    logits = logits.clone()
    logits[:, :drafted.shape[1]].scatter_(-1, drafted.unsqueeze(-1), -torch.inf)
    return logits.topk(min(depth, logits.shape[-1])).indices


def choose_guesses(ranked: torch.Tensor, table: torch.Tensor) -> Outcome:
    """The outcomes to prepare for: for each k the F_k likeliest bonus tokens, as `num_accepted`, `bonus`, both `[B,
    budget]`.

    ranked: see `rank_guesses`; table `[B, 2, budget]`: the `branches` of every row; all in host memory. Where F_k
    exceeds the candidates the last is repeated."""
    k, rank = table.unbind(1)
    row = torch.arange(len(k))[:, None]
    return Outcome(k, ranked[row, k, rank.clamp(max=ranked.shape[-1] - 1)])


@dataclass
class SpeculationCache:
    """S^T (Def. 4): for every row n = `budget` guessed outcomes, and the speculation prepared for each, token by
    token. Guesses and look-ups are in host memory, where outcomes are."""
    guesses: Outcome                                          # num_accepted, bonus: [B, n]
    tokens: list[torch.Tensor] = field(default_factory=list)  # one [B, n] for each of the K drafted tokens
    q: list[torch.Tensor] = field(default_factory=list)       # likewise [B, n, V]; stays empty when greedy

    def look_up(self, outcome: Outcome) -> tuple[torch.Tensor, torch.Tensor]:
        """Which guess is the outcome? `(hit [B], branch [B])`; branch means nothing where hit is False."""
        match = ((self.guesses.num_accepted == outcome.num_accepted[:, None])
                 & (self.guesses.bonus == outcome.bonus[:, None]))
        return match.any(1), match.long().argmax(1)

    def take(self, branch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The prepared speculation of one branch `[B]` a row: tokens `[B, K]`, q `[B, K, V]` or None."""
        branch = branch.to(self.tokens[0].device)
        row = torch.arange(len(branch), device=branch.device)
        return (torch.stack(self.tokens, 1)[row, :, branch],
                torch.stack([q[row, branch] for q in self.q], 1) if self.q else None)

    def keep(self, rows: torch.Tensor) -> "SpeculationCache":
        """The cache of the rows that `rows` `[B]` (bool) selects."""
        return SpeculationCache(Outcome(*(guess[rows] for guess in self.guesses)),
                                [tokens[rows] for tokens in self.tokens], [q[rows] for q in self.q])

    def only(self, branch: torch.Tensor) -> "SpeculationCache":
        """The cache reduced to one branch `[B]` a row."""
        row = torch.arange(len(branch))

        def pick(field: torch.Tensor) -> torch.Tensor:
            return field[row, branch][:, None]

        return SpeculationCache(Outcome(*map(pick, self.guesses)), list(map(pick, self.tokens)),
                                list(map(pick, self.q)))


# ---- what a cache is worth: for the reader and for the "auto" settings; times in units of one verification ----

def expected_tokens(acceptance_rate: float, lookahead: int) -> float:
    """E(a, K) = (1 - a^(K+1)) / (1 - a): accepted tokens and the bonus token of a round (Leviathan et al. 2023)."""
    return sum(acceptance_rate ** k for k in range(lookahead + 1))


def power_law_hit_rate(fan_out: list[int], acceptance_rate: float, miss_exponent: float,
                       miss_of_one: float = 0.5) -> float:
    """Probability that the outcome is in a cache of shape F_0..F_K when F guesses miss with probability
    `miss_of_one` F^-r (Def. 11), and none miss always."""
    likelihood = acceptance_distribution(acceptance_rate, len(fan_out) - 1)
    return sum(p * (1 - miss_of_one * f ** -miss_exponent) for p, f in zip(likelihood, fan_out) if f)


def throughput(hit_rate: float, tokens_hit: float, tokens_miss: float, T_p: float, T_b: float,
               batch_size: float = 1) -> float:
    """Tokens per row and verification time of SSD at batch size b (Cor. 16):

        (p E_hit + (1-p) E_miss) / (p^b max(1, T_p) + (1 - p^b) (1 + T_b)).

    At b = 1 this is Theorem 7, the speedup over autoregressive decoding; at p = 0, plain speculative decoding."""
    all_hit = hit_rate ** batch_size
    return ((hit_rate * tokens_hit + (1 - hit_rate) * tokens_miss)
            / (all_hit * max(1.0, T_p) + (1 - all_hit) * (1 + T_b)))


def critical_batch_size(hit_rate: float, tokens_hit: float, tokens_neural: float, tokens_fast: float, T_p: float,
                        T_neural: float, T_fast: float) -> float:
    """b* (Thm. 17): the neural backup has the higher `throughput` below this batch size, the fast one above.

    0 if the fast backup is better at every size, infinity if the neural is. `tokens_*`: expected tokens of the
    round that follows a hit, a neural and a fast backup."""
    neural, fast = (hit_rate * tokens_hit + (1 - hit_rate) * tokens for tokens in (tokens_neural, tokens_fast))
    at_once = max(1.0, T_p)
    # neural wins iff gain(x) > 0 for x = p^b, which falls from 1 (b = 0) to 0 (b = infinity); gain is linear in x
    at_zero = neural * (1 + T_fast) - fast * (1 + T_neural)
    slope = fast * (1 + T_neural - at_once) - neural * (1 + T_fast - at_once)
    if hit_rate == 1 or at_zero >= 0:
        return math.inf
    if hit_rate == 0 or at_zero + slope <= 0:
        return 0.0
    return math.log(-at_zero / slope) / math.log(hit_rate)


class Costs(NamedTuple):
    """Seconds of a pass of the target or the draft over n tokens a row, measured at some n for the batch size at
    hand."""
    target: dict[int, float]
    draft: dict[int, float]

    @staticmethod
    def seconds(measured: dict[int, float], n: int) -> float:
        """Linear between the measured n, and beyond the last along the last two."""
        known = sorted(measured)
        right = next((i for i in range(1, len(known) - 1) if known[i] >= n), len(known) - 1)
        low, high = known[right - 1], known[right]
        return measured[low] + (measured[high] - measured[low]) * (n - low) / (high - low)

    def verify(self, lookahead: int) -> float:
        return self.seconds(self.target, lookahead + 1)

    def T_p(self, lookahead: int, budget: int) -> float:
        """One pre-speculation, in verifications: a trunk pass and K tree steps."""
        trunk, step = self.seconds(self.draft, lookahead + 1), self.seconds(self.draft, budget)
        return (trunk + lookahead * step) / self.verify(lookahead)

    def T_b(self, lookahead: int) -> float:
        """One neural backup, in verifications: K draft passes."""
        return lookahead * self.seconds(self.draft, 1) / self.verify(lookahead)


def best_lookahead(costs: Costs, lookaheads: Iterable[int], budgets: Iterable[int], acceptance_rate: float,
                   miss_exponent: float, batch_size: int) -> tuple[int, int]:
    """(K, budget) of the highest tokens per second by Theorem 7 under T_p <= 1, or of the lowest T_p if none is so
    low."""
    def speed(lookahead: int, budget: int) -> tuple[bool, float]:
        T_p, T_b = costs.T_p(lookahead, budget), costs.T_b(lookahead)
        if T_p > 1:
            return False, -T_p
        fan_out = geometric_fan_out(budget, lookahead, acceptance_rate, miss_exponent)
        tokens = expected_tokens(acceptance_rate, lookahead)
        hit_rate = power_law_hit_rate(fan_out, acceptance_rate, miss_exponent)
        return True, throughput(hit_rate, tokens, tokens, T_p, T_b, batch_size) / costs.verify(lookahead)

    return max(itertools.product(lookaheads, budgets), key=lambda choice: speed(*choice))
