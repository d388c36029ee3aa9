"""The verifier, and the decoding loop (Algorithm 1, verifier's side).

Autoregressive decoding, speculative decoding and SSD are one loop with three speculators:

    outcome = target.prefill(prompts)                  # round 0: the verification of an empty speculation
    while some row is unfinished:
        speculation = speculator.speculate(outcome)    # who drafts, and when, is the only difference
        outcome = target.verify(speculation)

The target never learns which speculator it has: `NoSpeculator` (K = 0) makes the loop autoregressive decoding; the
draft worker, called in the same process, makes it speculative decoding; a proxy for the draft's process makes it
SSD.
"""
import itertools
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Protocol

import torch

import sampling
from cache import Outcome, Speculation
from model import CausalLM, Stopwatch


class TargetWorker:
    """The target model and the verified text of a batch of B rows."""

    def __init__(self, model: CausalLM, warpers: list | None, seed: int):
        """`warpers`: see `sampling.logits_warpers`; `seed` of the coins that accept, reject and draw bonus tokens."""
        self.model, self.warpers = model, warpers
        self.generator = torch.Generator().manual_seed(seed)
        self.watch = Stopwatch(model.device)

    def prefill(self, prompts: list[list[int]], longest: int, lookahead: int) -> Outcome:
        """Round 0: read the prompts (token ids, none empty) of texts that will have at most `longest` tokens, and
        verify an empty speculation; later ones have at most `lookahead` tokens."""
        self.model.allocate(len(prompts), longest, spare=lookahead)
        self.model.prefill(prompts)
        self.length = torch.tensor([len(prompt) for prompt in prompts])  # [B] verified tokens; the KV lacks the last
        self.last = torch.tensor([prompt[-1:] for prompt in prompts], device=self.model.device)  # [B, 1]
        return self.verify(Speculation.empty(len(prompts)))

    def verify(self, speculation: Speculation) -> Outcome:
        """One target pass over the last verified token and the K drafted ones: accept, reject, add the bonus
        token."""
        with self.watch("verify"):
            coins = torch.rand(len(self.last), speculation.tokens.shape[1] + 1, generator=self.generator)
            # All that must move to a GPU moves before the pass: later, it would wait for it.
            drafted, q, coins = (part if part is None else part.to(self.model.device)
                                 for part in (speculation.tokens, speculation.q, coins))
            logits = self.model.causal(torch.cat([self.last, drafted], 1), self.length - 1)
            p = sampling.probabilities(logits, self.warpers)
            num_accepted, bonus = sampling.verify(p, drafted, q, coins)
            outcome = Outcome(*torch.stack((num_accepted, bonus)).cpu())
        self.length = self.length + outcome.num_accepted + 1
        self.last = bonus[:, None]
        return outcome

    def keep(self, rows: torch.Tensor) -> None:
        """Drop the finished rows: `rows` `[B]` is True for those that go on."""
        self.model.kv.keep(rows)
        self.length, self.last = self.length[rows], self.last[rows.to(self.last.device)]


class Speculator(Protocol):
    """Who drafts. The draft worker is one; so is its remote proxy."""

    def start(self, prompts: list[list[int]], longest: int) -> None:
        """A new batch begins; no row will grow beyond `longest` tokens."""

    def speculate(self, outcome: Outcome) -> Speculation:
        """The speculation that follows an outcome, for the rows whose `num_accepted` is not negative."""

    def report(self) -> dict[str, Any]:
        """"times": (seconds, count) of "trunk", "step" and "backup" passes since the last call; "learnt": see the
        draft worker."""


class NoSpeculator:
    """Autoregressive decoding: every speculation is empty."""

    def start(self, prompts: list[list[int]], longest: int) -> None:
        pass

    def speculate(self, outcome: Outcome) -> Speculation:
        return Speculation.empty(int((outcome.num_accepted >= 0).sum()))

    def report(self) -> dict[str, Any]:
        return {"times": {}, "learnt": {}}


@dataclass
class Generation:
    """One prompt's continuation."""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "eos", "length" (max_new_tokens) or "context" (the model's limit)

    def extend(self, new: list[int], room: int, eos: list[int], full: str) -> list[int]:
        """Append the tokens of one round, up to an end-of-sequence token or `room` tokens in all (then finished for
        the reason `full`); returns those appended."""
        end = next((i + 1 for i, token in enumerate(new) if token in eos), None)
        new = new[:min(end or len(new), room - len(self.tokens))]
        self.tokens += new
        if end is not None and end == len(new):
            self.finish_reason = "eos"
        elif len(self.tokens) == room:
            self.finish_reason = full
        return new


@dataclass
class Stats:
    """Counts and times of decoding. Rates speak of decoding alone: prefill, and the token that it yields, are
    apart."""
    tokens: int = 0             # new tokens, those of prefill included
    prefill_tokens: int = 0     # one a prompt
    prefill_seconds: float = 0.0
    seconds: float = 0.0        # decoding, wall clock
    rounds: int = 0
    row_rounds: int = 0         # rounds, counted once for every row taking part
    accepted: int = 0
    rejected: int = 0           # rejections: at most one per row and round
    hits: int = 0
    hit_tokens: int = 0         # those of `tokens` that the rounds after a hit gave
    times: dict[str, tuple[float, int]] = field(default_factory=dict)  # (seconds, count) by kind of work
    learnt: dict[str, Any] = field(default_factory=dict)  # the draft's estimates and choices after the last batch

    def count_round(self, speculation: Speculation, outcome: Outcome) -> None:
        lookahead, accepted = speculation.tokens.shape[1], outcome.num_accepted.tolist()
        self.rounds += 1
        self.row_rounds += len(accepted)
        self.accepted += sum(accepted)
        self.rejected += sum(k < lookahead for k in accepted)
        self.hits += sum(speculation.hit.tolist())

    def add_times(self, times: dict[str, tuple[float, int]]) -> None:
        for name, (seconds, count) in times.items():
            old_seconds, old_count = self.times.get(name, (0.0, 0))
            self.times[name] = (old_seconds + seconds, old_count + count)

    def mean_seconds(self, name: str) -> float | None:
        seconds, count = self.times.get(name, (0.0, 0))
        return seconds / count if count else None

    def summary(self, lookahead: int) -> dict[str, Any]:
        """The figures of `--json`. `acceptance_rate` is the maximum-likelihood a of the paper's geometric model;
        T_p (one pre-speculation: a trunk pass and K tree steps) and T_b (one backup) are in units of one
        verification."""
        decoded = self.tokens - self.prefill_tokens
        verify = self.mean_seconds("verify")
        trunk, step, backup = (self.mean_seconds(name) for name in ("trunk", "step", "backup"))

        def ratio(numerator, denominator):
            return numerator / denominator if numerator is not None and denominator else None

        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": ratio(decoded, self.seconds),
            "rounds": self.rounds,
            "tokens_per_round": ratio(decoded, self.row_rounds),
            "acceptance_rate": ratio(self.accepted, self.accepted + self.rejected) if lookahead else None,
            "hit_rate": ratio(self.hits, self.row_rounds) if lookahead else None,
            "E_hit": ratio(self.hit_tokens, self.hits),
            "E_miss": ratio(decoded - self.hit_tokens, self.row_rounds - self.hits),
            "verifier_utilisation": ratio(self.times["verify"][0], self.seconds) if self.rounds else None,
            "T_p": ratio(trunk + lookahead * step, verify) if trunk and step else None,
            "T_b": ratio(backup, verify),
            "prefill_seconds": self.prefill_seconds,
            **self.learnt,
        }


def decode(target: TargetWorker, speculator: Speculator, prompts: list[list[int]], max_new_tokens: int, lookahead: int,
           eos: list[int], stats: Stats, on_tokens: Callable[[int, list[int]], None] = lambda row, new: None
           ) -> list[Generation]:
    """Continue every prompt (token ids) until an `eos` token, `max_new_tokens` or the target's context; the loop
    above.

    `on_tokens(index, new)` is told the new tokens of each prompt as they are verified; `stats` is added to."""
    context = target.model.context
    rooms = [min(max_new_tokens, context - len(prompt)) for prompt in prompts]
    longest = max(len(prompt) + room for prompt, room in zip(prompts, rooms))
    generations = [Generation() for _ in prompts]
    rows = list(range(len(prompts)))  # the prompt that each row of the shrinking batch belongs to

    started = time.perf_counter()
    speculator.start(prompts, longest)
    speculation = Speculation.empty(len(prompts))
    outcome = target.prefill(prompts, longest, lookahead)
    stats.prefill_seconds += time.perf_counter() - started
    stats.prefill_tokens += len(prompts)
    target.watch.read()

    started = time.perf_counter()
    while True:
        drafted, accepted, bonus = speculation.tokens.tolist(), outcome.num_accepted.tolist(), outcome.bonus.tolist()
        for row, index in enumerate(rows):
            new = generations[index].extend(drafted[row][:accepted[row]] + [bonus[row]], rooms[index], eos,
                                            "length" if rooms[index] == max_new_tokens else "context")
            stats.tokens += len(new)
            stats.hit_tokens += len(new) if speculation.hit[row] else 0
            on_tokens(index, new)
        unfinished = [generations[index].finish_reason is None for index in rows]
        if not all(unfinished):
            rows, going_on = list(itertools.compress(rows, unfinished)), torch.tensor(unfinished)
            outcome = Outcome(outcome.num_accepted.where(going_on, -1), outcome.bonus)
            target.keep(going_on)
        speculation = speculator.speculate(outcome)
        if not rows:
            break
        outcome = target.verify(speculation)
        stats.count_round(speculation, outcome)
    stats.seconds += time.perf_counter() - started
    stats.add_times(target.watch.read())
    report = speculator.report()
    stats.add_times(report["times"])
    stats.learnt = report["learnt"]
    return generations
