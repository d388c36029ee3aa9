"""The speculator (Algorithm 1, speculator's side): answers every outcome with a speculation, prepared if it can be.

A round of the draft, with K = lookahead:

    speculate(outcome)    hit:  the speculation prepared for this outcome, at once
                          miss: a backup drafts, just in time (section 4.3):
                                neural, the draft model itself, K passes, or
                                fast, whatever followed the last words where they stood before, no pass
    pre_speculate()       while the target verifies:
                          one trunk pass over [t*, s_1..s_K]: K+1 distributions, from which the outcomes are guessed
                          K tree passes, one token for every guessed outcome at once: the next speculation cache

Called without `pre_speculate`, the same worker is the draft of ordinary speculative decoding: every round misses.
"""
import math
from dataclasses import dataclass
from typing import Any, Callable

import torch

import sampling
from cache import (FanOut, Outcome, Speculation, SpeculationCache, branches, choose_guesses, critical_batch_size,
                   expected_tokens, rank_guesses, throughput)
from model import CausalLM, Stopwatch


@dataclass
class Tree:
    """Where the branches of a growing speculation tree live: n branches a row, one token each per step."""
    positions: torch.Tensor  # [B, n] of the first token of each branch, the guessed bonus token
    slots: torch.Tensor      # [B, n] scratch slot of that token; `stride` further for every step
    stride: int
    mask: torch.Tensor       # [B, n, slots of the whole tree], additive: the trunk up to the fork, and own ancestors
    coins: torch.Tensor      # [B, n, K]

    def only(self, branch: torch.Tensor) -> "Tree":
        """The tree reduced to one branch `[B]` a row."""
        row = torch.arange(len(branch))
        return Tree(*(part if isinstance(part, int) else part[row, branch][:, None] for part in vars(self).values()))


class DraftWorker:
    """The draft model, its KV, and the speculation cache of a batch of B rows."""

    def __init__(self, model: CausalLM, warpers: list | None, seed: int, lookahead: int, fan_out: FanOut,
                 downweight: "Downweight", backup: "Backup"):
        """`warpers` as the target's; `seed` of the draft's own coins, independent of the verifier's; the rest are the
        choices of sections 4.1, 4.2 and 4.3."""
        self.model, self.warpers, self.lookahead = model, warpers, lookahead
        self.fan_out, self.downweight, self.backup = fan_out, downweight, backup
        self.generator = torch.Generator().manual_seed(seed)
        self.ancestors = torch.eye(fan_out.budget, dtype=torch.bool, device=model.device).repeat(1, lookahead)
        self.watch = Stopwatch(model.device)

    def start(self, prompts: list[list[int]], longest: int) -> None:
        """Read the prompts of a new batch, whose rows will have at most `longest` tokens. Round 0 verifies an empty
        speculation."""
        self.model.allocate(len(prompts), longest, spare=self.lookahead * (1 + self.fan_out.budget))
        self.model.prefill(prompts)
        self.length = torch.tensor([len(prompt) for prompt in prompts])  # [B] verified tokens
        width = longest + self.lookahead + 1
        self.text = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])  # [B, width], with room
        self.drafted = self.text[:, :0].to(self.model.device)  # [B, K] the tokens being verified
        self.hit = torch.ones(len(prompts), dtype=torch.bool)  # [B] did they come from the cache?
        self.cache: SpeculationCache | None = None
        self.verdict: tuple | None = None  # what `learn` has not yet seen

    def speculate(self, outcome: Outcome) -> Speculation:
        """The speculation for the rows that go on: from the cache on a hit, from the backup on a miss."""
        outcome = self.advance(outcome)
        if not len(outcome.bonus):
            return Speculation.empty(0)
        hit = torch.zeros(len(outcome.bonus), dtype=torch.bool)
        if self.cache:
            hit, branch = self.cache.look_up(outcome)
            self.verdict = self.hit, hit, outcome, self.ranked
        if hit.all():
            tokens, q = self.cache.take(branch)
        elif not hit.any():
            tokens, q = self.draft_now()
        else:
            tokens, q = self.cache.take(branch)
            missed = (~hit).nonzero().flatten()
            tokens[missed], backup_q = self.draft_now(missed)
            if q is not None:
                q[missed] = backup_q
        self.drafted, self.hit, self.cache = tokens, hit, None
        return Speculation(tokens, q, hit)

    def advance(self, outcome: Outcome) -> Outcome:
        """Move to the end of the verified text: s_1..s_k and t* join it. Rows that have finished are dropped, from
        the returned outcome too."""
        going_on = outcome.num_accepted >= 0
        if not going_on.all():
            self.keep(going_on)
            outcome = Outcome(outcome.num_accepted[going_on], outcome.bonus[going_on])
        places = self.length[:, None] + torch.arange(self.drafted.shape[1])
        self.text.scatter_(1, places, self.drafted.cpu())
        end = self.length + outcome.num_accepted
        self.text.scatter_(1, end[:, None], outcome.bonus[:, None])
        self.length = end + 1
        return outcome

    def keep(self, rows: torch.Tensor) -> None:
        """Drop the finished rows: `rows` `[B]` is True for those that go on."""
        self.model.kv.keep(rows)
        self.length, self.hit = self.length[rows], self.hit[rows]
        self.text, self.drafted = self.text[rows], self.drafted[rows]
        if self.cache:
            self.cache, self.ranked = self.cache.keep(rows), self.ranked[rows]

    def draw(self, logits: torch.Tensor, coins: torch.Tensor, fan_out: int
             ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens `[...]` drawn from logits `[..., V]` with coins `[...]`, and the distributions they were drawn from;
        when greedy the likeliest tokens, and None. `fan_out` is F_{i-1} for token s_i: the guesses that the cache
        will hold at the position that verifies it (Def. 14)."""
        if self.warpers is None:
            return logits.argmax(-1), None
        q = sampling.probabilities(logits, self.warpers)
        q = sampling.saguaro_distribution(q, fan_out, self.downweight.value)
        return sampling.inverse_cdf(q, coins), q

    # ---- the backup, after a miss ----

    def draft_now(self, rows: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """K tokens after the verified text of `rows` (default: all) by the backup of the moment: `(tokens, q)`."""
        with self.watch("backup"):
            rows = torch.arange(len(self.text)) if rows is None else rows
            return self.fast_backup(rows) if self.backup.kind == "fast" else self.neural_backup(rows)

    def neural_backup(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The draft model, one pass per token. The first pass takes the last two verified tokens: if all K tokens
        of a neural backup were accepted and no trunk pass followed, the KV of the last but one is missing."""
        coins = self.coins(len(rows), self.lookahead)
        shape = self.fan_out.shapes[False]
        start = self.length[rows] - 2
        tokens = self.text[rows].gather(1, start[:, None] + torch.arange(2)).to(self.model.device)
        subset = None if len(rows) == len(self.text) else rows.to(self.model.device)
        drafted, drawn_from = [], []
        for step in range(self.lookahead):
            logits = self.model.causal(tokens, start, subset)[:, -1]
            start = start + tokens.shape[1]
            token, q = self.draw(logits, coins[:, step], shape[step])
            drafted.append(token)
            drawn_from.append(q)
            tokens = token[:, None]
        return torch.stack(drafted, 1), None if self.warpers is None else torch.stack(drawn_from, 1)

    def fast_backup(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Prompt look-up in each row's own text: point-mass proposals, q = 1 on the token, and no model."""
        texts = (self.text[row, :self.length[row]] for row in rows.tolist())
        tokens = torch.stack([continue_by_look_up(text, self.lookahead, self.model.vocab_size) for text in texts])
        tokens = tokens.to(self.model.device)
        if self.warpers is None:
            return tokens, None
        dtype = torch.promote_types(self.model.dtype, torch.float32)
        like = torch.empty(self.model.vocab_size, dtype=dtype, device=tokens.device)
        return tokens, sampling.point_mass(tokens, like)

    # ---- pre-speculation, while the target verifies ----

    def pre_speculate(self, peek: Callable[[], Outcome | None] = lambda: None) -> None:
        """Fill the speculation cache while the target verifies.

        The early outcome (ours, not the paper's): `peek()` returns the outcome if it is there already. All guesses
        are known after the trunk pass, so from then on nothing but the winning branch is worth growing, and after a
        miss, nothing."""
        self.learn()
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
        """The trunk pass: put the speculation under verification into the KV, guess its outcomes, and make room for
        a branch for each in scratch slots above the trunk."""
        device, rows, lookahead = self.model.device, len(self.text), self.drafted.shape[1]
        budget, round_0 = self.fan_out.budget, not lookahead  # when k can be nothing but 0
        last = self.text.gather(1, (self.length - 1)[:, None]).to(device)
        coins = self.coins(rows, budget, self.lookahead)  # before the pass: on a GPU, they would wait for it
        logits = self.model.causal(torch.cat([last, self.drafted], 1), self.length - 1)
        self.ranked = rank_guesses(logits, self.drafted, budget).cpu()
        table = branches([budget]).expand(rows, -1, -1) if round_0 else self.fan_out.table(self.hit)
        self.cache = SpeculationCache(choose_guesses(self.ranked, table))

        trunk_end = int(self.length.max()) + lookahead
        fork = (self.length[:, None] + self.cache.guesses.num_accepted).to(device)  # [B, n] trunk tokens a branch sees
        trunk = torch.arange(trunk_end, device=device) < fork[..., None]
        visible = torch.cat([trunk, self.ancestors.expand(rows, -1, -1)], 2)
        return Tree(positions=fork, slots=(trunk_end + torch.arange(budget, device=device)).expand(rows, -1),
                    stride=budget, mask=self.model.additive(visible), coins=coins)

    def grow(self, tree: Tree) -> None:
        """One tree pass: the next token of every branch."""
        step = len(self.cache.tokens)
        tokens = self.cache.tokens[-1] if step else self.cache.guesses.bonus.to(tree.slots.device)
        seen = tree.mask.shape[-1] - (self.lookahead - step - 1) * tree.stride  # scratch slots of later steps are empty
        logits = self.model.forward(tokens, tree.positions + step, tree.slots + step * tree.stride,
                                    tree.mask[..., :seen])
        tokens, q = self.draw(logits, tree.coins[..., step], self.fan_out.shapes[True][step])
        self.cache.tokens.append(tokens)
        if q is not None:
            self.cache.q.append(q)

    def coins(self, *shape: int) -> torch.Tensor:
        """Uniform random numbers in [0, 1) on the model's device, from the draft's own generator."""
        return torch.rand(shape, generator=self.generator).to(self.model.device)

    # ---- what is learnt on the way ----

    def learn(self) -> None:
        """Let the choices of sections 4.1 to 4.3 see the last outcome. Called while the target verifies, when time
        is free."""
        if self.verdict is None:
            return
        verified_hit, hit, outcome, ranked = self.verdict
        self.verdict = None
        if len(ranked[0]) == 1:
            return  # round 0 verified nothing
        match = ranked[torch.arange(len(hit)), outcome.num_accepted] == outcome.bonus[:, None]
        rank = torch.where(match.any(1), match.long().argmax(1), ranked.shape[-1])
        self.fan_out.observe(verified_hit, outcome.num_accepted, rank)
        self.downweight.observe(outcome.num_accepted, hit)
        if self.backup.auto:
            agreed = [0 if source else self.agreement(row, k + 1) for row, (source, k) in
                      enumerate(zip(verified_hit.tolist(), outcome.num_accepted.tolist()))]
            self.backup.observe(verified_hit, outcome.num_accepted, hit, torch.tensor(agreed))

    def agreement(self, row: int, new: int) -> int:
        """With how many of the tokens that a look-up would have proposed does the text agree, whose last `new` tokens
        came from one verification?"""
        text = self.text[row, :self.length[row]]
        proposed = continue_by_look_up(text[:-new], self.lookahead, self.model.vocab_size)[:new]
        return int((proposed == text[-new:][:self.lookahead]).long().cumprod(0).sum())

    def report(self) -> dict[str, Any]:
        """(seconds, count) of the trunk passes, tree steps and backups since the last call, and what was learnt."""
        return {"times": self.watch.read(), "learnt": {
            "acceptance_rate_primary": self.fan_out.acceptance_rate(True),
            "acceptance_rate_backup": self.fan_out.acceptance_rate(False),
            "miss_exponent": self.fan_out.miss_exponent, "bonus_ranks": list(self.fan_out.ranks),
            "fan_out": self.fan_out.shapes[True], "fan_out_after_backup": self.fan_out.shapes[False],
            "downweight": self.downweight.value,
            "backup": self.backup.kind, "critical_batch_size": self.backup.critical_batch_size}}


def continue_by_look_up(text: torch.Tensor, count: int, vocab_size: int) -> torch.Tensor:
    """The `count` tokens that followed the longest earlier match of the end of `text` `[L]`, the most recent if
    several are as long.

    A match near the end is continued into its own continuation, so a repetition goes on repeating. Without any
    match the proposals are `count` consecutive ids: nothing is lost but the round."""
    matches = (text[:-1] == text[-1]).nonzero().flatten()  # places of the last token of a match
    if not len(matches):
        return (text[-1] + 1 + torch.arange(count, device=text.device)) % vocab_size
    length = 1
    while True:
        longer = matches[matches >= length]
        longer = longer[text[longer - length] == text[-1 - length]]
        if not len(longer):
            break
        matches, length = longer, length + 1
    start = matches[-1] + 1
    return text[start + torch.arange(count, device=text.device) % (len(text) - start)]


class Downweight:
    """C of Saguaro sampling (Def. 14): a number, or None to choose it from `GRID` as decoding goes.

    Downhill from C = 1: while the lowest C tried has the highest Theorem 7 speed, the next lower one is tried, for
    `TRIALS` verifications of a row; otherwise the best of those tried leads. So a pair that gains nothing by C < 1
    hardly pays for knowing it. Means are drawn towards the common mean as if by `PRIOR` more verifications, and go on
    being updated."""
    GRID, TRIALS, PRIOR = (1.0, 0.7, 0.4, 0.1), 48, 24

    def __init__(self, value: float | None, T_p: float = 1.0, T_b: float = 0.5):
        """T_p, T_b: one pre-speculation, one backup, in verifications."""
        self.auto, self.value, self.T_p, self.T_b = value is None, 1.0 if value is None else value, T_p, T_b
        self.verified = self.value  # the C of the speculation now being verified, drawn a round before
        self.sums = {C: torch.zeros(3) for C in self.GRID}  # verifications, tokens, hits

    def observe(self, num_accepted: torch.Tensor, hit: torch.Tensor) -> None:
        """One verification, `[B]` each: tokens accepted, and was its outcome in the cache?"""
        if not self.auto:
            return
        self.sums[self.verified] += torch.tensor([len(hit), int((num_accepted + 1).sum()), int(hit.sum())])
        self.verified = self.value
        tried = [C for C in self.GRID if self.sums[C][0] >= self.TRIALS]
        best = max(tried, key=lambda C: self.speed(C, len(hit))) if tried else None
        at_the_edge = len(tried) < len(self.GRID) and (not tried or best == tried[-1])
        self.value = self.GRID[len(tried)] if at_the_edge else best

    def speed(self, C: float, batch_size: int) -> float:
        count, tokens, hits = self.sums[C].tolist()
        all_count, all_tokens, all_hits = sum(self.sums.values()).tolist()
        tokens = (tokens + self.PRIOR * all_tokens / all_count) / (count + self.PRIOR)
        hits = (hits + self.PRIOR * all_hits / all_count) / (count + self.PRIOR)
        return throughput(hits, tokens, tokens, self.T_p, self.T_b, batch_size)


class Backup:
    """Who drafts after a miss (section 4.3): "neural", "fast", or "auto", whichever Corollary 16 predicts to be
    faster.

    "auto" keeps running hit and acceptance rates, and changes over for a gain of `HYSTERESIS`. It begins with the
    neural backup. The fast one need not be used to be known: the text agrees with a looked-up token exactly as often
    as verification would accept it (for a point mass both have probability p), whoever drafted that text. The times T
    are measured once at start-up and never again, so that for given times the choices, and with them sampled text,
    depend on the seed alone."""
    HYSTERESIS, PRIOR = 1.02, 8

    def __init__(self, kind: str, lookahead: int = 5, acceptance_rate: float = 0.8, fast_acceptance_rate: float = 0.2,
                 T_p: float = 1.0, T_neural: float = 0.5, T_fast: float = 0.0):
        """The acceptance rates are priors, worth `PRIOR` tokens."""
        self.auto, self.kind = kind == "auto", "neural" if kind == "auto" else kind
        self.verified = self.kind  # whose backup is being verified now, drawn a round before
        self.lookahead, self.T_p, self.T = lookahead, T_p, {"neural": T_neural, "fast": T_fast}
        self.tokens = {source: torch.tensor([self.PRIOR, self.PRIOR * rate])  # judged, accepted
                       for source, rate in (("hit", acceptance_rate), ("neural", acceptance_rate),
                                            ("fast", fast_acceptance_rate))}
        self.outcomes = torch.tensor([self.PRIOR, self.PRIOR / 2])  # all, hits
        self.critical_batch_size = None

    def observe(self, verified_hit: torch.Tensor, num_accepted: torch.Tensor, hit: torch.Tensor,
                agreed: torch.Tensor) -> None:
        """One verification, `[B]` each: did its speculation come from the cache, how many tokens were accepted, is
        its outcome in the cache, and with how many looked-up tokens did the text agree where there was no hit?"""
        seen = (num_accepted + 1).clamp(max=self.lookahead)  # tokens of the text that a proposal could be held against
        for source, rows, accepted in (("hit", verified_hit, num_accepted), ("fast", ~verified_hit, agreed),
                                       ("neural", ~verified_hit & (self.verified == "neural"), num_accepted)):
            judged = (accepted + 1).minimum(seen)
            self.tokens[source] += torch.tensor([int(judged[rows].sum()), int(accepted[rows].sum())])
        self.outcomes += torch.tensor([len(hit), int(hit.sum())])
        self.verified = self.kind
        hit_rate, *rates = (float(good / total) for total, good in (self.outcomes, *self.tokens.values()))
        after_hit, *after_miss = (expected_tokens(rate, self.lookahead) for rate in rates)
        speed = {kind: throughput(hit_rate, after_hit, tokens, self.T_p, T, len(hit))
                 for (kind, T), tokens in zip(self.T.items(), after_miss)}
        other = {"neural": "fast", "fast": "neural"}[self.kind]
        if speed[other] > self.HYSTERESIS * speed[self.kind]:
            self.kind = other
        b = critical_batch_size(hit_rate, after_hit, *after_miss, self.T_p, *self.T.values())
        self.critical_batch_size = b if math.isfinite(b) else None  # None: the neural backup is better at every size
