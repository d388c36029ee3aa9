"""Speculative speculative decoding (SSD): Algorithm 1, its two columns, and the command.

In ssd rank 0 holds the target and decodes; the last rank holds the draft and answers. Ranks between
them share the target with rank 0 (tensor parallelism) and follow it. All ranks parse the same
command line and read the same prompts, so in the rounds of a batch only tensors of known size
travel. They are broadcast to all ranks, in a fixed order:

    rank 0:  prefill | send v0 |                receive s1 | verify s1 | send v1 |          ...
    last:    prefill, pre-speculate | receive v0, send s1 | pre-speculate | receive v1, send s2 ...

Unlike the paper's draft, ours does not speculate from the prompt: it first guesses v0.

Algorithm 1                                        here
-----------                                        ----
verifier:    receive the speculation s^T           Channel.receive_speculation
             verify it                             TargetWorker.verify, sampling.verify
             send the outcome v^T = (k, t*)        Channel.send_outcome
speculator:  predict likely outcomes               DraftWorker.trunk_pass, cache.likely_outcomes
             prepare a speculation for each: S^T   DraftWorker.pre_speculate, SpeculationCache
             receive v^T; in S^T? send that        DraftWorker.speculate, SpeculationCache.look_up
             else ask the backup speculator        draft_worker.neural_backup, lookup_backup, ...

In sd, in ar and in a notebook no other rank drafts: `TakingTurns` stands in for the channel.
"""
if __name__ == "__main__":  # before the imports below, which take seconds; `launch` never returns
    from cli.launch import launch
    from cli.settings import Settings
    launch(Settings, "saguaro")  # parses, starts the draft's rank, imports this file, calls `main`

import time
from dataclasses import replace
from typing import Callable, Iterator

import torch
import torch.distributed as dist

from cache import FAN_OUTS_BY_ROUND, FINISHED, Outcome, Speculation, choose_backup, fan_out_shape
from cli.job import Job, Models, check_prompts
from cli.placement import Placement, gather
from cli.screen import Display
from cli.settings import Settings
from cli.stats import RowRound, Stats, choices
from draft_worker import BACKUPS, DraftWorker, Plan
from engine.errors import UserError, reported_as
from engine.model import to_device
from sampling import Sampler
from target_worker import TargetWorker

# (row, new tokens, source), after every round; if it returns False, the row's text ends there
OnTokens = Callable[[int, list[int], int], bool | None]


# ---- the columns of Algorithm 1 ----

def decode(target: TargetWorker, speculator: "Channel | TakingTurns", sequences: "Sequences",
           lookahead: int) -> Iterator[tuple[Speculation, Outcome]]:
    """Run the verifier's column. Autoregressive decoding, speculative decoding and SSD are this one
    loop; who drafts, and when, is the only difference. `speculator` is a `Channel` to the draft's
    rank, or `TakingTurns` with a draft in this process. Yields every round, once its tokens have
    joined the `sequences`."""
    rows = len(sequences.prompts)
    speculation = Speculation.empty(rows)
    outcome = target.prefill(sequences.prompts, sequences.max_length, lookahead)
    while True:
        outcome = sequences.extend(speculation, outcome)
        speculator.send_outcome(outcome)
        yield speculation, outcome  # to be shown while the speculator answers
        if outcome.finished.all():
            return
        target.advance(outcome)
        speculation = speculator.receive_speculation(rows)
        outcome = target.verify(speculation)


def serve(draft: DraftWorker, channel: "Channel", prompts: list[list[int]],
          max_length: int) -> None:
    """Run the speculator's column."""
    draft.start(prompts, max_length)
    speculation = Speculation.empty(len(prompts))
    while True:
        cache = draft.pre_speculate(speculation)  # while the target verifies it
        outcome = channel.receive_outcome(len(prompts))
        if outcome.finished.all():
            return
        speculation = draft.speculate(speculation, outcome, cache)
        channel.send_speculation(speculation)


def follow(target: TargetWorker, channel: "Channel", prompts: list[list[int]],
           max_length: int) -> None:
    """Take part in every pass, as the other ranks of a shared target do. They follow the outcomes
    that rank 0 decides: if each decided itself, rounding could make them differ."""
    target.prefill(prompts, max_length, channel.lookahead)
    while True:
        outcome = channel.receive_outcome(len(prompts))
        if outcome.finished.all():
            return
        target.advance(outcome)
        target.verify(channel.receive_speculation(len(prompts)))


# ---- between the columns ----

class Channel:
    """Sends the messages between ranks. All are broadcast, because any number of ranks may hold the
    target. Outcomes decide what Python does next, so they travel between host memories, in the
    default group. Speculations feed the models, so they travel from device to device."""

    def __init__(self, placement: Placement, lookahead: int, q_template: torch.Tensor):
        """`q_template` `[V]`, or `[0]` for point masses, gives every q its width and type, and the
        messages between devices theirs."""
        self.draft_rank = placement.draft_rank
        self.group = placement.world_group
        self.lookahead = lookahead
        self.q_template = q_template

    def send_outcome(self, outcome: Outcome) -> None:
        """Rank 0 tells all ranks the outcome, `[B, 2]`: k and t*."""
        dist.broadcast(torch.stack(outcome, 1), 0)

    def receive_outcome(self, rows: int) -> Outcome:
        message = torch.empty(rows, 2, dtype=torch.long)
        dist.broadcast(message, 0)
        return Outcome(message[:, 0], message[:, 1])

    def send_speculation(self, speculation: Speculation) -> None:
        """Tell all ranks, as the one that drafts, source and tokens, `[B, 1 + K]`, and then their
        q, `[B, K, V]`. A q without numbers is not sent: of greedy drafts, or with K = 0."""
        source = to_device(speculation.source[:, None], speculation.tokens.device)
        message = torch.cat([source, speculation.tokens], 1).to(self.q_template.device)
        dist.broadcast(message, self.draft_rank, self.group)
        if speculation.q.numel():
            dist.broadcast(speculation.q.to(self.q_template), self.draft_rank, self.group)

    def receive_speculation(self, rows: int) -> Speculation:
        message = self.q_template.new_empty(rows, 1 + self.lookahead, dtype=torch.long)
        dist.broadcast(message, self.draft_rank, self.group)
        q = self.q_template.new_empty(rows, self.lookahead, len(self.q_template))
        if q.numel():
            dist.broadcast(q, self.draft_rank, self.group)
        return Speculation(message[:, 1:], q, message[:, 0])


class TakingTurns:
    """Stands in for a `Channel` to the draft's rank where this process drafts itself, in turns with
    the target. Text and hits are the same, but nothing overlaps. With a budget of 0 this is plain
    speculative decoding, and without a draft autoregressive decoding."""

    def __init__(self, draft: DraftWorker | None, prompts: list[list[int]], max_length: int,
                 followers: Channel | None = None):
        """`followers` leads to the target's other ranks, which hear all that rank 0 decides."""
        self.draft = draft
        self.followers = followers
        self.speculation = Speculation.empty(len(prompts))
        if draft:
            draft.start(prompts, max_length)
            self.cache = draft.pre_speculate(self.speculation)

    def send_outcome(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if self.followers:
            self.followers.send_outcome(outcome)

    def receive_speculation(self, rows: int) -> Speculation:
        """Do a round of `serve`: the draft's answer, and the next pre-speculation."""
        if self.draft:
            self.speculation = self.draft.speculate(self.speculation, self.outcome, self.cache)
            self.cache = self.draft.pre_speculate(self.speculation)
        if self.followers:
            self.followers.send_speculation(self.speculation)
        return self.speculation


class Sequences:
    """Collects the new tokens of a batch, as they are verified."""

    def __init__(self, prompts: list[list[int]], max_new_tokens: int, context: int, eos: list[int],
                 max_length: int = 0):
        """A text ends with an `eos` token, after `max_new_tokens`, or where the `context` is full.
        `max_length` is the longest text of any batch, if known, so that buffers are made once."""
        self.prompts = prompts
        self.eos = eos
        self.max_new_tokens = max_new_tokens
        self.max_new = [min(max_new_tokens, context - len(prompt)) for prompt in prompts]
        longest = min(max(map(len, prompts)) + max_new_tokens, context)
        self.max_length = max(longest, max_length)
        self.new_tokens = [[] for _ in prompts]
        # of each row "eos", "length" (max_new_tokens), "context" or "stop" (by `on_tokens`)
        self.finish_reasons: list[str | None] = [None] * len(prompts)
        self.last_round: list[RowRound] = []  # of the active rows
        self.failure: BaseException | None = None  # what `on_tokens` raised

    def extend(self, speculation: Speculation, outcome: Outcome) -> Outcome:
        """Append the tokens of a round. Returns its outcome, in which finished rows are marked."""
        self.last_round = []
        columns = (speculation.source, speculation.tokens, *outcome)
        rows = zip(*(column.tolist() for column in columns))
        for row, (source, drafted, k, bonus) in enumerate(rows):
            if not self.finish_reasons[row]:
                new_tokens = self.extend_row(row, drafted[:k] + [bonus])
                self.last_round.append(RowRound(row, source, drafted, k, bonus, new_tokens))
        finished = torch.tensor([reason is not None for reason in self.finish_reasons])
        return Outcome(outcome.num_accepted.masked_fill(finished, FINISHED), outcome.bonus)

    def extend_row(self, row: int, new_tokens: list[int]) -> list[int]:
        """Append tokens up to the first `eos`, or to the length allowed. Returns those kept."""
        text = self.new_tokens[row]
        kept = new_tokens[:self.max_new[row] - len(text)]
        ends = [place for place, token in enumerate(kept, start=1) if token in self.eos]
        if ends:
            kept = kept[:ends[0]]
        text += kept
        if ends:
            self.finish_reasons[row] = "eos"
        elif len(text) == self.max_new[row]:
            self.finish_reasons[row] = "length" if len(text) == self.max_new_tokens else "context"
        return kept

    def stop(self, row: int) -> None:
        """End a row's text. All ranks hear of it with the next outcome."""
        self.finish_reasons[row] = self.finish_reasons[row] or "stop"


# ---- putting it together ----

class Decoder:
    """Decodes in one way, with the models that this rank holds. All ranks make the same decoder,
    and call it for the same batches. Decoders of the same models share their KV, so use one at a
    time. For other settings make another."""

    def __init__(self, settings: Settings, models: Models):
        self.settings = settings
        self.models = models
        self.placement = models.placement
        self.lookahead = settings.lookahead if settings.mode != "ar" else 0
        self.target, self.draft = workers(settings, models)
        self.channel = None
        if self.placement and self.placement.world_size > 1:
            width = models.vocab_size if settings.temperature else 0
            dtype = torch.float64 if settings.dtype == "float64" else torch.float32
            q_template = torch.empty(width, dtype=dtype, device=self.placement.channel_device)
            self.channel = Channel(self.placement, self.lookahead, q_template)
        if settings.mode != "ar" and not (self.draft or self.channel):
            raise UserError(f"--mode {settings.mode}: these models were loaded without a draft")
        stops_at_eos = models.target is not None and not settings.ignore_eos
        self.eos = models.target.eos_tokens if stops_at_eos else []
        chosen = choices(plan(settings), settings.downweight) if self.lookahead else {}
        self.stats = Stats(self.lookahead, chosen,
                           in_turns=settings.mode == "ssd" and not self.channel)

    def __call__(self, prompts: list[list[int]],
                 on_tokens: OnTokens = lambda *_: None) -> list[list[int]]:
        """Return, on rank 0, the new token ids of every prompt of a batch; `finish_reasons` then
        says why each text ended. Rank 0 calls `on_tokens` after every round. What that raises is
        raised here, once the batch has ended on all ranks. Raises `UserError` for prompts that
        cannot be continued."""
        self.models.set_pace(self.settings.pace)
        context = self.models.context
        prompts = check_prompts(prompts, context, self.models.vocab_size)
        sequences = Sequences(prompts, self.settings.max_new_tokens, context, self.eos,
                              self.models.max_length)
        if self.channel is None or self.placement.rank == 0:
            self.lead(sequences, on_tokens)
        elif self.draft:
            serve(self.draft, self.channel, prompts, sequences.max_length)
        else:
            follow(self.target, self.channel, prompts, sequences.max_length)
        spans = [span for worker in (self.target, self.draft) if worker
                 for span in worker.clock.read()]
        report = (spans, self.draft.guess_counts.report() if self.draft else [])
        self.stats.add(gather(report) if self.channel else [report])
        self.finish_reasons = sequences.finish_reasons
        if sequences.failure:
            raise sequences.failure
        return sequences.new_tokens

    def lead(self, sequences: Sequences, on_tokens: OnTokens) -> None:
        """Decode on rank 0, and record and show every round."""
        start = time.perf_counter()
        rounds = decode(self.target, self.speculator(sequences), sequences, self.lookahead)
        for number, _ in enumerate(rounds):
            end = time.perf_counter()
            self.stats.log.append((number, start, end, sequences.last_round))
            start = end  # showing a round counts in the next, and overlaps the speculator's answer
            try:
                for row in sequences.last_round:
                    if on_tokens(row.row, row.new_tokens, row.source) is False:
                        sequences.stop(row.row)
            except BaseException as problem:  # other ranks are at work: end the batch with them
                sequences.failure = problem
                for row in range(len(sequences.prompts)):
                    sequences.stop(row)

    def speculator(self, sequences: Sequences) -> Channel | TakingTurns:
        """Return who drafts for rank 0: another rank, or this process."""
        if self.settings.mode == "ssd" and self.channel:
            return self.channel
        return TakingTurns(self.draft, sequences.prompts, sequences.max_length, self.channel)


def workers(settings: Settings,
            models: Models) -> tuple[TargetWorker | None, DraftWorker | None]:
    """Make the verifier and the speculator, or None for what another rank runs, or nobody."""
    sampling = (settings.temperature, settings.top_k, settings.top_p)
    target = None
    draft = None
    if models.target:
        target = TargetWorker(models.target, Sampler(*sampling), settings.seed)
    if models.draft and settings.mode != "ar":
        sampler = Sampler(*sampling, settings.downweight)
        draft = DraftWorker(models.draft, sampler, settings.seed, plan(settings))
    return target, draft


def plan(settings: Settings) -> Plan:
    """Make the choices of sections 4.1 and 4.3. Raises `UserError` for an unknown name."""
    fan_out = fan_out_with(settings, settings.acceptance_rate)
    backup = settings.backup
    critical_batch_size = None
    if backup == "auto":
        target, draft = settings.pace
        draft_pass = draft / target if target else 1 / len(fan_out)  # assumes T_p = 1
        backup, critical_batch_size = choose_backup(
            settings.batch_size, fan_out, settings.acceptance_rate,
            settings.backup_acceptance("random"), settings.miss_exponent, draft_pass)
    if backup not in BACKUPS:
        raise UserError(f"--backup {backup}: there are {', '.join(BACKUPS)} and auto")
    rates = (settings.acceptance_rate, settings.backup_acceptance(backup))
    return Plan([fan_out, fan_out_with(settings, rates[1])], backup, critical_batch_size,
                FAN_OUTS_BY_ROUND.get(settings.fan_out), rates, settings.miss_exponent)


def fan_out_with(settings: Settings, acceptance_rate: float) -> list[int]:
    """Return F_0..F_K as --fan-out says; all are 0 in sd, where nothing is prepared."""
    with reported_as(f"--fan-out {settings.fan_out}", ValueError):
        shape = fan_out_shape(settings.fan_out, settings.budget, settings.lookahead,
                              acceptance_rate, settings.miss_exponent)
    return [0] * len(shape) if settings.mode == "sd" else shape


def batches_of(prompts: list[list[int]], size: int) -> list[list[list[int]]]:
    """Return the prompts, `size` at a time. The last batch may have fewer."""
    return [prompts[start:start + size] for start in range(0, len(prompts), size)]


def warm_up(settings: Settings, models: Models, prompts: list[list[int]]) -> None:
    """Decode a few rounds, with hits and misses, of the first batch and of the last, which may be
    smaller: on GPUs libraries start, and passes are captured, at their first use."""
    few = min(4 * (settings.lookahead + 1), settings.max_new_tokens)
    short = replace(settings, max_new_tokens=few, ignore_eos=True)
    batches = batches_of(prompts, settings.batch_size)
    misses = replace(short, budget=0, fan_out="geometric")  # a shape by hand has another budget
    for number in sorted({0, len(batches) - 1}):
        for variant in (short, misses):
            Decoder(variant, models)(batches[number])


def main(settings: Settings) -> None:
    """Decode all prompts, and show them."""
    plan(settings)  # raises UserError now, not after loading
    job = Job(settings)
    settings = replace(settings, batch_size=min(settings.batch_size, len(job.prompts)))
    job.settings = settings  # with the batch size that Theorems 7 and 17 mean
    display = Display(job) if job.placement.rank == 0 else None
    models = job.load()
    if job.placement.any_gpu:
        warm_up(settings, models, job.prompts)
    decoder = Decoder(settings, models)
    batches = batches_of(job.prompts, settings.batch_size)
    if display is None:
        for batch in batches:
            decoder(batch)
    else:
        display.begin()
        for batch in batches:
            display.end_batch(decoder(batch, display.show), decoder.finish_reasons)
        display.finish(decoder.stats)
