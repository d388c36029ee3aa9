"""Slow motion: rounds of speculative speculative decoding with real tokens, nothing overlapping.

    python -m course.explain --prompt "def fibonacci(n):" --rounds 3
    python -m course.explain --temperature 1 --downweight 0.5 --no-public-noise

What two ranks do at the same time (Algorithm 1) happens here one after the other, and is shown: the
speculation under verification, every guessed outcome (k, t*) with the draft's probability of t*
after k accepted tokens, the speculation prepared for it, and the outcome. This is the paper's
Fig. 2 with real tokens. The loop is the program's own, and so are the workers: we only listen where
the target decides, and to the draft's passes.
"""
import os
import sys
from dataclasses import dataclass, replace
from unittest.mock import patch

from runtime.settings import Settings, begin, option, read_prompts


@dataclass
class ExplainSettings(Settings):
    """Rounds of speculative speculative decoding in slow motion: one process, nothing overlaps."""
    GROUPS = Settings.GROUPS | {"rounds": "slow motion"}
    LACKS = ("prompts", "batch_size", "ignore_eos", "json", "max_new_tokens", "mode", "drafters",
             "no_early_outcome", "eager")

    prompt: tuple[str, ...] = option((), "the text to continue", nargs=1)
    rounds: int = option(3, "rounds to show after round 0, the prompt's", least=1)

    def check(self) -> None:
        self.mode = "sd"  # one process holds both models
        self.eager = True  # a CUDA graph would overwrite the logits that are to be shown
        self.max_new_tokens = max(1, 1 + self.rounds * (self.lookahead + 1))
        super().check()


SETTINGS = begin(ExplainSettings) if __name__ == "__main__" else None  # importing torch takes time

import torch

import sampling
from cache import BACKUP, PRIMARY
from draft_worker import DraftWorker
from runtime.command import Run, Stats, Texts, run, visible
from saguaro import Decoder, decode

WIDTH, WORD = 100, 12  # columns of a line, and of a token in it, at most
BOLD, DIM, GREEN, YELLOW = 1, 2, 32, 33
SOURCES = {PRIMARY: ("from the cache", GREEN), BACKUP: ("a backup's", YELLOW)}
COLOUR = sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def say(line: str, *codes: int) -> None:
    line = line if len(line) <= WIDTH else line[:WIDTH - 3] + "..."
    print(f"\033[{';'.join(map(str, codes))}m{line}\033[0m" if codes and COLOUR else line)


class Narrator:
    """Tells the rounds of one text; `verify` and `draft_pass` stand where the program has its
    own."""

    def __init__(self, s: ExplainSettings, tokenizer, draft: DraftWorker, texts: Texts):
        self.settings, self.tokenizer, self.draft, self.texts = s, tokenizer, draft, texts
        self.warping = sampling.Warping(s.temperature or 1.0, s.top_k, s.top_p)
        self.own_verify, self.own_pass, self.number = sampling.verify, draft.model.causal, 0

    def draft_pass(self, *given, **named) -> torch.Tensor:
        self.logits = self.own_pass(*given, **named)
        return self.logits

    def verify(self, p, tokens, q, coins, keys):
        """As the target does it; meanwhile the draft pre-speculates, and all of it is told."""
        self.draft.pre_speculate()
        verdict = self.own_verify(p, tokens, q, coins, keys)
        drafted, (k, bonus) = tokens[0].tolist(), map(int, verdict)
        source, colour = SOURCES[int(self.draft.verifying.source)]
        if drafted:
            say(f"\nround {self.number}   verifying  [ {self.words(drafted)} ]   ({source})", BOLD,
                colour)
        else:
            say("round 0   the target reads the prompt, the draft guesses its first token", BOLD)
        hit = self.tell_guesses(drafted, k, bonus)
        if drafted and self.settings.temperature:
            self.tell_coins(drafted, k, p[0], q[0], coins[0])
        then = f"MISS, the {self.draft.fan_out.backup} backup drafts"
        say(f"      {k} of {len(drafted)} accepted, bonus token {self.words([bonus])}:  "
            f"{'HIT, the answer is sent at once' if hit else then}", BOLD, GREEN if hit else YELLOW)
        if self.number == self.settings.rounds:  # here the text ends, and with it the loop
            self.texts.rooms[0] = min(self.texts.rooms[0], len(self.texts.new[0]) + k + 1)
        self.number += 1
        return verdict

    def words(self, tokens: list[int]) -> str:
        spelt = (repr(self.tokenizer.decode([token]))[1:-1].replace(" ", "\u00b7")
                 for token in tokens)
        return " ".join(word if len(word) <= WORD else word[:WORD - 2] + ".." for word in spelt)

    def tell_guesses(self, drafted: list[int], k: int, bonus: int) -> bool:
        """Every guessed outcome, the speculation prepared for it; was the outcome one of them?"""
        if not self.settings.budget:
            say("          no guesses: the budget is 0", DIM)
            return False
        cache, logits = self.draft.cache, self.logits[0].clone()
        logits[range(len(drafted)), drafted] = -torch.inf  # it would have been accepted
        probability = self.warping.probabilities(logits)
        shown = {(guess, token): f"then [ {self.words(prepared)} ]" for guess, token, prepared in
                 zip(*(part[0].tolist() for part in (*cache.guesses, cache.tokens)))}
        hit = (k, bonus) in shown
        shown.setdefault((k, bonus), "was not guessed")
        for (guess, token), then in shown.items():
            came, before = (guess, token) == (k, bonus), self.words(drafted[:guess])
            say(f"  {'-->' if came else '   '} k={guess}  {before[-26:]:>26} | t*= "
                f"{self.words([token]):<{WORD}} {probability[guess, token]:.3f}  {then}",
                *[BOLD, GREEN if hit else YELLOW] if came else [DIM])
        return hit

    def tell_coins(self, drafted: list[int], k: int, p, q, coins) -> None:
        """p, q and the coin, token by token up to the rejection; what the bonus token is from."""
        for i, token in enumerate(drafted[:k + 1]):
            share = min(1.0, float(p[i, token] / q[i, token]))
            say(f"      s_{i + 1} {self.words([token]):<{WORD}} p {p[i, token]:.3f}  q "
                f"{q[i, token]:.3f}  accepted with probability {share:.2f}, the coin is "
                f"{coins[i]:.2f}: {'accepted' if i < k else 'rejected'}")
        name, bonus_from = "p", p[k]
        if k < len(drafted):
            name, bonus_from = "the residual", sampling.residual(p[k], q[k])
        likeliest = zip(*(part.tolist() for part in bonus_from.topk(min(5, len(bonus_from)))))
        say(f"      bonus token drawn from {name}:  " + "  ".join(
            f"{self.words([token])} {share:.2f}" for share, token in likeliest if share))


def explain(s: ExplainSettings) -> None:
    job = Run(s, read_prompts(s)[:1])
    job.join_and_load()
    decoder = Decoder(replace(s, mode="ssd"), job.context, job.target, job.draft)
    texts = Texts(job.prompts, s.max_new_tokens, job.context, decoder.eos, Stats())
    if s.temperature and not s.no_public_noise:
        say("guessed are the largest q / e, e the public noise; --no-public-noise: largest q", DIM)
    narrator = Narrator(s, job.tokenizer, decoder.speculator, texts)
    with (patch.object(sampling, "verify", narrator.verify),
          patch.object(job.draft, "causal", narrator.draft_pass)):
        decode(decoder.target, decoder.speculator, texts)
    print(f"\n{visible(job.texts[0] + job.tokenizer.decode(texts.new[0]))}")


if __name__ == "__main__":
    run(SETTINGS, explain)
