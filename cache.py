"""The speculation cache (section 4.1): its shape, its contents, and what it is worth.

A verification ends in an outcome v = (k, t*): k of the K drafted tokens are accepted, and the bonus
token t* follows. The speculation cache (Def. 4) holds likely outcomes, and for each of them the
speculation that should follow. Its shape is the fan-out F_0..F_K (Def. 10): F_k bonus tokens are
guessed for "k accepted", and sum_k F_k is the budget. With acceptance rate a,

    P(k accepted) = a^k (1 - a)  for k < K,   a^K  for k = K.

If k tokens are accepted, F guesses for that k miss with probability F^-r (Def. 11, a power law). If
that probability is F^-r times any constant, a capped geometric series is best (Thm. 12):

    F_k = F_0 a^(k/(1+r))  for k < K,         F_K = F_0 a^(K/(1+r)) (1-a)^(-1/(1+r)).

Three conventions hold in all files. A q of width V = 0 stands for point masses, as greedy drafts
have them. A row whose text is complete has k = FINISHED, and its other values mean nothing. Round 0
is prefill: it verifies an empty speculation, K = 0, and its outcome is the first token of the text.
"""
import math
from typing import NamedTuple

import torch
from torch.nn.functional import one_hot

PRIMARY = 0      # the source of a speculation: the primary, which fills the cache (a hit),
BACKUP = 1       # or the backup, which drafts after a miss (section 4.3)
FINISHED = -1    # as k: this row's text is complete
NO_OUTCOME = -2  # as k: nothing is guessed


class Outcome(NamedTuple):
    """Holds what a verification decided for a batch of B rows, `[B]`, or n guesses of that for each
    row, `[B, n]`, in host memory."""
    num_accepted: torch.Tensor  # k, how many drafted tokens were accepted
    bonus: torch.Tensor         # t*, the token that the target added itself

    @property
    def finished(self) -> torch.Tensor:
        """Return which rows `[B]` are finished."""
        return self.num_accepted == FINISHED


class RowRound(NamedTuple):
    """Holds a round of one row of a batch."""
    row: int
    source: int            # who drafted: PRIMARY or BACKUP
    drafted: list[int]     # [K]
    num_accepted: int      # k
    bonus: int             # t*
    new_tokens: list[int]  # what joined the text: s_1..s_k and t*, unless it ended before


class Speculation(NamedTuple):
    """Holds K drafted tokens for each row."""
    tokens: torch.Tensor  # [B, K]
    q: torch.Tensor       # [B, K, V] what they were drawn from
    source: torch.Tensor  # [B] PRIMARY or BACKUP; on the rank that drafts, in host memory

    @classmethod
    def empty(cls, rows: int) -> "Speculation":
        """Return K = 0 tokens. Nothing was prepared for them, so their source is BACKUP."""
        tokens = torch.zeros(rows, 0, dtype=torch.long)
        return cls(tokens, torch.zeros(rows, 0, 0), torch.full((rows,), BACKUP))


# ---- the shape F_0..F_K ----

def acceptance_distribution(acceptance_rate: float, lookahead: int) -> list[float]:
    """Return P(k accepted) for k = 0..K = `lookahead`, if a = `acceptance_rate`.

    >>> acceptance_distribution(0.5, 2)
    [0.5, 0.25, 0.25]
    """
    a = acceptance_rate
    return [a ** k * (1 - a) for k in range(lookahead)] + [a ** lookahead]


def best_fan_out(likelihood: torch.Tensor, right: torch.Tensor, budget: int) -> torch.Tensor:
    """Return, for each row, the F_0..F_K that hit most often, `[B, K+1]`, of sum `budget`, or of
    (K+1) n if that is less.

    likelihood `[B, K+1]` is P(k accepted). If k tokens are accepted, guess number 1, 2, ... of the
    bonus token is right with probability right `[B, K+1, n]`, each less often than the one before.
    So the outcome (k, t*) has the product of both as its probability. The `budget` likeliest
    outcomes are guessed, and F_k is how many of them have this k.

    >>> best_fan_out(torch.tensor([[0.6, 0.4]]), torch.tensor([[[0.5, 0.2], [0.9, 0.1]]]), 2)
    tensor([[1, 1]])
    """
    probability = (likelihood[..., None] * right).flatten(1)
    likeliest = probability.topk(min(budget, probability.shape[1])).indices
    return one_hot(likeliest // right.shape[-1], likelihood.shape[1]).sum(1)


def power_law(num_guesses: int, miss_exponent: float) -> torch.Tensor:
    """Return how likely guess number 1, 2, ... is to be the right one, `[num_guesses]`, if F
    guesses miss with probability F^-r / 2. By Definition 11, F^-r, a single guess would always
    miss. We assume that it halves the misses.

    >>> power_law(3, miss_exponent=1.0)
    tensor([0.5000, 0.2500, 0.0833], dtype=torch.float64)
    """
    F = torch.arange(1, num_guesses + 1, dtype=torch.float64)
    misses = torch.cat([torch.ones(1), F ** -miss_exponent / 2])
    return -misses.diff()


def geometric_fan_out(budget: int, lookahead: int, acceptance_rate: float,
                      miss_exponent: float) -> list[int]:
    """Return the F_0..F_K of sum `budget` that minimise the misses sum_k P(k) F_k^-r (Thm. 12).

    For r <= 1 this is Theorem 12's closed form wherever that is integral. The theorem says nothing
    of F = 0, `power_law` does: with a small budget F_k = 0 for the unlikeliest k, and for r > 1
    even for some where the theorem has 1.

    >>> geometric_fan_out(budget=35, lookahead=1, acceptance_rate=9/25, miss_exponent=1.0)
    [20, 15]
    """
    right = power_law(budget, miss_exponent).expand(1, lookahead + 1, budget)
    likelihood = right.new_tensor([acceptance_distribution(acceptance_rate, lookahead)])
    return best_fan_out(likelihood, right, budget)[0].tolist()


def uniform_fan_out(budget: int, lookahead: int, acceptance_rate: float,
                    miss_exponent: float) -> list[int]:
    """Return F_0..F_K of sum `budget`, as equal as integers can be: Theorem 12 improves on this. As
    a policy it is given a and r, which it does not need.

    >>> uniform_fan_out(12, 4, 0.8, 1.0)
    [3, 3, 2, 2, 2]
    """
    return [(budget + lookahead - k) // (lookahead + 1) for k in range(lookahead + 1)]


FAN_OUT_POLICIES = {"geometric": geometric_fan_out, "uniform": uniform_fan_out}  # --fan-out


# ---- the cache ----

def likely_outcomes(candidates: torch.Tensor, fan_out: torch.Tensor) -> Outcome:
    """Return the outcomes to prepare for, `[B, budget]`: for each k the first F_k bonus tokens.

    candidates `[B, K+1, n]` are bonus tokens, the likeliest first. fan_out `[B, K+1]` has rows of
    equal sum. Where F_k > n, which only a tiny vocabulary allows, the last guess is repeated.

    >>> candidates = torch.tensor([[[5, 7, 6], [8, 9, 5]]])
    >>> likely_outcomes(candidates, torch.tensor([[1, 2]]))
    Outcome(num_accepted=tensor([[0, 1, 1]]), bonus=tensor([[5, 8, 9]]))
    """
    rows, num_k, n = candidates.shape
    place = torch.arange(int(fan_out.max()))                        # [max F_k]
    guessed = place < fan_out[..., None]                            # [B, K+1, max F_k]
    num_accepted = torch.arange(num_k)[:, None].expand_as(guessed)  # [B, K+1, max F_k]
    bonus = candidates[..., place.clamp(max=n - 1)]                 # [B, K+1, max F_k]
    # as many are guessed in every row: [B, budget]
    return Outcome(num_accepted[guessed].view(rows, -1), bonus[guessed].view(rows, -1))


def matches(guesses: Outcome, outcome: Outcome) -> torch.Tensor:
    """Return where a guess `[B, n]` equals the outcome `[B]` of its row: booleans `[B, n]`."""
    same_k = guesses.num_accepted == outcome.num_accepted[:, None]
    same_bonus = guesses.bonus == outcome.bonus[:, None]
    return same_k & same_bonus


class SpeculationCache(NamedTuple):
    """Holds S^T (Def. 4): the guessed outcomes of every row, and a speculation for each of them."""
    guesses: Outcome      # [B, budget]
    tokens: torch.Tensor  # [B, budget, K]
    q: torch.Tensor       # [B, budget, K, V]

    @classmethod
    def empty(cls, rows: int, lookahead: int, q_template: torch.Tensor) -> "SpeculationCache":
        """Return a cache that guesses nothing, so that every look-up misses. `q_template` `[V]`
        gives its q width, type and device."""
        no_guess = torch.full((rows, 1), NO_OUTCOME)
        tokens = torch.zeros(rows, 1, lookahead, dtype=torch.long, device=q_template.device)
        q = q_template.new_zeros(rows, 1, lookahead, len(q_template))
        return cls(Outcome(no_guess, no_guess), tokens, q)

    def look_up(self, outcome: Outcome) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `(tokens [B, K], q [B, K, V], hit [B])`. Tokens and q are what was prepared for
        the outcome; in rows that miss they mean nothing.

        >>> guesses = Outcome(torch.tensor([[0, 0, 1]]), torch.tensor([[7, 8, 7]]))
        >>> prepared = torch.tensor([[[1, 2], [3, 4], [5, 6]]])
        >>> cache = SpeculationCache(guesses, prepared, torch.zeros(1, 3, 2, 0))
        >>> tokens, q, hit = cache.look_up(Outcome(torch.tensor([1]), torch.tensor([7])))
        >>> tokens, hit
        (tensor([[5, 6]]), tensor([True]))
        """
        match = matches(self.guesses, outcome)
        device = self.tokens.device
        # non_blocking: the host does not wait for the GPU
        row = torch.arange(len(match)).to(device, non_blocking=True)
        branch = match.long().argmax(1).to(device, non_blocking=True)
        return self.tokens[row, branch], self.q[row, branch], match.any(1)


# ---- what it is worth, in units of one verification ----

def expected_tokens(acceptance_rate: float, lookahead: int) -> float:
    """Return E(a, K) = (1 - a^(K+1)) / (1 - a), the expected number of accepted tokens and the
    bonus token of a round (Leviathan et al. 2023).

    >>> expected_tokens(0.5, 2)
    1.75
    """
    return sum(acceptance_rate ** k for k in range(lookahead + 1))


def throughput(hit_rate: float, E_hit: float, E_miss: float, T_p: float, T_b: float,
               batch_size: float = 1) -> float:
    """Return the tokens a verification of a row, in a batch of b rows with hit rate p (Cor. 16):

        (p E_hit + (1-p) E_miss) / (p^b max(1, T_p) + (1 - p^b) (1 + T_b)).

    At b = 1 this is Theorem 7, the speedup over autoregressive decoding. At p = 0 it is that of SD.

    The formula lets a miss break the pre-speculation off. Here `serve` never does, because rows
    that hit need what it prepares: where T_p > 1, give T_b + T_p - 1 as T_b. (Else a text would
    get faster in a larger batch where T_p > 1 + T_b.)

    >>> throughput(hit_rate=0.5, E_hit=4, E_miss=2, T_p=0.8, T_b=0.5)
    2.4
    """
    all_hit = hit_rate ** batch_size
    tokens = hit_rate * E_hit + (1 - hit_rate) * E_miss
    return tokens / (all_hit * max(1.0, T_p) + (1 - all_hit) * (1 + T_b))


def speedup_over_sd_bounds(hit_rate: float, E_hit: float, E_sd: float, T_sd: float,
                           T_b: float) -> tuple[float, float]:
    """Return bounds on SSD's speedup over SD (Cor. 9), if its backup is its primary, T_p <= 1 and
    E_hit <= E_miss <= E_hit (1 + T_b):

        (1 + T_SD) / (1 + T_b (1 - p)) * E_hit / E_SD  <=  speedup  <=  (1 + T_SD) E_hit / E_SD.

    If both have the same K, as in the paper, T_b = T_SD. If also E_hit = E_SD, the lower bound is
    at least 1 (Cor. 8).

    >>> speedup_over_sd_bounds(hit_rate=1.0, E_hit=3, E_sd=3, T_sd=0.5, T_b=0.5)
    (1.5, 1.5)
    """
    upper = (1 + T_sd) * E_hit / E_sd
    return upper / (1 + T_b * (1 - hit_rate)), upper


def critical_batch_size(hit_rate: float, E_hit: float, E_neural: float, E_fast: float,
                        T_p: float, T_neural: float, T_fast: float) -> float:
    """Return b* (Thm. 17): below this batch size the neural backup has the higher `throughput`,
    above it the fast one. It is 0 if the fast backup is better at every size, and infinity if the
    neural is. Assumes T_fast <= T_neural. `E_*` are the expected tokens of the round after a hit,
    a neural and a fast backup. Where T_p > 1, see `throughput` on T_neural and T_fast.

    >>> round(critical_batch_size(0.8, 4, 4, 1, T_p=1, T_neural=0.5, T_fast=0), 2)
    1.95
    """
    neural = hit_rate * E_hit + (1 - hit_rate) * E_neural
    fast = hit_rate * E_hit + (1 - hit_rate) * E_fast
    T_hit = max(1.0, T_p)
    # A round takes x T_hit + (1 - x) (1 + T), where x = p^b falls from 1 (b = 0) to 0. Multiplied
    # out, neural has the higher throughput iff at_zero + slope x > 0.
    at_zero = neural * (1 + T_fast) - fast * (1 + T_neural)
    slope = fast * (1 + T_neural - T_hit) - neural * (1 + T_fast - T_hit)
    if hit_rate == 1 or at_zero >= 0:
        return math.inf
    if hit_rate == 0 or at_zero + slope <= 0:
        return 0.0
    return math.log(-at_zero / slope) / math.log(hit_rate)


def power_law_hit_rate(fan_out: list[int], acceptance_rate: float, miss_exponent: float) -> float:
    """Return p_hit of a cache of shape F_0..F_K, with guesses as often right as in `power_law`.

    >>> power_law_hit_rate([1, 1], acceptance_rate=0.5, miss_exponent=1.0)
    0.5
    """
    likelihood = acceptance_distribution(acceptance_rate, len(fan_out) - 1)
    right = power_law(max(fan_out), miss_exponent)
    return sum(P * float(right[:F].sum()) for P, F in zip(likelihood, fan_out))


def choose_backup(batch_size: int, fan_out: list[int], acceptance_rate: float,
                  random_acceptance_rate: float, miss_exponent: float,
                  draft_pass: float) -> tuple[str, float]:
    """Choose for --backup auto, by Theorem 17. Returns `("neural" or "random", b*)`. `draft_pass`
    is the time of a pass of the draft, in verifications."""
    lookahead = len(fan_out) - 1
    T_p = (lookahead + 1) * draft_pass
    late = max(0.0, T_p - 1)  # see `throughput`
    tokens = expected_tokens(acceptance_rate, lookahead)
    b = critical_batch_size(
        power_law_hit_rate(fan_out, acceptance_rate, miss_exponent), tokens, tokens,
        expected_tokens(random_acceptance_rate, lookahead),
        T_p, T_neural=late + lookahead * draft_pass, T_fast=late)
    return "neural" if batch_size < b else "random", b
