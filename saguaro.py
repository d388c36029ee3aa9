"""Speculative speculative decoding (SSD): Algorithm 1, its two columns.

In ssd rank 0 holds the target and decodes; the last rank holds the draft and answers. Ranks between
them share the target with rank 0 (tensor parallelism) and follow it. All ranks parse the same
command line and read the same prompts, so in the rounds of a batch only tensors of known size
travel. They are broadcast to all ranks, in a fixed order:

    rank 0:  prefill | send v0 |                receive s1 | verify s1 | send v1 |          ...
    last:    prefill, pre-speculate | receive v0, send s1 | pre-speculate | receive v1, send s2 ...

Unlike the paper's draft, ours does not speculate from the prompt, for which the target would wait:
while the target reads the prompt, it guesses v0.

Algorithm 1                                        here
-----------                                        ----
verifier:    receive the speculation s^T           Channel.receive_speculation
             verify it                             TargetWorker.verify, sampling.verify
             send the outcome v^T = (k, t*)        Channel.send_outcome
speculator:  predict likely outcomes               DraftWorker.trunk_pass, cache.likely_outcomes
             prepare a speculation for each: S^T   DraftWorker.pre_speculate, SpeculationCache
             receive v^T; in S^T? send that        DraftWorker.speculate, SpeculationCache.look_up
             else ask the backup speculator        draft_worker.neural_backup, random_backup

In sd, in ar and in a notebook no other rank drafts: `TakingTurns` stands in for the channel.
"""
if __name__ == "__main__":  # before the imports below, which take seconds; `launch` never returns
    from cli.launch import launch
    from cli.settings import Settings
    launch(Settings, "run")  # parses, starts the draft's rank, and calls `run.main`

from typing import Iterator

import torch
import torch.distributed as dist

from cache import FINISHED, Outcome, RowRound, Speculation
from draft_worker import DraftWorker
from engine.model import to_device
from target_worker import TargetWorker

# ---- the columns of Algorithm 1 ----

def decode(target: TargetWorker, speculator: "Channel | TakingTurns", sequences: "Sequences",
           lookahead: int) -> Iterator[tuple[Speculation, Outcome]]:
    """Run the verifier's column. Autoregressive decoding, speculative decoding and SSD are this one
    loop; who drafts, and when, is the only difference. `speculator` is a `Channel` to the draft's
    rank, or `TakingTurns` with a draft in this process. Yields every round, once its tokens have
    joined the `sequences`. Prefill is round 0, so the loop begins with what ends a round."""
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

    def __init__(self, placement, lookahead: int, q_template: torch.Tensor):
        """`placement` knows the draft's rank, and the group in which speculations travel.
        `q_template` `[V]`, or `[0]` for point masses, has the width and type of q, and is on the
        device to and from which speculations travel."""
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
        self.context = context
        longest = min(max(map(len, prompts)) + max_new_tokens, context)
        self.max_length = max(longest, max_length)
        self.new_tokens = [[] for _ in prompts]
        # of each row "eos", "length" (max_new_tokens), "context" or "stop" (by `on_tokens`)
        self.finish_reasons: list[str | None] = [None] * len(prompts)

    def extend(self, speculation: Speculation, outcome: Outcome) -> Outcome:
        """Append the tokens of a round. Returns its outcome, in which finished rows are marked."""
        self.last_round: list[RowRound] = []  # of the active rows
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
        kept = []
        for token in new_tokens:
            text.append(token)
            kept.append(token)
            if token in self.eos:
                self.finish_reasons[row] = "eos"
            elif len(text) == self.max_new_tokens:
                self.finish_reasons[row] = "length"
            elif len(self.prompts[row]) + len(text) == self.context:
                self.finish_reasons[row] = "context"
            if self.finish_reasons[row]:
                break
        return kept

    def stop(self, row: int) -> None:
        """End a row's text. All ranks hear of it with the next outcome."""
        self.finish_reasons[row] = self.finish_reasons[row] or "stop"
