"""Speculative speculative decoding (SSD): Algorithm 1, its two columns, and the command.

    torchrun --nproc-per-node 2 saguaro.py --help

Rank 0 holds the target and decodes; the last rank (of --drafters D the last D) holds the draft and
answers; any between hold the target together with rank 0 (tensor-parallel) and follow it. All parse
the same command line and read the same prompts, so only data travels, in a fixed order and in
messages of known size, each heard by all:

    rank 0:  prefill | say v0 |           hear s1 | verify s1 | say v1 |          hear s2 | ...
    last:    prefill, pre-speculate | hear v0, say s1 | pre-speculate | hear v1, say s2 | ...

Algorithm 1                                        here
-----------                                        ----
verifier:    receive the speculation s^T           RemoteSpeculator.speculate, called by decode
             verify it                             TargetWorker.verify, sampling.verify
             send the outcome v^T = (k, t*)        Wire.outcome
speculator:  predict likely outcomes               DraftWorker.guess, cache.likely_outcomes
             prepare a speculation for each: S^T   DraftWorker.pre_speculate, SpeculationCache
             receive v^T; in S^T? send that        DraftWorker.speculate, SpeculationCache.look_up
             else ask the backup speculator        DraftWorker.neural_backup, .fast_backup, ...
"""
from runtime.settings import Settings, begin, decoding, interrupted, read_prompts

SETTINGS = begin(Settings) if __name__ == "__main__" else None  # importing torch takes seconds

from typing import Any, Callable

import torch
import torch.distributed as dist

from cache import BACKUP, NOBODY, FanOut, Outcome, Speculation
from draft_worker import DraftWorker
from runtime.command import Display, Ranks, Run, Stats, Texts, run
from runtime.model import CausalLM
from sampling import Warping
from target_worker import TargetWorker


def decode(target: TargetWorker, speculator, texts: Texts) -> None:
    """The verifier's column. Autoregressive decoding, speculative decoding and SSD are this one
    loop; who drafts, and when, is the only difference."""
    speculator.start(texts.prompts, texts.longest)
    speculation = Speculation.empty(len(texts.prompts))
    outcome = target.prefill(texts.prompts, texts.longest, speculator.lookahead)  # round 0
    while True:
        outcome = texts.extend(speculation, outcome)
        target.advance(outcome)
        speculation = speculator.speculate(outcome)
        if texts.ended:
            report = speculator.report()
            return texts.stats.add(target.watch.read() | report["times"], report["learnt"])
        outcome = target.verify(speculation)


def serve(draft: DraftWorker, wire: "Wire", prompts: list[list[int]], longest: int,
          early_outcome: bool) -> None:
    """The speculator's column. The outcome arrives while the tree grows, which may look for it."""
    draft.start(prompts, longest)
    while True:
        outcome, arrival = wire.listen(len(prompts))
        draft.pre_speculate(
            lambda: outcome if early_outcome and arrival.is_completed() else None)
        arrival.wait()
        if outcome.ended.all():
            return wire.report(draft.report())
        draft.verifying = wire.speculation(len(prompts), draft.speculate(outcome))


def follow(target: TargetWorker, wire: "Wire", prompts: list[list[int]], longest: int) -> None:
    """The other target ranks: their part of every pass. Rank 0 alone judges, so that rounding
    cannot part them."""
    target.prefill(prompts, longest, wire.lookahead)
    while True:
        outcome = wire.outcome(len(prompts))
        if outcome.ended.all():
            return wire.report()
        target.advance(outcome)
        target.verify(wire.speculation(len(prompts)))


class Wire:
    """What the ranks say to each other. Every message is heard by all, so that any number of ranks
    may hold the target. Outcomes are needed by Python and travel between host memories;
    speculations are data, from device to device."""

    def __init__(self, ranks: Ranks, lookahead: int, width: int, dtype: torch.dtype):
        """`width` of q: V, or 0 when greedy, and its `dtype`."""
        self.rank, self.drafters = ranks.rank, ranks.drafters
        self.device, self.group = ranks.wire_device, ranks.everybody
        self.lookahead, self.width, self.dtype = lookahead, width, dtype

    def listen(self, rows: int, own: Outcome | None = None) -> tuple[Outcome, dist.Work]:
        """Rank 0's `own` outcome, heard by all, `[B, 2]`; and its arrival: until that is completed
        the numbers mean nothing."""
        message = torch.empty(rows, 2, dtype=torch.long) if own is None else torch.stack(own, 1)
        return Outcome(*message.unbind(1)), dist.broadcast(message, 0, async_op=True)

    def outcome(self, rows: int, own: Outcome | None = None) -> Outcome:
        """The same, waited for."""
        outcome, arrival = self.listen(rows, own)
        arrival.wait()
        return outcome

    def speculation(self, rows: int, own: Speculation | None = None) -> Speculation:
        """What the drafters know, heard by all one after the other: each says its `own` rows,
        source, tokens and, if sampling, q, `[B, 1 + K + K V]`. Where two answer for a row, the last
        one counts; only drafters on unlike devices ever do. (Floating point holds every token id
        below 2^24.)"""
        sizes = [1, self.lookahead, self.lookahead * self.width]
        shape = rows, self.lookahead, self.width
        message = torch.zeros(rows, sum(sizes), dtype=self.dtype, device=self.device)
        source, _, q = message.split(sizes, 1)
        source.fill_(BACKUP)  # where nobody answers: token 0, from its point mass
        q.view(shape)[..., :1].fill_(1)
        for drafter in self.drafters:
            part = torch.empty_like(message)
            if drafter == self.rank:
                said = own.source[:, None], own.tokens, own.q.flatten(1)
                for place, each in zip(part.split(sizes, 1), said):
                    place.copy_(each)
            dist.broadcast(part, drafter, self.group)
            message = message.where(part[:, :1] == NOBODY, part)
        source, tokens, q = message.split(sizes, 1)
        return Speculation(tokens.long(), q.view(shape), source[:, 0].long().cpu())

    def report(self, own: dict[str, Any] | None = None) -> dict[str, Any]:
        """The last drafter's `own` report, heard by all."""
        report = [own]
        dist.broadcast_object_list(report, self.drafters[-1])
        return report[0]


class RemoteSpeculator:
    """Who drafts, as rank 0 sees it: the draft's ranks, or a speculator of its `own`, which the
    other target ranks are to hear, too."""

    def __init__(self, wire: Wire, own: "DraftWorker | NoSpeculator"):
        self.wire, self.own, self.lookahead, self.start = wire, own, wire.lookahead, own.start

    def speculate(self, outcome: Outcome) -> Speculation:
        rows = len(outcome.bonus)
        self.wire.outcome(rows, outcome)
        if outcome.ended.all():
            return Speculation.empty(rows)
        return self.wire.speculation(rows, self.own.speculate(outcome))

    def report(self) -> dict[str, Any]:
        return self.wire.report(self.own.report())


class NoSpeculator:
    """Autoregressive decoding: every speculation is empty. Where other ranks draft it stands in,
    unheard."""
    lookahead = 0

    def start(self, prompts: list[list[int]], longest: int) -> None:
        pass

    def speculate(self, outcome: Outcome) -> Speculation:
        return Speculation.empty(len(outcome.bonus))

    def report(self) -> dict[str, Any]:
        return {"times": {}, "learnt": {}}


class Decoder:
    """One way of decoding, with the models that this rank holds. All ranks make the same one, and
    call it for the same batches; a process that is alone (`ranks` None) decodes by `ar` or
    `sd`."""

    def __init__(self, s: Settings, context: int, target: CausalLM | None, draft: CausalLM | None,
                 ranks: Ranks | None = None):
        """`context` of the target; the models that this rank does not hold are None."""
        self.settings, self.context, self.stats = s, context, Stats()
        self.eos = target.eos_tokens if target and not s.ignore_eos else []
        warping = Warping(s.temperature, s.top_k, s.top_p)
        public_seed = None if s.no_public_noise else s.seed
        self.target = TargetWorker(target, warping, s.seed, public_seed) if target else None
        self.speculator = NoSpeculator()
        if draft and s.mode != "ar":
            fan_out = FanOut(s.lookahead, s.drafters * s.budget, s.fan_out, s.backup,
                             s.acceptance_rate, s.miss_exponent)
            downweight = s.downweight if s.mode == "ssd" else 1.0  # only a cache gains from C < 1
            number = ranks.rank - ranks.shards if ranks and s.mode == "ssd" else 0
            self.speculator = DraftWorker(draft, warping, s.seed + 1, fan_out, downweight,
                                          public_seed, number, s.drafters)
        self.ranks = ranks if ranks and ranks.world > 1 else None
        if self.ranks:
            lookahead = s.lookahead if s.mode != "ar" else 0
            width = 0 if warping.greedy else (target or draft).vocab_size
            dtype = torch.float64 if s.dtype == "float64" else torch.float32
            self.wire = Wire(ranks, lookahead, width, dtype)

    def __call__(self, prompts: list[list[int]],
                 on_tokens: Callable[[int, list[int], int], None] = lambda *_: None
                 ) -> list[list[int]]:
        """The new tokens of every prompt of a batch (token ids), on rank 0; for `on_tokens` see
        `Texts`."""
        texts = Texts(prompts, self.settings.max_new_tokens, self.context, self.eos, self.stats,
                      on_tokens)
        if not self.ranks:
            decode(self.target, self.speculator, texts)
        elif self.ranks.rank == 0:
            decode(self.target, RemoteSpeculator(self.wire, self.speculator), texts)
        elif self.ranks.drafts:
            serve(self.speculator, self.wire, prompts, texts.longest,
                  not self.settings.no_early_outcome)
        else:
            follow(self.target, self.wire, prompts, texts.longest)
        return texts.new


def generate(s: Settings) -> None:
    """All prompts, decoded and shown."""
    job = Run(s, read_prompts(s))
    job.join_and_load()
    decoder = Decoder(s, job.context, job.target, job.draft, job.ranks)
    display = Display(job) if job.ranks.rank == 0 else None
    decoding.set()
    for start in range(0, len(job.prompts), s.batch_size):
        batch = job.prompts[start:start + s.batch_size]
        if display:
            display.end_batch(decoder(batch, display.show), decoder.eos)
        else:
            decoder(batch)
        if interrupted.is_set():
            break
    if display:
        display.finish(decoder.stats.summary())


if __name__ == "__main__":
    run(SETTINGS, generate)
