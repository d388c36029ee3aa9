"""The speculator (Algorithm 1, speculator's side): answers every outcome with a speculation, prepared if it can be.

A round of the draft, with K = lookahead:

    speculate(outcome)    hit:  the speculation prepared for this outcome, at once
                          miss: the neural backup drafts it just in time, K passes
    pre_speculate()       while the target verifies:
                          one trunk pass over [t*, s_1..s_K]: K+1 distributions, from which the outcomes are guessed
                          K tree passes, one token for every guessed outcome at once: the next speculation cache

Called without `pre_speculate`, the same worker is the draft of ordinary speculative decoding: every round misses.
"""
from dataclasses import dataclass
from typing import Callable

import torch

import sampling
from cache import Outcome, Speculation, SpeculationCache, choose_guesses, geometric_fan_out
from model import CausalLM, Stopwatch


@dataclass
class Tree:
    """Where the branches of a growing speculation tree live: n branches a row, one token each per step."""
    positions: torch.Tensor  # [B, n] of the first token of each branch, the guessed bonus token
    slots: torch.Tensor      # [B, n] scratch slot of that token; `stride` further for every step
    stride: int
    mask: torch.Tensor       # [B, n, slots in use by the whole tree], additive: the trunk up to the fork, and own ancestors
    coins: torch.Tensor      # [B, n, K]

    def only(self, branch: torch.Tensor) -> "Tree":
        """The tree reduced to one branch `[B]` a row."""
        row = torch.arange(len(branch), device=branch.device)
        return Tree(*(field if isinstance(field, int) else field[row, branch][:, None] for field in vars(self).values()))


class DraftWorker:
    """The draft model, its KV, and the speculation cache of a batch of B rows."""

    def __init__(self, model: CausalLM, warper: Callable | None, seed: int, lookahead: int, budget: int,
                 acceptance_rate: float, miss_exponent: float, downweight: float):
        """`warper` as the target's; `seed` of the draft's own coins, independent of the verifier's; the rest as in the paper:
        K, budget, a, r and C."""
        self.model, self.warper, self.lookahead, self.budget = model, warper, lookahead, budget
        self.downweight = downweight
        self.fan_out = geometric_fan_out(budget, lookahead, acceptance_rate, miss_exponent)
        self.generator = torch.Generator().manual_seed(seed)
        self.watch = Stopwatch(model.device)

    def start(self, prompts: list[list[int]], longest: int) -> None:
        """Read the prompts of a new batch, whose rows will have at most `longest` tokens. Round 0 verifies an empty speculation."""
        self.model.allocate(longest + self.lookahead + self.lookahead * self.budget)
        self.model.prefill(prompts)
        self.length = torch.tensor([len(prompt) for prompt in prompts])  # [B] verified tokens
        # [B, 2] the last two of them: only what precedes them is certain to be in the KV (see `draft_now`)
        self.tail = torch.tensor([[0, *prompt][-2:] for prompt in prompts], device=self.model.device)
        self.drafted = torch.zeros(len(prompts), 0, dtype=torch.long, device=self.model.device)  # what is being verified
        self.cache: SpeculationCache | None = None

    def speculate(self, outcome: Outcome) -> Speculation:
        """The speculation for the rows that go on: from the cache on a hit, from the backup on a miss."""
        outcome = self.advance(outcome)
        if not len(outcome.bonus):
            return Speculation.empty(0)
        hit, branch = self.cache.look_up(outcome) if self.cache else (torch.zeros(len(outcome.bonus), dtype=torch.bool), None)
        if hit.all():
            tokens, q = self.cache.take(branch)
        elif not hit.any():
            tokens, q = self.draft_now()
        else:
            tokens, q = self.cache.take(branch)
            missed = (~hit).nonzero().flatten().to(self.model.device)
            tokens[missed], backup_q = self.draft_now(missed)
            if q is not None:
                q[missed] = backup_q
        self.drafted, self.cache = tokens, None
        return Speculation(tokens, q, hit)

    def advance(self, outcome: Outcome) -> Outcome:
        """Move to the end of the verified text: s_1..s_k and t* join it. Rows that have finished are dropped, from the
        returned outcome too."""
        device = self.model.device
        going_on = outcome.num_accepted >= 0
        if not going_on.all():
            self.keep(going_on)
            outcome = Outcome(outcome.num_accepted[going_on], outcome.bonus[going_on])
        text = torch.cat([self.tail[:, 1:], self.drafted], 1)
        previous = text.gather(1, outcome.num_accepted[:, None].to(device))
        self.tail = torch.cat([previous, outcome.bonus[:, None].to(device)], 1)
        self.length = self.length + outcome.num_accepted + 1
        return outcome

    def keep(self, rows: torch.Tensor) -> None:
        """Drop the finished rows: `rows` `[B]` is True for those that go on."""
        self.model.kv.keep(rows)
        self.length, rows = self.length[rows], rows.to(self.model.device)
        self.tail, self.drafted = self.tail[rows], self.drafted[rows]
        if self.cache:
            self.cache = self.cache.keep(rows)

    def draw(self, logits: torch.Tensor, coins: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token number `step` (from 0) of a speculation: draws from logits `[..., V]` with coins `[...]`, returns the token
        and the distribution that it was drawn from. It will be verified against the cache's F_step (Def. 14)."""
        q = sampling.probabilities(logits, self.warper)
        if self.warper is not None:
            q = sampling.saguaro_distribution(q, self.fan_out[step], self.downweight)
        return sampling.inverse_cdf(q, coins), q

    def draft_now(self, rows: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Neural backup: draft K tokens after the verified text, one pass each, for `rows` or all: `(tokens, q)`.

        The first pass takes the last two verified tokens, since the KV of the last but one is missing when all K
        tokens of such a speculation were accepted."""
        with self.watch("backup"):
            length, tokens = self.length, self.tail
            if rows is not None:
                length, tokens = length[rows.cpu()], tokens[rows]
            coins = self.coins(len(tokens), self.lookahead)
            drafted, drawn_from, start = [], [], length - 2
            for step in range(self.lookahead):
                logits = self.model.causal(tokens, start, rows)[:, -1]
                start = start + tokens.shape[1]
                token, q = self.draw(logits, coins[:, step], step)
                drafted.append(token)
                drawn_from.append(q)
                tokens = token[:, None]
        return torch.stack(drafted, 1), None if self.warper is None else torch.stack(drawn_from, 1)

    def pre_speculate(self, peek: Callable[[], Outcome | None] = lambda: None) -> None:
        """Fill the speculation cache while the target verifies.

        The early outcome (ours, not the paper's): `peek()` returns the outcome if it is there already. All guesses are known
        after the trunk pass, so from then on nothing but the winning branch is worth growing, and after a miss, nothing."""
        with self.watch("trunk"):
            tree = self.plant()
        outcome = None
        while len(self.cache.tokens) < self.lookahead:
            if outcome is None and (outcome := peek()) is not None:
                hit, branch = self.cache.look_up(outcome)
                if not hit.any():
                    return
                self.cache, tree = self.cache.only(branch), tree.only(branch)
            with self.watch("step" if outcome is None else "last branch"):
                self.grow(tree)

    def plant(self) -> Tree:
        """The trunk pass: put the speculation under verification into the KV, guess its outcomes, and make room for a branch for
        each in scratch slots above the trunk."""
        tokens = torch.cat([self.tail[:, 1:], self.drafted], 1)
        logits = self.model.causal(tokens, self.length - 1)
        shape = self.fan_out if self.drafted.shape[1] else [self.budget]  # round 0 has one position only
        self.cache = SpeculationCache(choose_guesses(logits, self.drafted, shape))

        device, rows = self.model.device, len(tokens)
        trunk_end = int(self.length.max()) + self.drafted.shape[1]
        fork = self.length.to(device)[:, None] + self.cache.guesses.num_accepted  # [B, n] trunk tokens a branch sees
        trunk = torch.arange(trunk_end, device=device) < fork[..., None]
        ancestors = torch.eye(self.budget, dtype=torch.bool, device=device).repeat(1, self.lookahead)
        visible = torch.cat([trunk, ancestors.expand(rows, -1, -1)], 2)
        return Tree(positions=fork, slots=(trunk_end + torch.arange(self.budget, device=device)).expand(rows, -1),
                    stride=self.budget, mask=self.model.additive(visible),
                    coins=self.coins(rows, self.budget, self.lookahead))

    def grow(self, tree: Tree) -> None:
        """One tree pass: the next token of every branch."""
        step = len(self.cache.tokens)
        tokens = self.cache.tokens[-1] if step else self.cache.guesses.bonus
        seen = tree.mask.shape[-1] - (self.lookahead - step - 1) * tree.stride  # scratch slots of later steps are empty
        logits = self.model.forward(tokens, tree.positions + step, tree.slots + step * tree.stride, tree.mask[..., :seen])
        tokens, q = self.draw(logits, tree.coins[..., step], step)
        self.cache.tokens.append(tokens)
        if self.warper is not None:
            self.cache.q.append(q)

    def coins(self, *shape: int) -> torch.Tensor:
        """Uniform random numbers in [0, 1) on the model's device, from the draft's own generator."""
        return torch.rand(shape, generator=self.generator).to(self.model.device)

    def times(self) -> dict[str, tuple[float, int]]:
        """(seconds, count) of the trunk passes, tree steps and backups since the last call."""
        return self.watch.read()
