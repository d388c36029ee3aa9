"""The speculation cache: which outcomes to prepare for, and the speculations prepared (sections 2 and 4.1).

A verification ends in an outcome v = (k, t*): k of the K drafted tokens accepted, then the bonus token t* (section 2).
The speculation cache (Def. 4) maps likely outcomes to the speculation that should follow each. Its shape is the
fan-out F_0..F_K: F_k bonus tokens are guessed for "k accepted", sum_k F_k = budget. With acceptance rate a,

    P(k accepted) = a^k (1 - a)  for k < K,   a^K  for k = K,

and the bonus token escapes the draft's top F guesses with probability proportional to F^-r (Def. 11, the power law). Then
the best shape is a capped geometric series (Thm. 12):

    F_k = F_0 a^(k/(1+r))  for k < K,         F_K = F_0 a^(K/(1+r)) (1-a)^(-1/(1+r)).
"""
import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

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

    Guess by guess, each goes where it lowers the sum most; for convex terms this greedy choice is optimal, and it is Theorem
    12's closed form wherever that is integral. The power law says nothing of F = 0; we let the first guess
    halve the miss rate (0^-r counts as 2), so that a small budget leaves some F_k = 0, the unlikeliest k first."""
    likelihood = acceptance_distribution(acceptance_rate, lookahead)

    def gain(k: int, fan_out: int) -> float:
        return likelihood[k] * ((fan_out ** -miss_exponent if fan_out else 2.0) - (fan_out + 1) ** -miss_exponent)

    fan_out = [0] * (lookahead + 1)
    heap = [(-gain(k, 0), k) for k in range(lookahead + 1)]
    for _ in range(budget):
        k = heap[0][1]
        fan_out[k] += 1
        heapq.heapreplace(heap, (-gain(k, fan_out[k]), k))
    return fan_out


def choose_guesses(logits: torch.Tensor, drafted: torch.Tensor, fan_out: list[int]) -> Outcome:
    """The outcomes to prepare for: for each k the F_k likeliest bonus tokens, as `num_accepted`, `bonus`, both `[B, budget]`.

    logits `[B, K+1, V]`: the draft's own, before each drafted token and after the last; drafted `[B, K]`. The drafted token
    s_{k+1} cannot be the bonus token after a rejection (p < q there), so it is not among the guesses for k < K. When F_k
    exceeds the vocabulary the last guess is repeated."""
    logits = logits.clone()
    logits[:, :drafted.shape[1]].scatter_(-1, drafted.unsqueeze(-1), -torch.inf)
    top = logits.topk(min(max(fan_out), logits.shape[-1])).indices
    k = torch.repeat_interleave(torch.arange(len(fan_out)), torch.tensor(fan_out))
    rank = torch.cat([torch.arange(f) for f in fan_out]).clamp(max=top.shape[-1] - 1)
    k, rank = k.to(logits.device), rank.to(logits.device)
    return Outcome(k.expand(len(logits), -1), top[:, k, rank])


@dataclass
class SpeculationCache:
    """S^T (Def. 4): for every row n = `budget` guessed outcomes, and the speculation prepared for each, token by token."""
    guesses: Outcome                                          # num_accepted, bonus: [B, n]
    tokens: list[torch.Tensor] = field(default_factory=list)  # one [B, n] for each of the K drafted tokens
    q: list[torch.Tensor] = field(default_factory=list)       # likewise [B, n, V]; stays empty when greedy

    def look_up(self, outcome: Outcome) -> tuple[torch.Tensor, torch.Tensor]:
        """Which guess is the outcome? `(hit [B] in host memory, branch [B])`; branch means nothing where hit is False."""
        device = self.guesses.bonus.device
        match = ((self.guesses.num_accepted == outcome.num_accepted.to(device)[:, None])
                 & (self.guesses.bonus == outcome.bonus.to(device)[:, None]))
        return match.any(1).cpu(), match.long().argmax(1)

    def take(self, branch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The prepared speculation of one branch `[B]` a row: tokens `[B, K]`, q `[B, K, V]` or None."""
        row = torch.arange(len(branch), device=branch.device)
        return (torch.stack([tokens[row, branch] for tokens in self.tokens], 1),
                torch.stack([q[row, branch] for q in self.q], 1) if self.q else None)

    def keep(self, rows: torch.Tensor) -> "SpeculationCache":
        """The cache of the rows that `rows` `[B]` (bool) selects."""
        return SpeculationCache(Outcome(*(guess[rows] for guess in self.guesses)),
                                [tokens[rows] for tokens in self.tokens], [q[rows] for q in self.q])

    def only(self, branch: torch.Tensor) -> "SpeculationCache":
        """The cache reduced to one branch `[B]` a row."""
        row = torch.arange(len(branch), device=branch.device)

        def pick(field: torch.Tensor) -> torch.Tensor:
            return field[row, branch][:, None]

        return SpeculationCache(Outcome(*map(pick, self.guesses)), list(map(pick, self.tokens)), list(map(pick, self.q)))
