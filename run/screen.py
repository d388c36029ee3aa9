"""The screen: streamed text, the summary; and the file of --output."""
import json
import os
import re
import sys
from collections import defaultdict
from dataclasses import asdict
from typing import Any, TextIO

from tqdm import tqdm

from cache import PRIMARY, throughput
from cli.settings import DecodingSettings, open_for_writing
from engine.errors import printable
from run.stats import theorem_7
from run.text import TextStream, text_pieces

REPORT = (
    ("tokens_per_second", "tokens per second", ".1f", "decoding only, without prefill"),
    ("tokens_per_round", "tokens per round", ".2f", "accepted drafts and the bonus token"),
    ("acceptance_rate", "acceptance rate", ".2f", "of drafted tokens, up to the first rejection"),
    ("hit_rate", "cache hit rate", ".2f", "outcomes that the draft had prepared for"),
    ("verifier_utilisation", "verifier utilisation", ".2f", "the share of time spent verifying"))
KEPT = 0.95  # of the passes, or times mean nothing
TOO_SLOW = "  This machine was too slow for the pace: compare nothing with these times."


def can_show_colours() -> bool:
    """Return True on a terminal with colours, unless it was asked for none (no-color.org)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


class Display:
    """Shows what rank 0 decodes of a `run.job.Job`. With one prompt it streams the text as it is
    verified, on a terminal in colours. With several it shows a progress bar, and each text when its
    batch has ended. It also writes the file of --output."""
    PROMPT = "\x1b[2m"
    CACHE = "\x1b[94m"  # blue and orange, the figures' colours
    BACKUP = "\x1b[38;5;208m"
    UNDERLINED = "\x1b[4m"
    PLAIN = "\x1b[0m"

    def __init__(self, job):
        self.job = job
        self.streams = len(job.texts) == 1
        self.colours = self.streams and can_show_colours()
        self.stream = TextStream(job.tokenizer, job.prompts[0])
        self.groups = defaultdict(list)  # by row of the batch at work, see `group`
        self.waiting = enumerate(zip(job.rows, job.prompts), start=1)  # texts that have not ended
        settings = job.settings
        # a wrong path is refused now; files keep what they hold until all is loaded
        self.output = open_for_writing("--output", settings.output, "a", prompts=settings.prompts)
        self.trace = open_for_writing("--trace", settings.trace, "a", prompts=settings.prompts,
                                      output=settings.output)

    def begin(self) -> None:
        """Empty the files, and show the prompt, if there is one."""
        for file in (self.output, self.trace):
            if os.path.isfile(file.name):  # not a pipe
                file.truncate(0)
        used = {"dtype": str(self.job.dtype).removeprefix("torch.")}  # what auto is here
        write_line(self.output, {"settings": asdict(self.job.settings) | used})
        total = len(self.job.texts) * self.job.settings.max_new_tokens
        self.bar = tqdm(total=total, unit="token", disable=True if self.streams else None)
        if self.colours:
            print(f"{self.PROMPT}prompt{self.PLAIN}, {self.CACHE}from the cache{self.PLAIN}, "
                  f"{self.BACKUP}from a backup{self.PLAIN}, {self.UNDERLINED}bonus token"
                  f"{self.PLAIN}\n")
        if self.streams:
            self.write(self.job.texts[0], self.PROMPT)
        if self.streams and not self.colours:
            print("\n----- continued -----")

    def write(self, text: str, style: str) -> None:
        text = printable(text)
        if self.colours:  # words alone: of a styled blank one would see the underline
            text = re.sub(r"\S+", f"{style}\\g<0>{self.PLAIN}", text)
        print(text, end="", flush=True)

    def show(self, row: int, new_tokens: list[int], source: int) -> None:
        """Show new tokens, just verified. The last is the bonus token, or the text's end."""
        self.bar.update(len(new_tokens))
        self.groups[row] += self.group(row, len(new_tokens), source)
        if not self.streams:
            return
        style = self.CACHE if source == PRIMARY else self.BACKUP
        for count, token in enumerate(new_tokens, start=1):
            if count == len(new_tokens):
                style += self.UNDERLINED
            self.write(self.stream.step(token), style)

    def group(self, row: int, num_tokens: int, source: int) -> list[str]:
        """Return the group of each new token for the audit: whether its round began with a hit, and
        its place in the round. Both are settled before the token is drawn, so the tokens of each
        group are distributed as the target's, too. In block verification the place is settled
        later; yet each place has the target's distribution, see ideas/block.py."""
        if not self.groups[row]:
            return ["round 0"]
        began = "hit" if source == PRIMARY else "miss"
        return [f"{began} {place}" for place in range(num_tokens)]

    def end_batch(self, new_tokens: list[list[int]], finish_reasons: list[str]) -> None:
        """Write the texts to the file and, if they were not streamed, to the screen."""
        for row, (tokens, reason) in enumerate(zip(new_tokens, finish_reasons)):
            number, (given, prompt_tokens) = next(self.waiting)
            fields = {name: value for name, value in given.items()
                      if name not in ("settings", "statistics")}  # they have lines of their own
            text = "".join(text_pieces(self.job.tokenizer, prompt_tokens, tokens))
            write_line(self.output, fields | {
                "prompt_tokens": prompt_tokens, "text": text, "tokens": tokens,
                "finish_reason": reason, "group": self.groups.pop(row)})
            if self.streams:
                self.write(text.removeprefix(self.stream.text), self.PLAIN)
            else:
                tqdm.write(f"\n----- prompt {number} -----\n{printable(given['prompt'])}"
                           f"\n----- continued -----\n{printable(text)}")

    def finish(self, stats) -> None:
        """Print what `run.stats.Stats` say, and write it."""
        summary = stats.summary()
        self.bar.close()
        print("\n")
        print_summary(self.job, summary)
        counts = dict(zip(("guess_counts", "guess_counts_after_backup"), stats.guess_counts))
        write_line(self.output, {"statistics": summary | counts})
        if self.job.settings.trace is not None:
            write_line(self.trace, stats.trace(self.job.placement.devices))
        self.output.close()
        self.trace.close()


def write_line(file: TextIO, line: dict[str, Any]) -> None:
    print(json.dumps(line), file=file, flush=True)  # at once


# ---- the summary ----

def print_summary(job, summary: dict[str, Any]) -> None:
    """Print `Stats.summary()` and what it means."""
    settings = job.settings
    print(f"{summary['tokens']} tokens with {settings.mode}:")
    means_nothing = {"hit_rate": settings.mode == "sd",
                     "acceptance_rate": settings.verification != "token"}
    for name, title, form, meaning in REPORT:
        if not means_nothing.get(name):
            print_line(title, summary[name], form, meaning)
    if settings.mode == "sd":
        print_line("drafting (T_SD)", summary["T_b"], ".2f",
                   f"of a verification, each round, {summary.get('backup')}")
    if settings.mode == "ssd":
        print_times(settings, summary)
        shape, after_backup = summary["fan_out"], summary["fan_out_after_backup"]
        print_line("fan-out, F_0..F_K", "", "", str(shape))
        if after_backup != shape:
            print_line(f"after {summary['backup']} backup", "", "", str(after_backup))
    if {*job.placement.devices} != {"cpu"}:
        print_line("devices", "", "", ", ".join(job.placement.devices))
    kept = summary["pace_kept"]
    print_line("pace kept", kept, ".0%",
               "of passes: target {:g} ms, draft {:g} ms".format(*settings.pace))
    if kept is not None and kept < KEPT:
        print(TOO_SLOW)


def print_line(title: str, number: float | str | None, form: str, meaning: str) -> None:
    """Print a line, unless its number was not measured."""
    if number is not None:
        print(f"  {title:21}{format(number, form):>7}   {meaning}")


def print_times(settings: DecodingSettings, summary: dict[str, Any]) -> None:
    """Print T_p, T_b and the speed that Theorem 7 predicts from them."""
    T_p = summary["T_p"]
    T_b = summary["T_b"]
    if summary["seconds"] is None:
        print("  one process was target and draft in turns: times would mean nothing")
        return
    late = T_p is not None and round(T_p, 2) > 1
    hidden = "the target waits: lower K" if late else "hidden behind it"
    print_line("pre-speculation (T_p)", T_p, ".2f", f"of a verification: {hidden}")
    print_line(f"{summary['backup']} backup (T_b)", T_b, ".2f", "of a verification, after a miss")
    if T_b is not None and summary["backup"] == "neural":
        sd = throughput(0, 0, summary["tokens_per_round"], 1, T_b)  # its T_SD is this T_b
        over_ar = theorem_7(summary, settings.batch_size)
        print_line("predicted speed", over_ar, ".2f",
                   f"x AR, {over_ar / sd:.2f} x SD with this K, by Theorem 7")
