"""Slow motion: rounds of speculative speculative decoding with real tokens, nothing overlapping.

    python -m course.explain --temperature 1 --downweight 0.5 --pause
    python -m course.explain "def f(x):" "import os"      two texts, a batch (section 4.3)

What two ranks do at the same time (Algorithm 1) happens here one after the other: the paper's
Fig. 2 with real tokens. Shown are the speculation under verification, every guessed outcome
(k, t*) with the draft's q of t* after k accepted tokens, what was prepared for it, and the outcome.
"""
from cli.launch import launch
from cli.settings import ExplainSettings

if __name__ == "__main__":
    launch(ExplainSettings, "course.explain")  # parses first: torch takes seconds

import re
import sys

import torch

from cache import BACKUP, FINISHED, NO_OUTCOME, Outcome, Speculation, acceptance_distribution
from cli.job import Job, Models
from cli.screen import Display, can_show_colours, visible
from cli.stats import Stats
from engine.model import CausalLM
from engine.noise import VERIFIER_STREAM, UniformStream
from saguaro import Sequences, TakingTurns, decode, workers
from sampling import Sampler, residual

WIDTH = 100  # columns of a line, at most
WORD = 12    # and of a token in it
BOLD = "\x1b[1m"


class Narrator(Sequences):
    """The sequences of a batch, with loaded models: `decode` extends them after each round, which
    is told before."""

    def __init__(self, job: Job, models: Models):
        settings = job.settings
        super().__init__(job.prompts, (settings.rounds + 1) * (settings.lookahead + 1),
                         models.context, models.target.eos_tokens, Stats(), lambda *_: None)
        self.job = job
        self.target, self.draft = workers(settings.to_settings(batch_size=len(job.prompts)), models)
        self.turns = TakingTurns(self.draft)
        self.number = 0  # of the round
        self.sampler = Sampler(settings.temperature or 1.0, settings.top_k, settings.top_p)
        self.uniforms = UniformStream(settings.seed, VERIFIER_STREAM)  # the target's, again
        self.sources = ["the cache", f"the {self.draft.plan.backup} backup"]  # PRIMARY, BACKUP
        self.colors = settings.color or can_show_colours()

    def tell_all(self) -> None:
        """The prompts, F_0..F_K and the P(k) behind them, the rounds, the texts."""
        for text in self.job.texts:
            print(f"prompt\n{visible(text)}\n")
        self.tell_fan_out(self.job.settings)
        self.turns.start(self.prompts, self.max_length)
        decode(self.target, self.turns.take_turn, self, self.draft.lookahead)
        for text, tokens in zip(self.job.texts, self.new_tokens):
            print(f"\ntext\n{visible(text + self.job.tokenizer.decode(tokens))}")

    def tell_fan_out(self, settings: ExplainSettings) -> None:
        plan = self.draft.plan
        title = f"{settings.fan_out} fan-out, r = {settings.miss_exponent:.2f}"
        self.say(f"{title:42}k   " + "".join(f"{k:6}" for k in range(plan.lookahead + 1)), BOLD)
        rates = settings.acceptance_rate, settings.backup_acceptance(plan.backup)
        for source, a, fan_out in zip(self.sources, rates, plan.fan_out):
            title = f"  after {source}, a = {a:.2f}"
            likelihood = acceptance_distribution(a, plan.lookahead)
            self.say(f"{title:42}P(k)" + "".join(f"{P:6.2f}" for P in likelihood))
            self.say(f"{'':42}F_k " + "".join(f"{F:6}" for F in fan_out))

    def extend(self, speculation: Speculation, outcome: Outcome) -> Outcome:
        """As `Sequences.extend`, after telling the round. The last one ends all rows."""
        if self.job.settings.pause and self.number:
            print("   Enter: the next round ", end="", flush=True)
            sys.stdin.readline()
        self.tell(speculation, outcome)
        outcome = super().extend(speculation, outcome)
        if self.number == self.job.settings.rounds:
            outcome = outcome._replace(num_accepted=torch.full_like(outcome.bonus, FINISHED))
        self.number += 1
        return outcome

    def tell(self, speculation: Speculation, outcome: Outcome) -> None:
        """A round, row by row: the outcomes guessed and what was prepared, then the outcome."""
        p = self.distributions(self.target.model, speculation.tokens)
        q = self.distributions(self.draft.model, speculation.tokens)
        uniforms = self.uniforms.draw(*p.shape[:2])
        hit = self.turns.cache.look_up(outcome)[2]
        rows = [row for row, active in enumerate(self.active) if active]
        for row in rows:
            drafted = speculation.tokens[row].tolist()
            k, bonus = (int(part[row]) for part in outcome)
            style = BOLD + (Display.CACHE if hit[row] else Display.BACKUP)
            title = "the target reads the prompt, the draft guesses its first token"
            if drafted:
                source = self.sources[speculation.source[row]]
                title = f"verifying [ {self.words(drafted)} ]   from {source}"
            of_row = f", row {row}" if len(self.prompts) > 1 else ""
            self.say(f"\nround {self.number}{of_row}   {title}", BOLD)
            self.tell_guesses(row, drafted, (k, bonus), q[row], style)
            if self.job.settings.temperature:
                self.tell_draws(drafted, k, p[row], q[row], speculation.q[row].cpu(), uniforms[row])
            answer = "HIT, what was prepared is sent at once"
            if not hit[row]:
                answer = f"MISS, {self.sources[BACKUP]} drafts"
            elif not hit[rows].all():
                answer = f"HIT, kept while {self.sources[BACKUP]} drafts (4.3)"
            self.say(f"   {k} of {len(drafted)} accepted, bonus token {self.words([bonus])}:  "
                     f"{answer}", style)

    def tell_guesses(self, row: int, drafted: list[int], outcome: tuple[int, int], q: torch.Tensor,
                     style: str) -> None:
        """Every guess, and what was prepared for it; the outcome in the given style."""
        cache = self.turns.cache
        guesses = zip(*(part[row].tolist() for part in (*cache.guesses, cache.tokens)))
        prepared = {(k, token): f"[ {self.words(branch)} ]" for k, token, branch in guesses
                    if k != NO_OUTCOME}
        prepared.setdefault(outcome, "(not guessed)")
        self.say(f"{'accepted':>35} | {'bonus t*':<{WORD}}     q  prepared for this outcome")
        for (k, token), text in prepared.items():
            is_outcome = (k, token) == outcome
            arrow = "-->" if is_outcome else ""
            self.say(f"  {arrow:3} k={k:<2}{self.words(drafted[:k])[-24:]:>25} | "
                     f"{self.words([token]):<{WORD}} {q[k, token]:.3f}  {text}",
                     style if is_outcome else "")

    def tell_draws(self, drafted: list[int], k: int, p: torch.Tensor, q: torch.Tensor,
                   sent: torch.Tensor, uniforms: torch.Tensor) -> None:
        """Token by token up to the rejection: p, the draft's q, the one `sent` to the verifier,
        which is sigma of it or a backup's own, and u. And what the bonus token is drawn from."""
        if drafted:
            self.say("     drafted            p      q   sent      u  accepted if u < p / sent")
        for i, token in enumerate(drafted[:k + 1]):
            p_s, q_s, sent_s = (part[i, token] for part in (p, q, sent))
            verdict = "accepted" if i < k else "rejected"
            self.say(f"  s_{i + 1:<2} {self.words([token]):<{WORD}} {p_s:.3f}  {q_s:.3f}  "
                     f"{sent_s:.3f}  {uniforms[i]:.3f}  {p_s / sent_s:.3f}: {verdict}")
        name = "the residual" if k < len(drafted) else "p"
        r = residual(p[k], sent[k]) if k < len(drafted) else p[k]
        likeliest = [f"{self.words([int(token)])} {share:.3f}" for share, token in zip(*r.topk(4))]
        self.say(f"  t*   from {name}, with u = {uniforms[-1]:.3f}:  " + "   ".join(likeliest))

    def distributions(self, model: CausalLM, drafted: torch.Tensor) -> torch.Tensor:
        """A model's distributions `[B, K+1, V]` along the drafted tokens; the KV stays as it is."""
        tokens = torch.cat([self.target.last[:, None], drafted.cpu()], 1).to(model.device)
        return self.sampler.probabilities(model.causal(tokens, self.target.length - 1)).cpu()

    def words(self, tokens: list[int]) -> str:
        """Tokens as they are spelt, blanks as dots; eight blanks are a dot and x8."""
        spelt = [repr(self.job.tokenizer.decode([token]))[1:-1] for token in tokens]
        spelt = [re.sub(" {3,}", lambda run: f" x{len(run[0])}", word) for word in spelt]
        short = [word if len(word) <= WORD else word[:WORD - 2] + ".." for word in spelt]
        return " ".join(word.replace(" ", "\u00b7") for word in short)

    def say(self, line: str, style: str = "") -> None:
        """A line of the screen's width at most."""
        if len(line) > WIDTH:
            line = line[:WIDTH - 3] + "..."
        print(f"{style}{line}{Display.PLAIN}" if style and self.colors else line)


def main(settings: ExplainSettings) -> None:
    job = Job(settings)
    Narrator(job, job.load()).tell_all()
