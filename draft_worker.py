"""The speculator (Algorithm 1): answers every outcome with a speculation, prepared if it can be.

A round of the draft, with K = lookahead:

    speculate(outcome)    hit:  the speculation prepared for this outcome, at once
                          miss: a backup drafts, just in time (section 4.3):
                                neural: the draft model itself, K passes
                                fast:   what followed the last words when they stood there before
                                random: tokens drawn blindly (the paper's own fast backup)
    pre_speculate()       while the target verifies:
                          one trunk pass over [t*, s_1..s_K]: K+1 distributions, from which the
                          outcomes are guessed; then K tree passes, one token for every guessed
                          outcome at once: the next speculation cache

Called without `pre_speculate`, the same worker is the draft of ordinary speculative decoding: every
round misses.
"""
from typing import Any, Callable, NamedTuple

import torch

import sampling
from cache import (BACKUP, NOBODY, PRIMARY, FanOut, Outcome, Speculation, SpeculationCache,
                   bonus_rank, likely_outcomes, matches)
from runtime.model import CausalLM, Stopwatch

MATCH = 16  # tokens of a match beyond which the fast backup takes matches for equally good
Drafted = tuple[torch.Tensor, torch.Tensor]  # tokens [..., K], drawn from q [..., K, V]


class Tree(NamedTuple):
    """Where a speculation tree lives: n branches a row, K tokens each, in scratch slots."""
    positions: torch.Tensor  # [B, n] of each branch's first token, the guessed bonus token
    slots: torch.Tensor      # [K, n] of the tokens that step i adds
    visible: torch.Tensor    # [B, n, trunk + K n] the slots that a branch sees in the end


def tree_layout(length: torch.Tensor, num_accepted: torch.Tensor, trunk: int,
                lookahead: int) -> Tree:
    """Room for a branch for each of the guesses "k accepted", k = `num_accepted` `[B, n]`.

    A branch sees the trunk up to its own fork (the verified text, `length` `[B]` tokens, and k
    drafted ones), and itself. The tree begins in slot `trunk`. Two guesses, one for "0 accepted",
    one for "1", two tokens each, after a text of 3 tokens:

    >>> tree = tree_layout(torch.tensor([3]), torch.tensor([[0, 1]]), trunk=5, lookahead=2)
    >>> tree.positions.tolist(), tree.slots.tolist()
    ([[3, 4]], [[5, 6], [7, 8]])
    >>> tree.visible.int().tolist()
    [[[1, 1, 1, 0, 0, 1, 0, 1, 0], [1, 1, 1, 1, 0, 0, 1, 0, 1]]]
    """
    rows, n = num_accepted.shape
    fork = length[:, None] + num_accepted
    itself = torch.eye(n, dtype=torch.bool).repeat(1, lookahead).expand(rows, -1, -1)
    visible = torch.cat([torch.arange(trunk) < fork[..., None], itself], 2)
    return Tree(fork, trunk + torch.arange(lookahead * n).view(lookahead, n), visible)


def tree_pass(model: CausalLM, tree: Tree, tokens: torch.Tensor, step: int) -> torch.Tensor:
    """The next token of every branch: logits `[B, n, V]` after tokens `[B, n]`, number `step` of
    their branches."""
    later = tree.slots[step + 1:].numel()  # slots that are still empty
    visible = tree.visible[..., :tree.visible.shape[-1] - later]
    slots = tree.slots[step].expand(len(tokens), -1)
    return model.forward(tokens, tree.positions + step, slots, visible)


class DraftWorker:
    """The draft model, its KV, and the speculation cache of a batch of B rows."""

    def __init__(self, model: CausalLM, warping: sampling.Warping, seed: int, fan_out: FanOut,
                 downweight: float = 1.0, public_seed: int | None = None, number: int = 0,
                 drafters: int = 1):
        """`warping` and `public_seed` as the target's; `seed` of the coins for branches, `seed` + 1
        for backups, both independent of the verifier's; `fan_out` and `downweight`, C: the choices
        of sections 4.1 to 4.3. Of several `drafters`, alike in all else, `number` d prepares for
        guesses d, d + drafters, ...; the last one answers where nobody is prepared."""
        self.model, self.warping, self.fan_out = model, warping, fan_out
        self.downweight, self.lookahead = downweight, fan_out.lookahead
        self.share, self.is_last = slice(number, None, drafters), number == drafters - 1
        self.public_seed, self.rows = None if warping.greedy else public_seed, 0
        self.branch_coins = torch.Generator().manual_seed(seed)
        self.backup_coins = torch.Generator().manual_seed(seed + 1)
        self.watch = Stopwatch(model.device)
        self.no_q = torch.zeros(0 if warping.greedy else model.vocab_size, device=model.device,
                                dtype=torch.promote_types(model.dtype, torch.float32))

    def start(self, prompts: list[list[int]], longest: int) -> None:
        """Read the prompts of a new batch, whose rows will have at most `longest` tokens. Round 0
        verifies an empty speculation."""
        branches = len(range(self.fan_out.budget)[self.share])
        self.model.allocate(len(prompts), longest + self.lookahead * (1 + branches), longest)
        self.model.prefill(prompts)
        self.row = torch.arange(self.rows, self.rows + len(prompts))  # counted as the target does
        self.rows += len(prompts)
        self.length = torch.tensor([len(prompt) for prompt in prompts])  # [B] verified tokens
        width = longest + self.lookahead + 1
        self.text = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
        self.verifying = Speculation.empty(len(prompts))
        self.cache = self.nothing = SpeculationCache.empty(len(prompts), self.lookahead, self.no_q)
        self.guesses, self.outcome, self.scores = self.nothing.guesses, None, None
        self.fan_out.start(len(prompts))

    # ---- the answer ----

    def speculate(self, outcome: Outcome) -> Speculation:
        """The speculation that follows: from the cache on a hit, from the backup on a miss. One
        miss makes all rows wait, so the backup drafts for all; the rows that hit keep what they
        have. Of several drafters each answers for what it prepared."""
        self.advance(outcome)
        tokens, q, prepared = self.cache.look_up(outcome)
        hit = matches(self.guesses, outcome).any(1)  # prepared here, or by another drafter
        source = torch.full_like(outcome.bonus, BACKUP if self.is_last else NOBODY)
        source[hit] = NOBODY
        source[prepared] = PRIMARY
        if self.is_last and not (hit | outcome.ended).all():
            keep = prepared.to(tokens.device)[:, None]  # before the passes: it would wait for them
            with self.watch("backup"):
                tokens_now, q_now = getattr(self, f"{self.fan_out.backup}_backup")()
            tokens, q = tokens.where(keep, tokens_now), q.where(keep[..., None], q_now)
        self.judged, self.cache, self.guesses = (
            self.verifying.source, self.nothing, self.nothing.guesses)
        self.verifying = Speculation(tokens, q, source)
        return self.verifying

    def advance(self, outcome: Outcome) -> None:
        """Move to the end of the verified text: s_1..s_k and t* join it."""
        drafted, end = self.verifying.tokens.cpu(), self.length + outcome.num_accepted
        self.text.scatter_(1, self.length[:, None] + torch.arange(drafted.shape[1]), drafted)
        self.text.scatter_(1, end[:, None], outcome.bonus[:, None])
        self.length, self.outcome = end + 1, outcome

    def neural_backup(self) -> Drafted:
        """The draft model, a pass per token. The first takes the last two verified tokens: after a
        backup that was accepted as a whole, the KV of the last but one may be missing."""
        coins = self.toss(self.backup_coins, self.lookahead, len(self.text))
        start = (self.length - 2).clamp(min=0)  # a row that ended at once may have one token
        tokens = self.text.gather(1, start[:, None] + torch.arange(2)).to(self.model.device)
        drafted = []
        for coin, F in zip(coins, self.fan_out.shapes[BACKUP]):
            logits = self.model.causal(tokens, start)[:, -1]
            start = start + tokens.shape[1]
            drafted.append(self.warping.draw(logits, coin, F, self.downweight))
            tokens = drafted[-1][0][:, None]
        return tuple(torch.stack(parts, 1) for parts in zip(*drafted))

    def fast_backup(self) -> Drafted:
        """Prompt look-up in each row's own text: point-mass proposals, and no model."""
        V, width = self.model.vocab_size, len(self.no_q)
        tokens = look_up(self.text, self.length, self.lookahead, V).to(self.model.device)
        return tokens, torch.nn.functional.one_hot(tokens, V).to(self.no_q)[..., :width]

    def random_backup(self) -> Drafted:
        """Tokens drawn from the uniform distribution."""
        V, shape = self.model.vocab_size, (len(self.text), self.lookahead)
        coins = self.toss(self.backup_coins, *shape)
        return (coins * V).long(), self.no_q.new_full((*shape, len(self.no_q)), 1 / V)

    # ---- pre-speculation, while the target verifies ----

    def pre_speculate(self, peek: Callable[[], Outcome | None] = lambda: None) -> None:
        """Fill the speculation cache: guess the outcomes, draft what should follow each of them.

        The early outcome (ours, not the paper's): `peek()` returns the outcome if it is there
        already; if it is none of the guesses, no branch is worth growing."""
        if self.scores is not None and self.scores.shape[1] > 1:  # round 0 verified nothing
            rank = bonus_rank(self.scores, self.outcome)  # learnt only now, while time is free
            self.fan_out.observe(self.judged, self.outcome, rank)
        if not self.fan_out.budget:
            return
        device, prepared = self.model.device, []
        with self.watch("trunk"):
            self.guesses = self.guess()
            guesses = Outcome(*(part[:, self.share] for part in self.guesses))
            coins = self.toss(self.branch_coins, self.lookahead, *self.guesses.bonus.shape)
            coins = coins[..., self.share]  # all drafters toss alike
            trunk = int(self.length.max()) + self.verifying.tokens.shape[1]
            tree = tree_layout(self.length, guesses.num_accepted, trunk, self.lookahead)
            tokens, tree = guesses.bonus.to(device), Tree(*(part.to(device) for part in tree))
        for step in range(self.lookahead):
            outcome = peek()
            if outcome and not matches(guesses, outcome).any():
                return
            with self.watch("step"):
                logits = tree_pass(self.model, tree, tokens, step)
                F = self.fan_out.shapes[PRIMARY][step]
                prepared.append(self.warping.draw(logits, coins[step], F, self.downweight))
                tokens = prepared[-1][0]
        self.cache = SpeculationCache(guesses, *(torch.stack(part, 2) for part in zip(*prepared)))

    def guess(self) -> Outcome:
        """The trunk pass: put the speculation under verification into the KV, and guess its
        outcomes. The drafted token s_{k+1} cannot be the bonus token after a rejection (p < q
        there)."""
        device, lookahead = self.model.device, self.verifying.tokens.shape[1]
        last = self.text.gather(1, (self.length - 1)[:, None])
        last, drafted = last.to(device), self.verifying.tokens.to(device)
        logits = self.model.causal(torch.cat([last, drafted], 1), self.length - 1)
        self.scores = logits.clone()  # those of inference mode may not be written to
        if self.public_seed is not None:  # then guess what will be drawn with it
            keys = sampling.noise_keys(self.public_seed, self.row, self.length, lookahead)
            noise = sampling.public_noise(keys.to(device), self.model.vocab_size)
            self.scores = self.warping.probabilities(self.scores) / noise
        self.scores[:, :lookahead].scatter_(-1, drafted[..., None], -torch.inf)
        shapes = self.fan_out.shapes if lookahead else [[self.fan_out.budget]] * 2  # Thm. 12, K = 0
        outcomes = likely_outcomes(self.scores, torch.tensor(shapes)[self.verifying.source])
        return Outcome(*(part.cpu() for part in outcomes))

    def toss(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        """Uniform random numbers in [0, 1)."""
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(self.model.device)

    def report(self) -> dict[str, Any]:
        """"times": (seconds, count) of trunk passes, tree steps and backups since the last call;
        "learnt": what there is to know of the draft's choices."""
        learnt = self.fan_out.report() | {"downweight": self.downweight}
        return {"times": self.watch.read(), "learnt": learnt}


def look_up(text: torch.Tensor, length: torch.Tensor, count: int, vocab_size: int) -> torch.Tensor:
    """The `count` tokens `[B, count]` that followed the longest earlier match of the end of every
    row's text (`length` `[B]` tokens of `text` `[B, W]`), of equally long ones the most recent;
    `MATCH` tokens are as good as more.

    A match near the end is continued into its own continuation, so a repetition goes on repeating.
    Without any match the proposals are consecutive ids: nothing is lost but the round.

    >>> look_up(torch.tensor([[1, 2, 3, 4, 1, 2, 0]]), torch.tensor([6]), 5, vocab_size=10).tolist()
    [[3, 4, 1, 2, 3]]
    """
    row, place = torch.arange(len(text)), torch.arange(text.shape[1])
    windows = torch.nn.functional.pad(text, (MATCH - 1, 0), value=-1).unfold(1, MATCH, 1)
    agree = (windows == windows[row, length - 1][:, None]).flip(-1)  # token by token, backwards
    matched = agree.cumprod(-1, dtype=torch.int8).sum(-1)  # [B, W] length of the match ending here
    matched = matched.where(place < length[:, None] - 1, 0)
    best = (matched * len(place) + place).argmax(1)
    found = matched[row, best] > 0
    start = (best + 1).where(found, 0)
    ahead = torch.arange(count)
    continued = text.gather(1, start[:, None] + ahead % (length - start)[:, None])
    new_ids = (text[row, length - 1][:, None] + 1 + ahead) % vocab_size
    return continued.where(found[:, None], new_ids)
