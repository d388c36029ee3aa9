"""Slow motion: rounds of speculative speculative decoding with real tokens, nothing overlapping.

    python course/explain.py --prompt "def fibonacci(n):" --rounds 3
    python course/explain.py --temperature 1 --downweight 0.5 --pause
    python course/explain.py --prompt "def f(x):" "import os" --backup lookup      (section 4.3)

What two ranks do at the same time (Algorithm 1) happens here one after the other: the paper's
Fig. 2 with real tokens. Shown are the speculation under verification, every guessed outcome
(k, t*) with the draft's q of t* after k accepted tokens, what was prepared for it, and the outcome.
"""
import os
import sys
from pathlib import Path
from typing import Callable

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # wherever it was started
    from runtime.launch import launch
    from runtime.settings import ExplainSettings
    launch(ExplainSettings, "course.explain")  # parses first: torch takes seconds

import torch

import sampling
from cache import (BACKUP, NO_OUTCOME, Outcome, Speculation, SpeculationCache,
                   acceptance_distribution)
from draft_worker import DraftWorker
from runtime.model import CausalLM
from runtime.placement import Job, Models
from runtime.screen import Stats, visible
from runtime.settings import ExplainSettings, UserError
from saguaro import Sequences, workers
from sampling import Sampler, UniformStream
from target_worker import TargetWorker

WIDTH = 100  # columns of a line, at most
WORD = 12    # and of a token in it
BOLD = "1"
BLUE = "94"          # from the cache, and
ORANGE = "38;5;208"  # from a backup, as in the figures


def slow_motion(target: TargetWorker, draft: DraftWorker, sequences: Sequences, rounds: int,
                tell: Callable[[int, Speculation, SpeculationCache, Outcome], None]) -> None:
    """Algorithm 1, its two columns taking turns: round 0, the prompt's, and so many more, each told
    before anything follows from its outcome."""
    draft.start(sequences.prompts, sequences.max_length)
    speculation = Speculation.empty(len(sequences.prompts))
    outcome = target.prefill(sequences.prompts, sequences.max_length, draft.lookahead)
    for number in range(rounds + 1):
        cache = draft.pre_speculate(speculation)
        tell(number, speculation, cache, outcome)
        outcome = sequences.extend(speculation, outcome)
        if number == rounds or outcome.finished.all():
            return
        target.advance(outcome)
        speculation = draft.speculate(speculation, outcome, cache)
        outcome = target.verify(speculation)


class Narrator:
    """Prints the rounds of a batch of prompts, with loaded models."""

    def __init__(self, job: Job, models: Models):
        """Raises `UserError` if the context is too short: positions beyond it do not exist, and the
        last branches would be wrong."""
        settings = job.settings
        room = (settings.rounds + 1) * (settings.lookahead + 1)  # the last round's branches, too
        context = min(models.target.context, models.draft.context)
        if max(map(len, job.prompts)) + room > context:
            raise UserError(f"--rounds {settings.rounds} needs room for {room} tokens after the "
                            f"prompt, and the context is {context}")
        self.job = job
        self.settings = settings
        self.target, self.draft = workers(
            settings.to_settings(max_new_tokens=room, batch_size=len(job.prompts)), models)
        self.sequences = Sequences(job.prompts, room, context, models.target.eos_tokens, Stats(),
                                   on_tokens=lambda *_: None)
        self.sampler = Sampler(settings.temperature or 1.0, settings.top_k, settings.top_p)
        self.uniforms = UniformStream(settings.seed, sampling.VERIFIER)  # the target's, again
        self.backup = f"{self.draft.plan.backup} backup"
        self.colors = settings.color or sys.stdout.isatty() and not os.environ.get("NO_COLOR")

    def tell_all(self) -> None:
        """The prompts, the shape of the cache, the rounds, the texts."""
        for text in self.job.texts:
            self.say("prompt", BOLD)
            print(visible(text) + "\n")
        self.tell_fan_out()
        slow_motion(self.target, self.draft, self.sequences, self.settings.rounds, self.tell)
        for text, tokens in zip(self.job.texts, self.sequences.new_tokens):
            self.say("\ntext", BOLD)
            print(visible(text + self.job.tokenizer.decode(tokens)))

    def tell_fan_out(self) -> None:
        """F_0..F_K, and the P(k) behind them."""
        settings = self.settings
        plan = self.draft.plan
        rates = {"the cache": settings.acceptance_rate,
                 f"a {self.backup}": settings.backup_acceptance(plan.backup)}
        title = f"{settings.fan_out} fan-out, r = {settings.miss_exponent:.2f}"
        self.say(f"{title:42}k   " + "".join(f"{k:6}" for k in range(plan.lookahead + 1)), BOLD)
        for (name, a), fan_out in zip(rates.items(), plan.fan_out):
            title = f"  after {name}, a = {a:.2f}"
            likelihood = acceptance_distribution(a, plan.lookahead)
            self.say(f"{title:42}P(k)" + "".join(f"{P:6.2f}" for P in likelihood))
            self.say(f"{'':42}F_k " + "".join(f"{F:6}" for F in fan_out))
        if self.target.noise:
            self.say("  not in the paper: guessed are the largest q / e, e the public noise")

    def tell(self, number: int, speculation: Speculation, cache: SpeculationCache,
             outcome: Outcome) -> None:
        """A round, row by row."""
        p = self.distributions(self.target.model, speculation.tokens)
        q = self.distributions(self.draft.model, speculation.tokens)
        uniforms = self.uniforms.draw(*p.shape[:2])
        hit = cache.look_up(outcome)[2]
        rows = [row for row, active in enumerate(self.sequences.active) if active]
        for row in rows:
            drafted = speculation.tokens[row].tolist()
            k, bonus = (int(part[row]) for part in outcome)
            source = f"the {self.backup}" if speculation.source[row] == BACKUP else "the cache"
            title = "the target reads the prompt, the draft guesses its first token"
            if drafted:
                title = f"verifying [ {self.words(drafted)} ]   from {source}"
            of_row = f", row {row}" if len(p) > 1 else ""
            self.say(f"\nround {number}{of_row}   {title}", BOLD)
            color = BLUE if hit[row] else ORANGE
            guesses = [part[row].tolist() for part in (*cache.guesses, cache.tokens)]
            self.tell_guesses(drafted, guesses, (k, bonus), q[row], color)
            if self.settings.temperature:
                sent = speculation.q[row].cpu()
                self.tell_verification(drafted, k, p[row], q[row], sent, uniforms[row])
            answer = "HIT, what was prepared is sent at once"
            if not hit[row]:
                answer = f"MISS, the {self.backup} drafts"
            self.say(f"   {k} of {len(drafted)} accepted, bonus token {self.words([bonus])}:  "
                     f"{answer}", BOLD, color)
        if hit[rows].any() and not hit[rows].all():
            self.say("   One row missed, so all wait for the backup (section 4.3); rows that hit "
                     "keep theirs.", ORANGE)
        if self.settings.pause and number < self.settings.rounds:
            print("   Enter: the next round ", end="", flush=True)
            sys.stdin.readline()

    def tell_guesses(self, drafted: list[int], guesses: list[list], actual: tuple[int, int],
                     q: torch.Tensor, color: str) -> None:
        """The outcomes guessed, and what was prepared; the actual one in `color`."""
        prepared = {(k, bonus): f"[ {self.words(tokens)} ]" for k, bonus, tokens in zip(*guesses)
                    if k != NO_OUTCOME}
        prepared.setdefault(actual, "(not guessed)")
        self.say(f"{'accepted':>35} | {'bonus t*':<{WORD}}     q  prepared for this outcome")
        for (k, bonus), text in prepared.items():
            arrow, codes = "   ", ()
            if (k, bonus) == actual:
                arrow, codes = "-->", (BOLD, color)
            self.say(f"  {arrow} k={k:<2}{self.words(drafted[:k])[-24:]:>25} | "
                     f"{self.words([bonus]):<{WORD}} {q[k, bonus]:.3f}  {text}", *codes)

    def tell_verification(self, drafted: list[int], k: int, p: torch.Tensor, q: torch.Tensor,
                          sent: torch.Tensor, uniforms: torch.Tensor) -> None:
        """Token by token up to the rejection: p, the draft's q, the one `sent` to the verifier,
        which is sigma of it or a backup's own, and u. And what the bonus token is drawn from."""
        if drafted:
            columns = "            p      q   sent      u"
            self.say(f"{'drafted':>12}{columns}  accepted if u < p / sent")
        for i, token in enumerate(drafted[:k + 1]):
            numbers = [p[i, token], q[i, token], sent[i, token], uniforms[i],
                       p[i, token] / sent[i, token]]
            verdict = "accepted" if i < k else "rejected"
            self.say(f"  s_{i + 1:<2} {self.words([token]):<{WORD}} "
                     + "  ".join(f"{number:.3f}" for number in numbers) + f": {verdict}")
        name, r = "p", p[k]
        if k < len(drafted):
            name, r = "the residual", sampling.residual(p[k], sent[k])
        drawn = "public noise" if self.target.noise else f"u = {uniforms[-1]:.3f}"
        likeliest = [f"{self.words([int(token)])} {share:.3f}"
                     for share, token in zip(*r.topk(min(4, len(r)))) if share]
        self.say(f"  t*   from {name}, with {drawn}:  " + "   ".join(likeliest))

    def distributions(self, model: CausalLM, drafted: torch.Tensor) -> torch.Tensor:
        """A model's next-token distributions `[B, K+1, V]` before each drafted token and after the
        last, by one more pass, which leaves the KV as it was."""
        tokens = torch.cat([self.target.last[:, None], drafted.cpu()], 1).to(model.device)
        return self.sampler.probabilities(model.causal(tokens, self.target.length - 1)).cpu()

    def words(self, tokens: list[int]) -> str:
        """Tokens as they are spelt, blanks as dots."""
        spelt = []
        for token in tokens:
            word = repr(self.job.tokenizer.decode([token]))[1:-1].replace(" ", "\u00b7")
            spelt.append(word if len(word) <= WORD else word[:WORD - 2] + "..")
        return " ".join(spelt)

    def say(self, line: str, *codes: str) -> None:
        """A line of the screen's width at most; `codes` are its colour and weight."""
        if len(line) > WIDTH:
            line = line[:WIDTH - 3] + "..."
        if codes and self.colors:
            line = f"\033[{';'.join(codes)}m{line}\033[0m"
        print(line)


def main(settings: ExplainSettings) -> None:
    job = Job(settings, mode="sd")  # one process holds both models
    Narrator(job, job.load()).tell_all()
