"""Slow motion: rounds of speculative speculative decoding with real tokens, nothing overlapping.

    python -m course.explain --temperature 1 --downweight 0.5 --pause
    python -m course.explain "def f(x):" "import os"      two texts, a batch (section 4.3)

What two ranks do at the same time (Algorithm 1) happens here one after the other: the paper's
Fig. 2 with real tokens. Shown are the speculation under verification, every guessed outcome
(k, t*) with the draft's q of t* after k accepted tokens, what was prepared for it, and the outcome.
"""
if __name__ == "__main__":  # before the imports below, which take seconds
    from cli.launch import launch
    from course.options import ExplainSettings
    launch(ExplainSettings, "course.explain")  # parses, and calls `main`

import re
import sys
from itertools import islice
from typing import Any, Iterator, NamedTuple

import torch

from cache import BACKUP, NO_OUTCOME, Speculation, SpeculationCache, acceptance_distribution
from cli.settings import DecodingSettings
from course.options import ExplainSettings
from engine.errors import printable
from engine.model import CausalLM
from run.decoder import Decoder, acceptance_after
from run.job import Job, Models
from run.screen import Display, can_show_colours
from run.text import text_pieces
from saguaro import Sequences, TakingTurns, decode
from sampling import VERIFIER_STREAM, Sampler, UniformStream, residual

WIDTH = 100  # columns of a line, at most
WORD = 12    # and of a token in it
BOLD = "\x1b[1m"


class Round(NamedTuple):
    """A round of one row, seen from inside: K tokens verified, in round 0 none."""
    row: int
    drafted: list[int]        # the speculation, K tokens
    source: int               # PRIMARY or BACKUP, who drafted it
    outcome: tuple[int, int]  # (k, t*)
    prepared: dict[tuple[int, int], list[int]]  # by guess (k, t*): what would follow
    p: torch.Tensor           # [K+1, V] the target's distributions; greedy: at temperature 1
    q: torch.Tensor           # [K+1, V] the draft's
    sent: torch.Tensor        # [K, V] what the tokens were drawn from; V = 0: point masses
    uniforms: torch.Tensor    # [K+1] of the verifier: accepted if below p / sent; the last draws t*

    @property
    def hit(self) -> bool:
        return self.outcome in self.prepared

    def bonus_distribution(self) -> torch.Tensor:
        """What t* was drawn from, `[V]`: after a rejection the residual, else the last p."""
        k = self.outcome[0]
        return residual(self.p[k], self.sent[k]) if k < len(self.drafted) else self.p[k]

    def brief(self) -> dict[str, Any]:
        """The round without its distributions: of them p and the probability sent of the drafted
        tokens (greedy: the draft's q), p and q of t*, and q of the guesses."""
        place = range(len(self.drafted))
        sent = self.sent if self.sent.shape[-1] else self.q
        prepared = [[k, bonus, float(self.q[k, bonus]), branch]
                    for (k, bonus), branch in self.prepared.items()]
        return {"drafted": self.drafted, "outcome": self.outcome, "hit": self.hit,
                "p": self.p[place, self.drafted].tolist(),
                "sent": sent[place, self.drafted].tolist(),
                "uniforms": self.uniforms.tolist(),
                "p_bonus": float(self.p[self.outcome]), "q_bonus": float(self.q[self.outcome]),
                "prepared": prepared}


def prepared_for(cache: SpeculationCache, row: int) -> dict[tuple[int, int], list[int]]:
    """The guesses (k, t*) of a row, and the tokens that were prepared for each."""
    ks = cache.guesses.num_accepted[row].tolist()
    bonuses = cache.guesses.bonus[row].tolist()
    branches = cache.tokens[row].tolist()
    return {(k, bonus): branch for k, bonus, branch in zip(ks, bonuses, branches)
            if k != NO_OUTCOME}


class Narrator:
    """Decodes sequences with loaded models, looks inside every round, and tells it."""

    def __init__(self, settings: DecodingSettings, models: Models, sequences: Sequences, tokenizer):
        self.settings = settings
        self.sequences = sequences
        self.tokenizer = tokenizer
        ours = settings.to_settings(batch_size=len(sequences.prompts))
        decoder = Decoder(ours, models)
        self.target = decoder.target
        self.draft = decoder.draft
        self.sampler = Sampler(settings.temperature or 1.0, settings.top_k, settings.top_p)
        self.uniforms = UniformStream(settings.seed, VERIFIER_STREAM)  # the target's, again
        self.sources = ["the cache", f"the {self.draft.plan.backup} backup"]  # PRIMARY, BACKUP

    def decode(self) -> Iterator[list[Round]]:
        """Every round, seen from inside, of every active row."""
        turns = TakingTurns(self.draft, self.sequences.prompts, self.sequences.max_length)
        for speculation, _ in decode(self.target, turns, self.sequences, self.settings.lookahead):
            yield [*self.look_inside(speculation, turns.cache)]

    def tell_fan_out(self) -> None:
        """Print F_0..F_K, and the P(k) behind them."""
        plan = self.draft.plan
        settings = self.settings
        title = f"planned fan-out, {settings.fan_out}, r = {settings.miss_exponent:.2f}"
        self.say(f"{title:42}k   " + "".join(f"{k:6}" for k in range(plan.lookahead + 1)), BOLD)
        rates = (settings.acceptance_rate, acceptance_after(settings, plan.backup))
        for source, a, fan_out in zip(self.sources, rates, plan.fan_out):
            title = f"  after {source}, a = {a:.2f}"
            likelihood = acceptance_distribution(a, plan.lookahead)
            self.say(f"{title:42}P(k)" + "".join(f"{P:6.2f}" for P in likelihood))
            self.say(f"{'':42}F_k " + "".join(f"{F:6}" for F in fan_out))

    def look_inside(self, speculation: Speculation, cache: SpeculationCache) -> Iterator[Round]:
        """The rows of a round as target and draft see them before they move on."""
        p = self.distributions(self.target.model, speculation.tokens)
        q = self.distributions(self.draft.model, speculation.tokens)
        uniforms = self.uniforms.draw(*p.shape[:2])
        for seen in self.sequences.last_round:
            row = seen.row
            outcome = (seen.num_accepted, seen.bonus)
            sent = speculation.q[row].cpu()
            yield Round(row, seen.drafted, seen.source, outcome, prepared_for(cache, row), p[row],
                        q[row], sent, uniforms[row])

    def tell(self, number: int, rounds: list[Round]) -> None:
        """Print a round, row by row: the outcomes guessed and what was prepared, the outcome."""
        for told in rounds:
            k, bonus = told.outcome
            style = BOLD + (Display.CACHE if told.hit else Display.BACKUP)
            title = "the target reads the prompt, the draft guesses its first token"
            if told.drafted:
                source = self.sources[told.source]
                title = f"verifying [ {self.words(told.drafted)} ]   from {source}"
            of_row = f", row {told.row}" if len(self.sequences.prompts) > 1 else ""
            self.say(f"\nround {number}{of_row}   {title}", BOLD)
            self.tell_guesses(told, style)
            if self.settings.temperature:
                self.tell_draws(told)
            answer = "HIT, what was prepared is sent at once"
            if not told.hit:
                answer = f"MISS, {self.sources[BACKUP]} drafts"
            elif not all(other.hit for other in rounds):
                answer = f"HIT, kept while {self.sources[BACKUP]} drafts (4.3)"
            self.say(f"   {k} of {len(told.drafted)} accepted, bonus token "
                     f"[ {self.words([bonus])} ]: {answer}", style)

    def tell_guesses(self, told: Round, style: str) -> None:
        """Print every guess, and what was prepared for it; the outcome in the given style."""
        shown = {guess: f"[ {self.words(branch)} ]" for guess, branch in told.prepared.items()}
        shown.setdefault(told.outcome, "(not guessed)")
        self.say(f"{'accepted':>35} | {'bonus t*':<{WORD}}     q  prepared for this outcome")
        for (k, token), text in shown.items():
            accepted = self.words(told.drafted[:k])[-24:]
            line = (f"k={k:<2}{accepted:>25} | {self.words([token]):<{WORD}} "
                    f"{told.q[k, token]:.3f}  {text}")
            if (k, token) == told.outcome:
                self.say(f"  --> {line}", style)
            else:
                self.say(f"      {line}")

    def tell_draws(self, told: Round) -> None:
        """Print token by token, up to the rejection: p, the draft's q, the one sent to the
        verifier, which is sigma of it or a backup's own, and u; what t* is drawn from."""
        k, _ = told.outcome
        if told.drafted:
            self.say("     drafted            p      q   sent      u  accepted if u < p / sent")
        for i, token in enumerate(told.drafted[:k + 1]):
            p = told.p[i, token]
            sent = told.sent[i, token]
            verdict = "accepted" if i < k else "rejected"
            self.say(f"  s_{i + 1:<2} {self.words([token]):<{WORD}} {p:.3f}  "
                     f"{told.q[i, token]:.3f}  {sent:.3f}  {told.uniforms[i]:.3f}  "
                     f"{p / sent:.3f}: {verdict}")
        name = "the residual" if k < len(told.drafted) else "p"
        bonus_distribution = told.bonus_distribution()
        likeliest = [f"{self.words([token])} {bonus_distribution[token]:.3f}"
                     for token in bonus_distribution.topk(3).indices.tolist()]
        self.say(f"  t*   from {name}, by token id, with u = {told.uniforms[-1]:.3f}; "
                 f"likeliest: {'  '.join(likeliest)}")

    def distributions(self, model: CausalLM, drafted: torch.Tensor) -> torch.Tensor:
        """A model's distributions `[B, K+1, V]` along the drafted tokens; the KV stays as it is."""
        tokens = torch.cat([self.target.last[:, None], drafted.cpu()], 1).to(model.device)
        return self.sampler.probabilities(model.causal(tokens, self.target.length - 1)).cpu()

    def words(self, tokens: list[int]) -> str:
        """Tokens as they are spelt, blanks as dots; eight blanks are a dot and x8."""
        spelt = [repr(self.tokenizer.decode([token]))[1:-1] for token in tokens]
        spelt = [re.sub(" {3,}", lambda run: f" x{len(run[0])}", word) for word in spelt]
        short = [word if len(word) <= WORD else word[:WORD - 2] + ".." for word in spelt]
        return " ".join(word.replace(" ", "\u00b7") for word in short)

    def say(self, line: str, style: str = "") -> None:
        """A line of the screen's width at most."""
        if len(line) > WIDTH:
            line = line[:WIDTH - 3] + "..."
        coloured = style and (self.settings.color or can_show_colours())
        print(f"{style}{line}{Display.PLAIN}" if coloured else line)


def slow_motion(job: Job, models: Models) -> None:
    """Print the prompts of a job, F_0..F_K, round 0 and as many rounds as the settings say, and the
    texts."""
    settings = job.settings
    most = (settings.rounds + 1) * (settings.lookahead + 1)
    sequences = Sequences(job.prompts, most, models.context, models.target.eos_tokens)
    narrator = Narrator(settings, models, sequences, job.tokenizer)
    for text in job.texts:
        print(f"prompt\n{printable(text)}\n")
    narrator.tell_fan_out()
    for number, rounds in enumerate(islice(narrator.decode(), settings.rounds + 1)):
        if settings.pause and number:
            print("   Enter: the next round ", end="", flush=True)
            sys.stdin.readline()
        narrator.tell(number, rounds)
    for text, prompt, tokens in zip(job.texts, job.prompts, sequences.new_tokens):
        written = "".join(text_pieces(job.tokenizer, prompt, tokens))
        print(f"\ntext\n{printable(text + written)}")


def main(settings: ExplainSettings) -> None:
    job = Job(settings)
    slow_motion(job, job.load())
