"""Decodes prompts: models, workers and settings, put together around saguaro.py's two columns."""
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from operator import index
from typing import Any, Callable, Iterator

import torch

from cache import FAN_OUT_POLICIES, choose_backup
from cli.settings import Settings
from draft_worker import BACKUPS, DraftWorker, Plan
from engine.errors import UserError, reported_as
from ideas import ACCEPTANCE_RATES, GUESSERS, SPECULATORS, VERIFICATIONS
from run.job import Job, Models, check_prompts
from run.placement import BROKEN_OFF, gather, in_turn
from run.screen import Display
from run.stats import Stats, TimedRound, choices_of
from saguaro import Channel, Sequences, TakingTurns, decode, follow, serve
from sampling import Sampler
from target_worker import TargetWorker

STRIDE = 663608941  # of seeds: 2^30 / the golden ratio, odd


class Decoder:
    """Decodes in one way, with the models that this rank holds. All ranks of a launcher make the
    same decoder, and call it as often. After an error in the middle of a batch, end all: they are
    out of step, and another batch is refused. Decoders that share models share their KV: one at a
    time. `stats` sums over calls."""

    def __init__(self, settings: Settings, models: Models):
        self.settings = settings
        self.models = models
        self.placement = models.placement
        self.num_batches = 0  # that have begun
        self.lookahead = settings.lookahead if settings.mode != "ar" else 0
        self.sampler = Sampler(settings.temperature, settings.top_k, settings.top_p,
                               settings.downweight)
        self.verification = settings.verification
        if self.sampler.greedy and self.verification in GUESSERS:
            self.verification = "token"  # nothing is drawn, so there is nothing to foresee
        plan = make_plan(settings)
        drafts = models.draft and self.lookahead
        if drafts and models.draft is models.target:
            raise UserError("target and draft need a CausalLM each, since each has its own KV")
        # what is None is another rank's work, or nobody's
        self.target = self.make_target() if models.target else None
        self.draft = self.make_draft(plan) if drafts else None
        self.workers = [worker for worker in (self.target, self.draft) if worker]
        self.channel = self.make_channel() if self.needs_others() else None
        self.leads = self.channel is None or self.placement.rank == 0
        # rank 1, if this process has started it, and ends it
        self.draft_process = self.placement.draft_process if self.channel else None
        if self.lookahead and not (self.draft or self.channel):
            raise UserError(f"--mode {settings.mode}: these models were loaded without a draft")
        self.eos = models.target.eos_tokens if self.target and not settings.ignore_eos else []
        chosen = choices_of(plan, settings.downweight) if self.lookahead else {}
        self.stats = Stats(chosen, in_turns=settings.mode == "ssd" and not self.channel)

    def needs_others(self) -> bool:
        """Return whether other ranks take part: one that drafts, or some that share the target."""
        if self.placement is None or self.placement.world_size == 1:
            return False
        holds_both = self.models.target and self.models.draft
        another_drafts = self.settings.mode == "ssd" and not holds_both
        return another_drafts or self.placement.tp_size > 1

    def make_target(self) -> TargetWorker:
        rule = VERIFICATIONS[self.verification]
        return TargetWorker(self.models.target, self.sampler, self.settings.seed, rule)

    def make_draft(self, plan: Plan) -> DraftWorker:
        """Make the paper's draft, with what the ideas of --fan-out and --verification change."""
        ideas = (SPECULATORS.get(self.settings.fan_out), GUESSERS.get(self.verification))

        class Draft(*filter(None, ideas), DraftWorker):
            settings = self.settings

        return Draft(self.models.draft, self.sampler, self.settings.seed, plan)

    def make_channel(self) -> Channel:
        dtype = torch.float64 if self.settings.dtype == "float64" else torch.float32
        device = self.placement.device if self.placement.world_group else "cpu"
        q_template = self.sampler.q_template(self.models.vocab_size, dtype, device)
        return Channel(self.placement, self.lookahead, q_template)

    def __call__(self, prompts: list[list[int]],
                 on_tokens: Callable = lambda *_: None) -> list[list[int]]:
        """Return the new token ids of every prompt of a batch; `finish_reasons` then says why each
        text ended. All ranks decode rank 0's prompts, whatever they are given, and return the same.
        Rank 0 calls `on_tokens` after every round with a row, its new tokens and their source. It
        may `stop` a row; what it raises is raised here, once the batch has ended on all ranks.
        Raises `UserError` for prompts that cannot go on, or while another batch is decoded."""
        with self.alone():
            return self.decode_batch(prompts, on_tokens)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep the models from other decoders, threads and callbacks in this block."""
        with ExitStack() as until_done:
            for worker in self.workers:
                until_done.enter_context(worker.model.for_one())
            if self.channel:
                until_done.enter_context(self.in_step())
            yield

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Keep the other ranks at work on the same batch as this one. A batch that breaks off here
        they would wait for: the draft's process ends, and ranks of a launcher do nothing more."""
        with in_turn():
            self.midway = True
            try:
                if self.draft_process:
                    self.draft_process.be_there(self.placement)
                    self.channel = self.make_channel()  # in the group that is there now
                self.midway = False
                yield
            finally:
                if self.midway and self.draft_process:
                    self.draft_process.end()
                elif self.midway:
                    BROKEN_OFF.set()

    def of_rank_0(self, find: Callable) -> Any:
        """Return on all ranks what `find()` returns on rank 0, or raise the `UserError` that it
        raises there."""
        if not self.channel:
            return find()
        try:
            with self.placement.raising_together():
                found = find() if self.leads else None
        except UserError:
            self.midway = False  # on all ranks
            raise
        return gather(found)[0]

    def decode_batch(self, prompts: list[list[int]], on_tokens: Callable) -> list[list[int]]:
        """Do as a call does, with models that are kept `alone` already."""
        self.midway = True
        if self.channel and self.placement.assisted:
            gather({"settings": asdict(self.settings), "num_batches": self.num_batches})
        prompts = self.of_rank_0(partial(self.checked, prompts))
        self.models.set_pace(self.settings.pace)
        self.begin_batch()
        sequences = self.sequences = Sequences(prompts, self.settings.max_new_tokens,
                                               self.models.context, self.eos,
                                               self.models.max_length)
        rounds = []
        failure = None
        if self.leads:
            rounds, failure = self.lead(sequences, on_tokens)
        elif self.draft:
            serve(self.draft, self.channel, prompts, sequences.max_length)
        else:
            follow(self.target, self.channel, prompts, sequences.max_length)
        report = self.report(rounds)
        reports = gather(report) if self.channel else [report]
        self.midway = False
        self.stats.add(reports)
        self.finish_reasons = reports[0]["finish_reasons"]
        if failure:
            raise failure
        return reports[0]["new_tokens"]

    def checked(self, prompts) -> list[list[int]]:
        """Return prompts as lists of Python's numbers. Raises `UserError` for what is none, and for
        a prompt that cannot go on."""
        with reported_as("prompts must be a list of lists of token ids", TypeError):
            prompts = [list(map(index, prompt)) for prompt in prompts]
        check_prompts(prompts, self.models.context, self.models.vocab_size)
        return prompts

    def begin_batch(self) -> None:
        """Begin with random numbers that follow from the seed and the number of batches before this
        one, whatever became of those. Multiples of `STRIDE` are far apart modulo 2^30 (of 100,000
        any two by more than 6,000), so batches of one seed, and of seeds nearby, differ."""
        for worker in self.workers:
            worker.manual_seed((self.settings.seed + self.num_batches * STRIDE) % 2 ** 30)
            worker.clock.read()  # discards the times
        if self.draft:
            self.draft.guess_counts.clear()
        self.num_batches += 1

    def report(self, rounds: list[TimedRound]) -> dict[str, Any]:
        """Return what this rank tells the others of its batch."""
        spans = []
        for worker in self.workers:
            spans += worker.clock.read()
        return {"spans": spans, "rounds": rounds, "new_tokens": self.sequences.new_tokens,
                "guesses": self.draft.guess_counts.tables() if self.draft else None,
                "finish_reasons": self.sequences.finish_reasons}

    def stop(self, row: int) -> None:
        """End the text of this row after the round that `on_tokens` hears of."""
        self.sequences.stop(row)

    def lead(self, sequences: Sequences,
             on_tokens: Callable) -> tuple[list[TimedRound], BaseException | None]:
        """Decode on rank 0, and tell every round. Returns all, and what `on_tokens` raised."""
        rounds = []
        failure = None
        start = time.perf_counter()
        decoding = decode(self.target, self.speculator(sequences), sequences, self.lookahead)
        for number, _ in enumerate(decoding):
            end = time.perf_counter()
            rounds.append(TimedRound(number, start, end, sequences.last_round))
            start = end  # showing a round counts in the next, and overlaps the speculator's answer
            try:
                for row, source, *_, new_tokens in sequences.last_round:
                    on_tokens(row, new_tokens, source)
            except BaseException as problem:  # other ranks are at work: end the batch with them
                failure = problem
                for row in range(len(sequences.prompts)):
                    sequences.stop(row)
        return rounds, failure

    def speculator(self, sequences: Sequences) -> Channel | TakingTurns:
        """Return who drafts for rank 0: another rank, or this process."""
        if self.settings.mode == "ssd" and self.channel:
            return self.channel
        return TakingTurns(self.draft, sequences.prompts, sequences.max_length, self.channel)


def make_plan(settings: Settings) -> Plan:
    """Make the choices of sections 4.1 and 4.3. Raises `UserError` for an unknown name."""
    if settings.verification not in VERIFICATIONS:
        raise UserError(f"--verification {settings.verification}: not one of "
                        f"{', '.join(VERIFICATIONS)}")
    fan_out = fan_out_with(settings, settings.acceptance_rate)
    backup = settings.backup
    critical_batch_size = None
    if backup == "auto":
        target, draft = settings.pace
        draft_pass = draft / target if target else 1 / len(fan_out)  # assumes T_p = 1
        backup, critical_batch_size = choose_backup(
            settings.batch_size, fan_out, settings.acceptance_rate,
            acceptance_after(settings, "random"), settings.miss_exponent, draft_pass)
    if backup not in BACKUPS:
        raise UserError(f"--backup {backup}: there are {', '.join(BACKUPS)} and auto")
    after_backup = fan_out_with(settings, acceptance_after(settings, backup))
    return Plan([fan_out, after_backup], backup, critical_batch_size)


def acceptance_after(settings: Settings, backup: str) -> float:
    """Return the acceptance rate a of what a backup of this name drafts."""
    if settings.backup_acceptance_rate is not None:
        return settings.backup_acceptance_rate
    return {"neural": settings.acceptance_rate, **ACCEPTANCE_RATES}.get(backup, 0.1)


def fan_out_with(settings: Settings, acceptance_rate: float) -> list[int]:
    """Return F_0..F_K as --fan-out says: by the policy of that name, or by hand, 4,3,2,1,2. If an
    idea finds its own in each round, these are section 4.2's. In sd nothing is prepared: all 0."""
    name = settings.fan_out
    budget = settings.budget
    K = settings.lookahead
    policies = FAN_OUT_POLICIES | dict.fromkeys(SPECULATORS, FAN_OUT_POLICIES["geometric"])
    with reported_as(f"--fan-out {name}", ValueError):
        if name in policies:
            fan_out = policies[name](budget, K, acceptance_rate, settings.miss_exponent)
        elif name.replace(",", "").isdecimal():
            fan_out = name.split(",")
        else:
            raise ValueError(f"neither {' nor '.join(policies)} nor numbers, F_0,...,F_K")
        fan_out = [int(F) for F in fan_out]
        if len(fan_out) != K + 1 or min(fan_out) < 0 or sum(fan_out) != budget:
            raise ValueError(f"{fan_out} is not {K + 1} numbers, F_0 to F_K, of sum {budget}")
    return [0] * len(fan_out) if settings.mode == "sd" else fan_out


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
    make_plan(settings)  # raises UserError now, not after loading
    job = Job(settings)
    # Theorems 7 and 17 mean the rows of a batch
    settings = replace(settings, batch_size=min(settings.batch_size, len(job.prompts)))
    job.settings = settings
    display = Display(job) if job.placement.rank == 0 else None
    models = job.load()
    if {*job.placement.devices} != {"cpu"}:
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
