"""Slow motion: rounds of speculative speculative decoding with real tokens, nothing overlapping.

    python course/explain.py --prompt "def fibonacci(n):" --rounds 3
    python course/explain.py --temperature 1 --downweight 0.5 --pause
    python course/explain.py --prompt "def f(x):" "import os" --backup lookup      (section 4.3)

What two ranks do at the same time (Algorithm 1) happens here one after the other, and is shown: the
speculation under verification, every guessed outcome (k, t*) with the draft's probability q of t*
after k accepted tokens, the speculation prepared for it, and the outcome. This is the paper's
Fig. 2 with real tokens. The workers are the program's own; the loop is `slow_motion`.
"""
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # wherever it was started

from runtime.launch import launch
from runtime.settings import ExplainSettings, UserError

if __name__ == "__main__":
    launch(ExplainSettings, "course.explain")  # parses first: torch takes seconds

import os
from typing import Iterator, NamedTuple

import torch

import sampling
from cache import (BACKUP, NO_OUTCOME, Outcome, Speculation, SpeculationCache,
                   acceptance_distribution)
from draft_worker import DraftWorker
from runtime.model import CausalLM
from runtime.placement import Job, Models
from runtime.screen import Stats, visible
from sampling import Sampler, UniformStream
from saguaro import Sequences, workers
from target_worker import TargetWorker

WIDTH = 100  # columns of a line, at most
WORD = 12    # and of a token in it
BOLD, GREEN, YELLOW = 1, 32, 33


class Round(NamedTuple):
    """A round, before anything follows from its outcome."""
    number: int
    speculation: Speculation  # under verification
    cache: SpeculationCache   # prepared meanwhile
    outcome: Outcome


def slow_motion(target: TargetWorker, draft: DraftWorker, sequences: Sequences,
                rounds: int) -> Iterator[Round]:
    """Algorithm 1, its two columns taking turns: round 0, the prompt's, and so many more."""
    draft.start(sequences.prompts, sequences.max_length)
    speculation = Speculation.empty(len(sequences.prompts))
    outcome = target.prefill(sequences.prompts, sequences.max_length, draft.lookahead)
    for number in range(rounds + 1):
        cache = draft.pre_speculate(speculation)
        yield Round(number, speculation, cache, outcome)
        outcome = sequences.extend(speculation, outcome)
        if number == rounds or outcome.finished.all():
            return
        target.advance(outcome)
        speculation = draft.speculate(speculation, outcome, cache)
        outcome = target.verify(speculation)


class Narrator:
    """Prints rounds as they come."""

    def __init__(self, job: Job, target: TargetWorker, draft: DraftWorker, sequences: Sequences):
        settings = job.settings
        self.settings = settings
        self.tokenizer = job.tokenizer
        self.target = target
        self.draft = draft
        self.sequences = sequences
        self.sampler = Sampler(settings.temperature or 1.0, settings.top_k, settings.top_p)
        self.uniforms = UniformStream(settings.seed, sampling.VERIFIER)  # the verifier's, again
        self.backup = f"{draft.plan.backup} backup"
        terminal = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self.colors = settings.color or terminal

    def say(self, line: str, *codes: int) -> None:
        if len(line) > WIDTH:
            line = line[:WIDTH - 3] + "..."
        if codes and self.colors:
            line = f"\033[{';'.join(map(str, codes))}m{line}\033[0m"
        print(line)

    def words(self, tokens: list[int]) -> str:
        """Tokens as they are spelt, blanks as dots."""
        spelt = []
        for token in tokens:
            word = repr(self.tokenizer.decode([token]))[1:-1].replace(" ", "\u00b7")
            spelt.append(word if len(word) <= WORD else word[:WORD - 2] + "..")
        return " ".join(spelt)

    def tell_fan_out(self) -> None:
        """F_0..F_K, and the P(k) behind them."""
        settings = self.settings
        plan = self.draft.plan
        names = "the cache", f"a {self.backup}"
        rates = settings.acceptance_rate, settings.backup_acceptance(plan.backup)
        ks = "".join(f"{k:6}" for k in range(plan.lookahead + 1))
        self.say(f"{settings.fan_out} fan-out, r = {settings.miss_exponent:.2f}".ljust(42)
                 + f"k   {ks}", BOLD)
        for name, a, fan_out in zip(names, rates, plan.fan_out):
            likelihood = acceptance_distribution(a, plan.lookahead)
            title = f"  after {name}, a = {a:.2f}"
            self.say(f"{title:42}P(k)" + "".join(f"{P:6.2f}" for P in likelihood))
            self.say(f"{'':42}F_k " + "".join(f"{F:6}" for F in fan_out))

    def tell(self, shown: Round) -> None:
        """A round, row by row."""
        drafted = shown.speculation.tokens.cpu()
        p = self.distributions(self.target.model, drafted)
        q = self.distributions(self.draft.model, drafted)
        uniforms = self.uniforms.draw(len(drafted), drafted.shape[1] + 1)
        hit = shown.cache.look_up(shown.outcome)[2]
        rows = [row for row, active in enumerate(self.sequences.active) if active]
        for row in rows:
            self.tell_guesses(shown, row, q[row], GREEN if hit[row] else YELLOW)
            if self.settings.temperature:
                self.tell_verification(shown, row, p[row], q[row], uniforms[row].tolist())
            k, bonus = (int(part[row]) for part in shown.outcome)
            answer = f"MISS, the {self.backup} drafts"
            if hit[row]:
                answer = "HIT, what was prepared is sent at once"
            self.say(f"   {k} of {drafted.shape[1]} accepted, bonus token {self.words([bonus])}:  "
                     f"{answer}", BOLD, GREEN if hit[row] else YELLOW)
        if hit[rows].any() and not hit[rows].all():
            self.say("   One row missed, so all wait for the backup (section 4.3); rows that hit "
                     "keep theirs.", YELLOW)

    def distributions(self, model: CausalLM, drafted: torch.Tensor) -> torch.Tensor:
        """A model's next-token distributions `[B, K+1, V]` before each drafted token and after the
        last, by one more pass, which leaves the KV as it was."""
        tokens = torch.cat([self.target.last[:, None], drafted], 1).to(model.device)
        return self.sampler.probabilities(model.causal(tokens, self.target.length - 1)).cpu()

    def tell_guesses(self, shown: Round, row: int, q: torch.Tensor, color: int) -> None:
        """The speculation, and all outcomes guessed for it; the actual one in `color`."""
        drafted = shown.speculation.tokens[row].tolist()
        title = "the target reads the prompt, the draft guesses its first token"
        if drafted:
            backup = shown.speculation.source[row] == BACKUP
            source = f"the {self.backup}" if backup else "the cache"
            title = f"verifying [ {self.words(drafted)} ]   from {source}"
        number = f"{shown.number}, row {row}" if len(shown.speculation.tokens) > 1 else shown.number
        self.say(f"\nround {number}   {title}", BOLD)
        prepared = {}
        guesses = [part[row].tolist() for part in (*shown.cache.guesses, shown.cache.tokens)]
        for k, bonus, tokens in zip(*guesses):
            if k != NO_OUTCOME:
                prepared[k, bonus] = f"[ {self.words(tokens)} ]"
        actual = tuple(int(part[row]) for part in shown.outcome)
        prepared.setdefault(actual, "(not guessed)")
        self.say(f"{'accepted':>35} | {'bonus t*':<{WORD}}     q  prepared for this outcome")
        for (k, bonus), text in prepared.items():
            arrow, codes = "   ", []
            if (k, bonus) == actual:
                arrow, codes = "-->", [BOLD, color]
            self.say(f"  {arrow} k={k:<2}{self.words(drafted[:k])[-24:]:>25} | "
                     f"{self.words([bonus]):<{WORD}} {q[k, bonus]:.3f}  {text}", *codes)

    def tell_verification(self, shown: Round, row: int, p: torch.Tensor, q: torch.Tensor,
                          uniforms: list[float]) -> None:
        """p, q, sigma and u, token by token up to the rejection; what the bonus token is from."""
        drafted = shown.speculation.tokens[row].tolist()
        drawn_from = shown.speculation.q[row].cpu()
        k = int(shown.outcome.num_accepted[row])
        model_drafted = shown.speculation.source[row] != BACKUP or self.backup == "neural backup"
        bends = model_drafted and self.draft.sampler.downweight < 1
        if drafted:
            columns, last = ("sigma  ", "sigma") if bends else ("", "q")
            self.say(f"{'drafted':>12}{'':12}p      q  {columns}    u  accepted if u < p / {last}")
        for i, token in enumerate(drafted[:k + 1]):
            numbers = [p[i, token], drawn_from[i, token], uniforms[i]]
            ratio = numbers[0] / numbers[1]
            if bends:
                numbers.insert(1, q[i, token])
            row_of_numbers = "  ".join(f"{float(number):.3f}" for number in numbers)
            self.say(f"  s_{i + 1:<2} {self.words([token]):<{WORD}} {row_of_numbers}  {ratio:.3f}: "
                     + ("accepted" if i < k else "rejected"))
        name, r = "p", p[k]
        if k < len(drafted):
            name, r = "the residual", sampling.residual(p[k], drawn_from[k])
        drawn = "public noise" if self.target.noise else f"u = {uniforms[-1]:.3f}"
        top = r.topk(min(4, len(r)))
        likeliest = [f"{self.words([int(token)])} {share:.3f}"
                     for share, token in zip(*top) if share]
        self.say(f"  t*   from {name}, with {drawn}:  " + "   ".join(likeliest))


def show(job: Job, models: Models) -> None:
    """Slow motion with loaded models. Raises `UserError` if the context is too short: positions
    beyond it do not exist, and the last branches would be wrong."""
    settings = job.settings
    room = (settings.rounds + 1) * (settings.lookahead + 1)  # for the last round's branches, too
    context = min(models.target.context, models.draft.context)
    longest = max(map(len, job.prompts))
    if longest + room > context:
        raise UserError(f"--rounds {settings.rounds}: with a prompt of {longest} tokens they need "
                        f"{longest + room}, and the context is {context}")
    decoding = settings.to_settings(max_new_tokens=room, batch_size=len(job.prompts))
    target, draft = workers(decoding, models)
    sequences = Sequences(job.prompts, room, context, models.target.eos_tokens, Stats(),
                          on_tokens=lambda *_: None)
    narrator = Narrator(job, target, draft, sequences)
    for text in job.texts:
        narrator.say("prompt", BOLD)
        print(visible(text) + "\n")
    narrator.tell_fan_out()
    if target.noise:
        narrator.say("  not in the paper: guessed are the largest q / e, e the public noise")
    for shown in slow_motion(target, draft, sequences, settings.rounds):
        narrator.tell(shown)
        if settings.pause and shown.number < settings.rounds:
            print("   Enter: the next round ", end="", flush=True)
            sys.stdin.readline()
    for text, tokens in zip(job.texts, sequences.new_tokens):
        narrator.say("\ntext", BOLD)
        print(visible(text + job.tokenizer.decode(tokens)))


def main(settings: ExplainSettings) -> None:
    job = Job(settings, mode="sd")  # one process holds both models
    show(job, job.load())
