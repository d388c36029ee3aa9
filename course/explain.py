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
        """Return what t* was drawn from, `[V]`: after a rejection the residual, else the last p."""
        k, _ = self.outcome
        if k < len(self.drafted):
            return residual(self.p[k], self.sent[k])
        return self.p[k]

    def brief(self) -> dict[str, Any]:
        """Return the round without its distributions: of them p and the probability sent of the
        drafted tokens (greedy: the draft's q), p and q of t*, and q of the guesses."""
        place = range(len(self.drafted))
        sent = self.sent if self.sent.shape[-1] else self.q
        prepared = []
        for (k, bonus), branch in self.prepared.items():
            prepared.append([k, bonus, float(self.q[k, bonus]), branch])
        return {
            "drafted": self.drafted,
            "outcome": self.outcome,
            "hit": self.hit,
            "p": self.p[place, self.drafted].tolist(),
            "sent": sent[place, self.drafted].tolist(),
            "uniforms": self.uniforms.tolist(),
            "p_bonus": float(self.p[self.outcome]),
            "q_bonus": float(self.q[self.outcome]),
            "prepared": prepared}


def prepared_for(cache: SpeculationCache, row: int) -> dict[tuple[int, int], list[int]]:
    """Return the guesses (k, t*) of a row, and the tokens that were prepared for each."""
    guesses = torch.stack(cache.guesses, -1)[row].tolist()
    branches = cache.tokens[row].tolist()
    return {(k, bonus): branch for (k, bonus), branch in zip(guesses, branches)
            if k != NO_OUTCOME}


class Narrator:
    """Decodes sequences with loaded models, looks inside every round, and prints it."""

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
        """Yield every round, seen from inside, of every active row."""
        turns = TakingTurns(self.draft, self.sequences.prompts, self.sequences.max_length)
        for speculation, _ in decode(self.target, turns, self.sequences, self.settings.lookahead):
            yield [*self.look_inside(speculation, turns.cache)]

    def look_inside(self, speculation: Speculation, cache: SpeculationCache) -> Iterator[Round]:
        """Yield the rows of a round as target and draft see them before they move on."""
        p = self.distributions(self.target.model, speculation.tokens)
        q = self.distributions(self.draft.model, speculation.tokens)
        uniforms = self.uniforms.draw(*p.shape[:2])
        for decoded in self.sequences.last_round:
            row = decoded.row
            outcome = (decoded.num_accepted, decoded.bonus)
            prepared = prepared_for(cache, row)
            sent = speculation.q[row].cpu()
            yield Round(row, decoded.drafted, decoded.source, outcome, prepared, p[row], q[row],
                        sent, uniforms[row])

    def distributions(self, model: CausalLM, drafted: torch.Tensor) -> torch.Tensor:
        """Return a model's distributions `[B, K+1, V]` along the drafted tokens; the KV stays as it
        is."""
        tokens = torch.cat([self.target.last[:, None], drafted.cpu()], 1)
        logits = model.causal(tokens.to(model.device), self.target.length - 1)
        return self.sampler.probabilities(logits).cpu()

    def print_plan(self) -> None:
        """Print F_0..F_K, and the P(k) behind them."""
        plan = self.draft.plan
        settings = self.settings
        title = f"planned fan-out, {settings.fan_out}, r = {settings.miss_exponent:.2f}"
        self.print_numbers(title, "k", range(plan.lookahead + 1), style=BOLD)
        rates = (settings.acceptance_rate, acceptance_after(settings, plan.backup))
        for source, a, fan_out in zip(self.sources, rates, plan.fan_out):
            likelihood = acceptance_distribution(a, plan.lookahead)
            self.print_numbers(f"  after {source}, a = {a:.2f}", "P(k)", likelihood, form="6.2f")
            self.print_numbers("", "F_k", fan_out)

    def print_numbers(self, title: str, name: str, numbers, form="6", style="") -> None:
        """Print numbers for k = 0..K, in columns, after their title and name."""
        cells = "".join(f"{number:{form}}" for number in numbers)
        self.say(f"{title:42}{name:4}{cells}", style)

    def print_rounds(self, number: int, rounds: list[Round]) -> None:
        """Print a round, row by row: the outcomes guessed and what was prepared, the outcome."""
        backup = self.sources[BACKUP]
        for seen in rounds:
            title = "the target reads the prompt, the draft guesses its first token"
            if seen.drafted:
                source = self.sources[seen.source]
                title = f"verifying [ {self.words(seen.drafted)} ]   from {source}"
            of_row = f", row {seen.row}" if len(self.sequences.prompts) > 1 else ""
            self.say(f"\nround {number}{of_row}   {title}", BOLD)
            style = BOLD + (Display.CACHE if seen.hit else Display.BACKUP)
            self.print_guesses(seen, style)
            if self.settings.temperature:
                self.print_draws(seen)
            answer = "HIT, what was prepared is sent at once"
            if not seen.hit:
                answer = f"MISS, {backup} drafts"
            elif not all(other.hit for other in rounds):
                answer = f"HIT, kept while {backup} drafts (4.3)"
            k, bonus = seen.outcome
            self.say(f"   {k} of {len(seen.drafted)} accepted, bonus token "
                     f"[ {self.words([bonus])} ]: {answer}", style)

    def print_guesses(self, seen: Round, style: str) -> None:
        """Print every guess, and what was prepared for it; the outcome in the given style."""
        shown = {}
        for guess, branch in seen.prepared.items():
            shown[guess] = f"[ {self.words(branch)} ]"
        shown.setdefault(seen.outcome, "(not guessed)")
        self.say(f"{'accepted':>35} | {'bonus t*':<{WORD}}     q  prepared for this outcome")
        for (k, token), text in shown.items():
            accepted = self.words(seen.drafted[:k])[-24:]
            bonus = self.words([token])
            q = seen.q[k, token]
            line = f"k={k:<2}{accepted:>25} | {bonus:<{WORD}} {q:.3f}  {text}"
            if (k, token) == seen.outcome:
                self.say(f"  --> {line}", style)
            else:
                self.say(f"      {line}")

    def print_draws(self, seen: Round) -> None:
        """Print token by token, up to the rejection: p, the draft's q, the one sent to the
        verifier, which is sigma of it or a backup's own, and u; what t* is drawn from."""
        k, _ = seen.outcome
        *uniforms, bonus_uniform = seen.uniforms
        if seen.drafted:
            self.say("     drafted            p      q   sent      u  accepted if u < p / sent")
        for i, token in enumerate(seen.drafted[:k + 1]):
            word = self.words([token])
            p = seen.p[i, token]
            q = seen.q[i, token]
            sent = seen.sent[i, token]
            verdict = "accepted" if i < k else "rejected"
            self.say(f"  s_{i + 1:<2} {word:<{WORD}} {p:.3f}  {q:.3f}  {sent:.3f}  "
                     f"{uniforms[i]:.3f}  {p / sent:.3f}: {verdict}")
        name = "the residual" if k < len(seen.drafted) else "p"
        drawn_from = seen.bonus_distribution()
        likeliest = []
        for token in drawn_from.topk(3).indices.tolist():
            likeliest.append(f"{self.words([token])} {drawn_from[token]:.3f}")
        self.say(f"  t*   from {name}, by token id, with u = {bonus_uniform:.3f}; "
                 f"likeliest: {'  '.join(likeliest)}")

    def words(self, tokens: list[int]) -> str:
        """Return tokens as they are spelt, blanks as dots; eight blanks are a dot and x8."""
        words = []
        for token in tokens:
            spelt = repr(self.tokenizer.decode([token]))[1:-1]
            spelt = re.sub(" {3,}", lambda run: f" x{len(run[0])}", spelt)
            if len(spelt) > WORD:
                spelt = spelt[:WORD - 2] + ".."
            words.append(spelt.replace(" ", "\u00b7"))
        return " ".join(words)

    def say(self, line: str, style: str = "") -> None:
        """Print a line of the screen's width at most."""
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
    narrator.print_plan()
    for number, rounds in enumerate(islice(narrator.decode(), settings.rounds + 1)):
        if settings.pause and number:
            print("   Enter: the next round ", end="", flush=True)
            sys.stdin.readline()
        narrator.print_rounds(number, rounds)
    for text, prompt, tokens in zip(job.texts, job.prompts, sequences.new_tokens):
        written = "".join(text_pieces(job.tokenizer, prompt, tokens))
        print(f"\ntext\n{printable(text + written)}")


def main(settings: ExplainSettings) -> None:
    job = Job(settings)
    slow_motion(job, job.load())
