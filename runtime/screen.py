"""What a person sees: the stream, the summary, --json, and the statistics behind them."""
import os
import re
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from tqdm import tqdm

from cache import PRIMARY, throughput
from runtime.placement import Job
from runtime.settings import Settings, write_json

CONTEXT = 8  # tokens, on which the text of the next ones may depend
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


@dataclass
class Stats:
    """Counts and times of decoding, in seconds; prefill, and the token that it yields, apart."""
    tokens: int = 0             # new tokens, with those of prefill
    prefill_tokens: int = 0     # one a prompt
    prefill_seconds: float = 0.0
    seconds: float = 0.0        # decoding, wall clock
    rounds: int = 0
    row_rounds: int = 0         # rounds, once for every active row
    accepted: int = 0
    rejected: int = 0           # at most one per row and round
    hits: int = 0
    hit_tokens: int = 0         # of rounds after a hit
    lookahead: int = 0
    spans: list[tuple[str, float, float]] = field(default_factory=list)  # (work, start, end)
    pace_kept: int = 0          # passes of both models that were as fast as --pace
    passes: int = 0             # with a pace
    draft: dict[str, Any] = field(default_factory=dict)  # see `DraftWorker.report`

    def count_round(self, is_prefill: bool, seconds: float, lookahead: int,
                    rows: list[tuple[int, int, bool]]) -> None:
        """Of every active row: tokens accepted, tokens kept, was it a hit?"""
        num_kept = sum(kept for _, kept, _ in rows)
        self.tokens += num_kept
        if is_prefill:
            self.prefill_tokens += num_kept
            self.prefill_seconds += seconds
            return
        self.seconds += seconds
        self.lookahead = lookahead
        self.rounds += 1
        self.row_rounds += len(rows)
        for accepted, kept, hit in rows:
            self.accepted += accepted
            self.rejected += accepted < lookahead
            self.hits += hit
            self.hit_tokens += kept * hit

    def add(self, spans: list[tuple[str, float, float]] = [], pace: tuple[int, int] = (0, 0),
            draft: dict[str, Any] = {}) -> None:
        """What a worker measured in a batch. `pace`: (kept, passes)."""
        self.spans += spans
        self.pace_kept += pace[0]
        self.passes += pace[1]
        self.draft |= draft

    def seconds_of(self, work: str) -> list[float]:
        """How long each piece of this work took."""
        return [end - start for name, start, end in self.spans if name == work]

    def mean_seconds(self, work: str) -> float | None:
        seconds = self.seconds_of(work)
        return ratio(sum(seconds), len(seconds))

    def summary(self) -> dict[str, Any]:
        """The figures of `--json`. `acceptance_rate`: the maximum-likelihood a of the paper's
        geometric model; T_p (a pre-speculation: trunk pass and K tree steps) and T_b (a backup) in
        units of a verification."""
        decoded = self.tokens - self.prefill_tokens
        K = self.lookahead
        verify = self.mean_seconds("verify")
        trunk = self.mean_seconds("trunk")
        step = self.mean_seconds("step")
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": ratio(decoded, self.seconds),
            "rounds": self.rounds,
            "tokens_per_round": ratio(decoded, self.row_rounds),
            "acceptance_rate": ratio(self.accepted, self.accepted + self.rejected),
            "hit_rate": ratio(self.hits, self.row_rounds) if K else None,
            "E_hit": ratio(self.hit_tokens, self.hits),
            "E_miss": ratio(decoded - self.hit_tokens, self.row_rounds - self.hits),
            "verifier_utilisation": ratio(sum(self.seconds_of("verify")), self.seconds),
            "T_p": ratio(trunk + K * step, verify) if trunk and step else None,
            "T_b": ratio(self.mean_seconds("backup"), verify),
            "prefill_seconds": self.prefill_seconds,
            "pace_kept": ratio(self.pace_kept, self.passes)} | self.draft


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def theorem_7(summary: dict[str, Any], batch_size: int = 1) -> float:
    """The speedup over autoregressive decoding by Theorem 7 (in a batch, Cor. 16) with the parts
    that were measured. What was not seen, such as a miss, has no weight."""
    parts = [summary[name] or 0.0 for name in ("hit_rate", "E_hit", "E_miss", "T_p", "T_b")]
    return throughput(*parts, batch_size)


# ---- the screen ----

REPORT = (
    ("tokens_per_second", "tokens per second", ".1f", "decoding only, without prefill"),
    ("tokens_per_round", "tokens per round", ".2f", "accepted drafts and the bonus token"),
    ("acceptance_rate", "acceptance rate", ".2f", "of drafted tokens, up to the first rejection"),
    ("hit_rate", "cache hit rate", ".2f", "outcomes that the draft had prepared for"),
    ("verifier_utilisation", "verifier utilisation", ".2f", "the share of time spent verifying"))


def visible(text: str) -> str:
    """Control characters as escapes: a text cannot move the cursor or hide a line."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def can_show_colours() -> bool:
    """Standard output is a terminal, and nobody asked for plain text (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


class Display:
    """Rank 0's screen: one prompt is streamed as it is verified, on a terminal in colours; of
    several, a progress bar, and each text when its batch is done."""
    PROMPT = "\x1b[2m"
    CACHE = "\x1b[94m"  # blue and orange, the figures' colours
    BACKUP = "\x1b[38;5;208m"
    UNDERLINED = "\x1b[4m"
    PLAIN = "\x1b[0m"

    def __init__(self, job: Job):
        self.job = job
        self.streams = len(job.texts) == 1
        self.colours = self.streams and can_show_colours()
        self.outputs = []
        self.tokens = []
        self.shown = ""
        total = len(job.texts) * job.settings.max_new_tokens
        self.bar = tqdm(total=total, unit="token", disable=True if self.streams else None)
        if self.colours:
            print(f"{self.PROMPT}prompt{self.PLAIN}, {self.CACHE}from the cache{self.PLAIN}, "
                  f"{self.BACKUP}from a backup{self.PLAIN}, {self.UNDERLINED}bonus token"
                  f"{self.PLAIN}\n")
        if self.streams:
            self.write(job.texts[0], self.PROMPT)
        if self.streams and not self.colours:
            print("\n----- continued -----")

    def write(self, text: str, style: str) -> None:
        text = visible(text)
        print(f"{style}{text}{self.PLAIN}" if self.colours else text, end="", flush=True)

    def show(self, row: int, new_tokens: list[int], source: int) -> None:
        """New tokens, just verified. The last is the bonus token, unless the text ends before."""
        self.bar.update(len(new_tokens))
        if self.streams:
            colour = self.CACHE if source == PRIMARY else self.BACKUP
            self.stream(new_tokens[:-1], colour)
            self.stream(new_tokens[-1:], colour + self.UNDERLINED)

    def stream(self, new_tokens: list[int], style: str, last: bool = False) -> None:
        """Show what the tokens add to the text, decoded with a few before them; half a character
        waits for the other half."""
        self.tokens += new_tokens
        text = self.decode(self.tokens)
        if last or not text.endswith("\ufffd"):
            self.write(text[len(self.shown):], style)
            self.tokens = self.tokens[-CONTEXT:]
            self.shown = self.decode(self.tokens)

    def decode(self, tokens: list[int]) -> str:
        return self.job.tokenizer.decode(tokens, skip_special_tokens=True)

    def end_batch(self, new_tokens: list[list[int]], eos: list[int]) -> None:
        """Keep the texts of a batch, and show them if they were not streamed."""
        for tokens in new_tokens:
            number = len(self.outputs)
            prompt = self.job.texts[number]
            text = self.decode(tokens)
            reason = self.finish_reason(self.job.prompts[number], tokens, eos)
            self.outputs.append(
                {"prompt": prompt, "text": text, "tokens": tokens, "finish_reason": reason})
            if not self.streams:
                tqdm.write(f"\n----- prompt {number + 1} -----\n{visible(prompt)}"
                           f"\n----- continued -----\n{visible(text)}")

    def finish_reason(self, prompt: list[int], tokens: list[int], eos: list[int]) -> str:
        if tokens and tokens[-1] in eos:
            return "eos"
        if len(tokens) == self.job.settings.max_new_tokens:
            return "length"
        return "context" if len(prompt) + len(tokens) == self.job.context else "interrupted"

    def finish(self, summary: dict[str, Any]) -> None:
        """The summary, and --json."""
        self.bar.close()
        self.stream([], self.PLAIN, last=True)
        full = sum(output["finish_reason"] == "context" for output in self.outputs)
        if full:
            print(f"\n\n{full} of {len(self.outputs)} texts ended at the target's context limit",
                  end="")
        self.summarise(summary)
        settings = self.job.settings
        if settings.json:
            result = {"config": asdict(settings), "outputs": self.outputs, "stats": summary}
            write_json("--json", settings.json, result)

    def summarise(self, summary: dict[str, Any]) -> None:
        settings = self.job.settings
        print(f"\n\n{summary['tokens']} tokens with {settings.mode}:")
        for name, title, form, meaning in REPORT:
            if summary[name] is not None and (name, settings.mode) != ("hit_rate", "sd"):
                self.line(title, f"{summary[name]:{form}}", meaning)
        if settings.mode == "sd" and summary["T_b"] is not None:
            self.line("drafting (T_SD)", f"{summary['T_b']:.2f}",
                      f"of a verification, each round, {summary['backup']}")
        if settings.mode == "ssd":
            self.summarise_ssd(summary)
        placement = self.job.placement
        if placement.any_gpu:
            self.line("devices", "", ", ".join(placement.devices))
        if placement.tp_size > 1:
            print(f"  {placement.tp_size} ranks share the target")
        kept = summary["pace_kept"]
        if kept is not None:
            target, draft = settings.pace
            self.line("pace kept", f"{kept:.0%}",
                      f"of passes: target {target:g} ms, draft {draft:g} ms")
            if kept < 0.95:
                print("  This machine was too slow for the pace: compare nothing with these times.")
        self.warn_of_flags_without_effect()

    def line(self, title: str, figure: str, meaning: str) -> None:
        print(f"  {title:21}{figure:>7}   {meaning}")

    def summarise_ssd(self, summary: dict[str, Any]) -> None:
        settings = self.job.settings
        T_p = summary["T_p"]
        T_b = summary["T_b"]
        if T_p is not None:
            hidden = "hidden behind it"
            if round(T_p, 2) > 1:
                hidden = "the target waits: try a smaller --lookahead or --budget"
            self.line("pre-speculation (T_p)", f"{T_p:.2f}", f"of a verification: {hidden}")
        if T_b is not None:
            self.line("backup (T_b)", f"{T_b:.2f}", "of a verification, after a miss")
        elif summary["rounds"]:
            self.line("backup (T_b)", "", "no miss seen yet")
        if T_b is not None and summary["backup"] == "neural":
            sd = throughput(0, 0, summary["tokens_per_round"], 1, T_b)  # its T_SD is this T_b
            over_ar = theorem_7(summary, settings.batch_size)
            self.line("Theorem 7", f"{over_ar:.2f}", "x autoregressive with these values, "
                      f"{over_ar / sd:.2f} x SD")
        self.line("fan-out", "", f"{summary['fan_out']} after a hit, "
                  f"{summary['fan_out_after_backup']} after a {summary['backup']} backup")
        if settings.backup == "auto":
            b = summary["critical_batch_size"]
            if b is None:
                self.line("critical batch size", "", "none: neural is better at every size")
            else:
                self.line("critical batch size", f"{b:.1f}", "(Thm. 17)")
        if settings.public_noise and settings.temperature:
            self.line("public noise", "on", "not in the paper")

    def warn_of_flags_without_effect(self) -> None:
        settings = self.job.settings
        if settings.temperature == 0:
            for name in ("top_k", "top_p", "downweight", "public_noise"):
                if getattr(settings, name) != getattr(Settings, name):  # not the default
                    print(f"  --{name.replace('_', '-')} has no effect on greedy decoding")
        elif settings.downweight < 1 and settings.mode != "ssd":
            print("  --downweight is ignored: only a cache has something to gain from it")
