"""Slow motion: rounds of speculative speculative decoding with real tokens, nothing overlapping.

    python -m course.explain --prompt "def fibonacci(n):" --rounds 3
    python -m course.explain --temperature 1 --downweight 0.5 --no-public-noise

What two ranks do at the same time (Algorithm 1) happens here one after the other, and is shown: the
speculation under verification, every guessed outcome (k, t*) with the draft's probability of t*
after k accepted tokens, the speculation prepared for it, and the outcome. This is the paper's
Fig. 2 with real tokens.
"""
import os
import sys
from dataclasses import dataclass, replace
from unittest.mock import patch

from runtime.settings import Settings, UserError, begin, option, read_prompts


@dataclass
class ExplainSettings(Settings):
    """Rounds of speculative speculative decoding in slow motion: one process, nothing overlaps."""
    GROUPS = Settings.GROUPS | {"rounds": "slow motion"}

    prompt: tuple[str, ...] = option((), "the text to continue", nargs=1)
    prompts: str | None = None  # what has no `option` here is none of this command's
    batch_size: int = 1
    ignore_eos: bool = False
    json: str | None = None
    max_new_tokens: int = 0
    mode: str = "sd"  # one process holds both models
    no_early_outcome: bool = True
    rounds: int = option(3, "rounds to show after round 0, the prompt's")

    def check(self) -> None:
        self.max_new_tokens = 1 + self.rounds * (self.lookahead + 1)
        if self.rounds < 1:
            raise UserError(f"--rounds is {self.rounds}; it must be at least 1")
        super().check()


SETTINGS = begin(ExplainSettings) if __name__ == "__main__" else None  # importing torch takes time

import torch

import sampling
from cache import PRIMARY, Outcome, Speculation
from draft_worker import DraftWorker
from runtime.command import Run, Stats, Texts, run, visible
from saguaro import Decoder

WIDTH, WORD = 100, 12  # columns of a line, and of a token in it, at most
BOLD, DIM, GREEN, YELLOW = 1, 2, 32, 33  # the cache's speculations are green, a backup's yellow
COLOUR = sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def say(line: str, *codes: int) -> None:
    line = line if len(line) <= WIDTH else line[:WIDTH - 3] + "..."
    print(f"\033[{';'.join(map(str, codes))}m{line}\033[0m" if codes and COLOUR else line)


class Judge:
    """Stands in for `sampling.verify`: judges as it does, and keeps what was judged."""

    def __init__(self):
        self.verify = sampling.verify

    def __call__(self, p, tokens, q, coins, keys=None):
        self.p, self.coins = p[0], coins[0].tolist()
        self.q = (q if q.shape[-1] else sampling.point_mass(tokens, like=p))[0]
        return self.verify(p, tokens, q, coins, keys)


class Narrator:
    """Tells the rounds of one text."""

    def __init__(self, tokenizer, draft: DraftWorker, judge: Judge):
        self.tokenizer, self.draft, self.judge = tokenizer, draft, judge

    def words(self, tokens: list[int]) -> str:
        spelt = (repr(self.tokenizer.decode([token]))[1:-1].replace(" ", "\u00b7")
                 for token in tokens)
        return " ".join(word if len(word) <= WORD else word[:WORD - 2] + ".." for word in spelt)

    def likeliest(self, probabilities: torch.Tensor) -> str:
        found, tokens = probabilities.topk(min(5, len(probabilities)))
        return "  ".join(f"{self.words([token])} {share:.2f}"
                         for share, token in zip(found.tolist(), tokens.tolist()) if share)

    def tell(self, number: int, speculation: Speculation, outcome: Outcome) -> None:
        drafted, (k, bonus) = speculation.tokens[0].tolist(), (int(part) for part in outcome)
        source, colour = "a backup's", YELLOW
        if speculation.source == PRIMARY:
            source, colour = "from the cache", GREEN
        if number:
            print()
            say(f"round {number}   verifying  [ {self.words(drafted)} ]   ({source})", BOLD, colour)
        else:
            say("round 0   the target reads the prompt, the draft guesses its first token", BOLD)
        self.tell_guesses(drafted, k, bonus)
        if number and not self.draft.warping.greedy:
            self.tell_coins(drafted, k)
        self.tell_verdict(drafted, k, bonus, outcome)

    def tell_guesses(self, drafted: list[int], k: int, bonus: int) -> None:
        """Every guessed outcome, and the speculation prepared for it."""
        if not self.draft.fan_out.budget:
            return say("          no guesses: the budget is 0", DIM)
        cache, probability = self.draft.cache, self.probabilities(len(drafted))
        for guess, token, prepared in zip(*(part[0].tolist() for part in cache.guesses),
                                          cache.tokens[0].tolist()):
            came, before = (guess, token) == (k, bonus), self.words(drafted[:guess])
            say(f"  {'-->' if came else '   '} k={guess}  {before[-26:]:>26} | "
                f"t*= {self.words([token]):<{WORD}} {probability[guess, token]:.3f}  "
                f"then [ {self.words(prepared)} ]", *[BOLD, GREEN] if came else [DIM])

    def probabilities(self, lookahead: int) -> torch.Tensor:
        """The draft's, `[K+1, V]`, of the bonus token after k accepted tokens; the drafted token
        s_{k+1} is excluded, for it would have been accepted."""
        draft = self.draft
        if draft.public_seed is None:
            logits = draft.scores[0]
            plain = draft.warping.greedy
            return logits.softmax(-1) if plain else draft.warping.probabilities(logits)
        keys = sampling.noise_keys(draft.public_seed, draft.row, draft.length, lookahead)
        noise = sampling.public_noise(keys[0].to(draft.scores.device), draft.scores.shape[-1])
        likelihood = (draft.scores[0] * noise).clamp(min=0)  # the scores are q / noise
        return likelihood / likelihood.sum(-1, keepdim=True)

    def tell_coins(self, drafted: list[int], k: int) -> None:
        """p, q and the coin, token by token up to the rejection; what the bonus token is from."""
        judge = self.judge
        for i, token in enumerate(drafted[:k + 1]):
            p, q = float(judge.p[i, token]), float(judge.q[i, token])
            say(f"      s_{i + 1} {self.words([token]):<{WORD}} p {p:.3f}  q {q:.3f}  accepted with"
                f" probability {min(1.0, p / q):.2f}, the coin is {judge.coins[i]:.2f}: "
                f"{'accepted' if i < k else 'rejected'}")
        name, bonus_from = "p", judge.p[k]
        if k < len(drafted):
            name, bonus_from = "the residual", sampling.residual(judge.p[k], judge.q[k])
        say(f"      bonus token drawn from {name}:  {self.likeliest(bonus_from)}")

    def tell_verdict(self, drafted: list[int], k: int, bonus: int, outcome: Outcome) -> None:
        verdict = f"      {k} of {len(drafted)} accepted, bonus token {self.words([bonus])}:  "
        if self.draft.cache.look_up(outcome)[2]:
            return say(verdict + "HIT, the answer is sent at once", BOLD, GREEN)
        scores, rank = self.draft.scores, ""
        if scores is not None:
            likelier = int((scores[0, k] > scores[0, k, bonus]).sum())
            rank = f" (no. {likelier + 1} for k={k})"
        say(f"{verdict}MISS{rank}, the {self.draft.fan_out.backup} backup drafts", BOLD, YELLOW)


def explain(s: ExplainSettings) -> None:
    job = Run(s, read_prompts(s)[:1])
    job.join_and_load()
    decoder = Decoder(replace(s, mode="ssd"), job.context, job.target, job.draft)
    target, draft = decoder.target, decoder.speculator
    texts = Texts(job.prompts, s.max_new_tokens, job.context, decoder.eos, Stats())
    narrator = Narrator(job.tokenizer, draft, Judge())
    draft.start(texts.prompts, texts.longest)
    speculation = Speculation.empty(1)
    for number in range(s.rounds + 1):
        draft.pre_speculate()
        with patch.object(sampling, "verify", narrator.judge):
            outcome = (target.verify(speculation) if number else
                       target.prefill(texts.prompts, texts.longest, s.lookahead))
        narrator.tell(number, speculation, outcome)
        outcome = texts.extend(speculation, outcome)
        if texts.ended:
            break
        target.advance(outcome)
        speculation = draft.speculate(outcome)
    print(f"\n{visible(job.texts[0] + job.tokenizer.decode(texts.new[0]))}")


if __name__ == "__main__":
    run(SETTINGS, explain)
