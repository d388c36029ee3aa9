"""The options of every command, read from the command line or made in Python; prompts.

Importing torch takes seconds, so nothing here does: a wrong flag, a missing file or --help is
answered at once.
"""
import argparse
import ast
import json
import math
import os
import sys
import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import get_args

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tiny"  # the embedded pair
PROMPT_FIELDS = ("prompt", "question", "text")  # HumanEval's, GSM8K's, and others'
SWEEPS = ("timeline", "fan-out", "shape", "downweight", "noise", "batch", "frontier", "lookahead",
          "budget")


class UserError(Exception):
    """An error that the user can mend; one sentence says how."""


def first_line(problem: Exception) -> str:
    """The first line of a library's error message."""
    return (str(problem) or repr(problem)).splitlines()[0]


def keys_of(file: str, name: str) -> tuple[str, ...]:
    """The keys of a dictionary of functions, read from the source: importing it imports torch."""
    for node in ast.parse((ROOT / file).read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return tuple(key.value for key in node.value.keys)
    raise KeyError(f"{file} has no {name}")


FAN_OUTS = keys_of("cache.py", "FAN_OUT_POLICIES")
BACKUPS = keys_of("draft_worker.py", "BACKUPS")

# ---- the options ----

TEXT = "text"  # the groups of --help
METHOD = "method"
MODELS = "models"
SAMPLING = "sampling"
CACHE = "section 4.1, the cache"
SAGUARO_SAMPLING = "section 4.2, Saguaro sampling"
FALLBACK = "section 4.3, fallback"
MACHINE = "machine"
BENCH = "bench"
SLOW_MOTION = "slow motion"
GROUPS = (TEXT, METHOD, MODELS, SAMPLING, CACHE, SAGUARO_SAMPLING, FALLBACK, MACHINE, BENCH,
          SLOW_MOTION)


def option(group: str, default, help: str, min: float = -math.inf, max: float = math.inf, **form):
    """A field of settings, and the command line option that sets it; of a number, its range.
    `form`: further arguments for argparse."""
    shown = default
    if default in (None, ()):
        shown = "none"
    elif default is False:
        shown = "off"
    elif isinstance(default, tuple):
        shown = " ".join(map(str, default))
    form["help"] = f"{help} (default: {shown})"
    return field(default=default, metadata=dict(group=group, min=min, max=max, form=form))


def pace_option(default: tuple[float, float]):
    return option(
        MACHINE, default, "the least time of each decoding pass of the target and of the draft, in "
        "milliseconds: a pass that was computed sooner sleeps for the rest. 73.2 10.2: latencies "
        "of a 70B target and a small draft on H100s, times four; 0 0: off", min=0, max=1e6,
        nargs=2, metavar=("TARGET_MS", "DRAFT_MS"))


@dataclass
class DecodingSettings:
    """The options that all commands share."""
    target: str = option(
        MODELS, str(TINY / "target"), "target model: a Hugging Face Hub id or a folder")
    draft: str = option(
        MODELS, str(TINY / "draft"), "draft model with the target's vocabulary")
    apply_chat_template: bool = option(
        TEXT, False, "make each prompt a user turn of the chat template")
    lookahead: int = option(METHOD, 4, "K, tokens drafted per round", min=1)
    temperature: float = option(SAMPLING, 0.0, "0 is greedy", min=0, max=1e9)
    top_k: int = option(SAMPLING, 0, "sample among the N likeliest tokens; 0: among all", min=0,
                        metavar="N")
    top_p: float = option(
        SAMPLING, 1.0, "sample among the likeliest tokens of total probability P", min=1e-9, max=1,
        metavar="P")
    seed: int = option(
        SAMPLING, 0, "same seed, flags and machine: same text", min=0, max=2 ** 63 - 1)
    budget: int = option(
        CACHE, 12, "outcomes prepared for per round and row, the sum of the fan-out; 0: none, "
        "plain speculative decoding on the very same ranks", min=0)
    fan_out: str = option(
        CACHE, "geometric", f"shape of the cache: {', '.join(FAN_OUTS)}, or by hand, F_0,...,F_K "
        "such as 4,3,2,1,2, whose sum is then the budget", metavar="SHAPE")
    acceptance_rate: float = option(
        CACHE, 0.8, "a, the acceptance rate of drafted tokens, for the shape", min=0, max=1)
    miss_exponent: float = option(
        CACHE, 1.0, "r of the power law of misses (Def. 11), for the shape", min=1e-9, max=1e9)
    public_noise: bool = option(
        CACHE, False, "not in the paper: draw bonus tokens with noise that the draft can compute, "
        "and so guess them; the output is distributed as without")
    downweight: float = option(
        SAGUARO_SAMPLING, 1.0, "C (Def. 14); 1 is ordinary sampling", min=0, max=1, metavar="C")
    backup: str = option(
        FALLBACK, "neural", "who drafts after a cache miss: the draft model (neural), prompt "
        "look-up, random tokens, or auto: neural below Theorem 17's batch size, lookup above",
        choices=(*BACKUPS, "auto"))
    backup_acceptance_rate: float | None = option(
        FALLBACK, None, "a for the shape after a backup; none: --acceptance-rate after a neural "
        "one, 0.2 after others", min=0, max=1)
    dtype: str = option(MACHINE, "auto", "auto: bfloat16 on GPUs, float32 on CPUs",
                        choices=("auto", "float32", "bfloat16", "float16", "float64"))
    device: str = option(MACHINE, "auto", "auto: GPUs if there are any",
                         choices=("auto", "cpu", "cuda"))
    eager: bool = option(
        MACHINE, False, "on a GPU: launch every kernel from Python, replay no CUDA graphs")
    pace: tuple[float, float] = pace_option((0.0, 0.0))

    prompt = ()  # these three for commands without such options
    prompts = None
    max_new_tokens = 0

    def __post_init__(self):
        """Raises `UserError` for the first value that makes no sense, wherever it was set."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, os.PathLike):
                value = str(value)
            several = "nargs" in f.metadata["form"]
            values = value if several and isinstance(value, (tuple, list)) else [value]
            setattr(self, f.name, tuple(values) if several else value)
            for one in values:
                check_value(f, one)
        if 0 < self.temperature < 1e-6:
            raise UserError(f"--temperature is {self.temperature}; it must be 0 or at least 1e-6")
        if len(self.pace) != 2:
            raise UserError(f"--pace is {self.pace}; it must be two numbers of milliseconds")
        if self.fan_out not in FAN_OUTS:
            shape = self.fan_out.split(",")
            if len(shape) != self.lookahead + 1 or not all(F.isdecimal() for F in shape):
                raise UserError(f"--fan-out {self.fan_out}: neither {' nor '.join(FAN_OUTS)} nor "
                                f"{self.lookahead + 1} numbers, F_0,...,F_K for K = --lookahead")
            self.budget = sum(map(int, shape))

    def to_settings(self, **changes) -> "Settings":
        """Settings of `saguaro.py` with these options and `changes`."""
        shared = {f.name: getattr(self, f.name) for f in fields(DecodingSettings)}
        return Settings(**shared | changes)

    def backup_acceptance(self, backup: str) -> float:
        """a after a backup of this name."""
        if self.backup_acceptance_rate is not None:
            return self.backup_acceptance_rate
        return self.acceptance_rate if backup == "neural" else 0.2


TYPES = {int: (int, "a whole number"), float: ((int, float), "a number"), str: (str, "a text"),
         bool: (bool, "True or False")}


def value_type(f) -> type:
    """That of the values of a field: int, float, str or bool."""
    return [*get_args(f.type), f.type][0]  # T of T | None, tuple[T, T], tuple[T, ...] and T


def check_value(f, value) -> None:
    """Raises `UserError` for a value that the field may not hold."""
    flag = f"--{f.name.replace('_', '-')}"
    minimum = f.metadata["min"]
    maximum = f.metadata["max"]
    choices = f.metadata["form"].get("choices")
    types, type_name = TYPES[value_type(f)]
    if value is None and f.default is None:
        return
    if not isinstance(value, types):
        allowed = type_name
    elif choices and value not in choices:
        allowed = f"one of {', '.join(choices)}"
    elif not isinstance(value, str) and not minimum <= value <= maximum:
        allowed = f"at least {minimum}"
        if maximum < math.inf:
            allowed += f" and at most {maximum}"
    else:
        return
    raise UserError(f"{flag} is {value!r}; it must be {allowed}")


@dataclass
class Settings(DecodingSettings):
    """Speculative speculative decoding: while the target verifies, the draft works ahead."""
    EXAMPLES = """\
examples:
  python saguaro.py                                       the embedded pair, SSD, greedy
  python saguaro.py "class Stack:" --mode sd              speculative decoding
  python saguaro.py --temperature 1 --downweight 0.75     Saguaro sampling
  python saguaro.py --pace 73.2 10.2 --budget 24          with the latencies of H100s, times four
  torchrun --nproc-per-node 5 saguaro.py --target meta-llama/Llama-3.1-70B-Instruct \\
      --draft meta-llama/Llama-3.2-1B-Instruct            the target shared by four GPUs"""

    prompt: tuple[str, ...] = option(
        TEXT, (), "texts to continue; - alone: what stands in standard input; none: "
        "tiny/prompt.txt", nargs="+")
    prompts: str | None = option(
        TEXT, None, "JSON Lines with a field prompt, question or text")
    max_new_tokens: int = option(TEXT, 128, "tokens to generate for each prompt, at most", min=1)
    batch_size: int = option(TEXT, 1, "prompts decoded together", min=1)
    ignore_eos: bool = option(TEXT, False, "do not stop at an end-of-sequence token")
    json: str | None = option(TEXT, None, "write settings, texts and statistics to this file")
    mode: str = option(
        METHOD, "ssd", "speculative speculative, speculative or autoregressive decoding",
        choices=("ssd", "sd", "ar"))

    def __post_init__(self):
        super().__post_init__()
        if self.prompt and self.prompts is not None:
            raise UserError("--prompt and --prompts exclude each other")
        if self.lookahead > max(16, self.max_new_tokens):
            raise UserError(f"--lookahead {self.lookahead}: no text has room for so many tokens; "
                            f"--max-new-tokens is {self.max_new_tokens}")
        if self.json is not None:
            check_writable("--json", self.json)


@dataclass
class BenchSettings(DecodingSettings):
    """Measure AR, SD and SSD, and draw the figures."""
    EXAMPLES = """\
examples:
  python bench.py                                         AR, SD and SSD, paced
  python bench.py --sweep all --out figures/results.json  all figures, and the comparison
  python bench.py --pace 0 0                              as fast as this machine computes"""

    mode = "ssd"  # no option: it needs the ranks of ssd

    prompts: str = option(TEXT, str(TINY / "prompts.jsonl"),
                          "JSON Lines with a field prompt, question or text")
    max_new_tokens: int = option(TEXT, 40, "tokens to generate for each prompt, exactly", min=2)
    pace: tuple[float, float] = pace_option((73.2, 10.2))
    quick: bool = option(BENCH, False, "3 prompts, 24 tokens, one seed, no choice of K")
    sweep: tuple[str, ...] = option(
        BENCH, (), f"draw figures: all (with the comparison), {', '.join(SWEEPS)}", nargs="+",
        choices=("all", *SWEEPS), metavar="NAME")
    figures: str = option(BENCH, "figures", "folder for the figures")
    out: str | None = option(BENCH, None, "write all results to this file (JSON)")
    predict: bool = option(BENCH, False, "no measurement: Theorem 7 at the paper's scale")

    def __post_init__(self):
        super().__post_init__()
        if any(self.pace) and not all(self.pace):
            raise UserError("--pace: Theorem 7 needs the times of both models; give both, or 0 0")
        if self.quick:
            self.max_new_tokens = 24
        if self.predict:
            self.mode = "ar"  # one process
        if self.out is not None:
            check_writable("--out", self.out)
        if self.sweep:
            check_writable("--figures", f"{self.figures}/{self.sweep[0]}.svg")


@dataclass
class ExplainSettings(DecodingSettings):
    """Rounds of speculative speculative decoding in slow motion: one process, nothing overlaps."""
    EXAMPLES = """\
examples:
  python -m course.explain --prompt "def fibonacci(n):"
  python -m course.explain --temperature 1 --downweight 0.5"""
    mode = "sd"  # no option: one process holds both models

    prompt: tuple[str, ...] = option(
        TEXT, (), "the text to continue; several are a batch, to see section 4.3", nargs="+")
    rounds: int = option(
        SLOW_MOTION, 3, "rounds to show after round 0, the prompt's", min=1)
    pause: bool = option(SLOW_MOTION, False, "wait for Enter after each round")
    color: bool = option(SLOW_MOTION, False, "colours even where the output is no terminal")


# ---- the command line ----

class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(message)


def parse(kind: type[DecodingSettings], arguments: list[str] | None = None) -> DecodingSettings:
    """The command line as `kind`, checked; its docstring is what --help begins with."""
    parser = Parser(description=kind.__doc__, epilog=kind.EXAMPLES, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = {title: parser.add_argument_group(title) for title in GROUPS
              if any(f.metadata["group"] == title for f in fields(kind))}
    for f in fields(kind):
        group = groups[f.metadata["group"]]
        form = {"default": f.default}
        if f.type is bool:
            form["action"] = "store_true"
        else:
            form["type"] = value_type(f)
            if "choices" not in f.metadata["form"]:
                form["metavar"] = f.name.split("_")[-1].upper()
        if f.name == "prompt":
            group = group.add_mutually_exclusive_group()
            group.add_argument("prompt", nargs="*", default=argparse.SUPPRESS, metavar="TEXT",
                               help="the same as --prompt TEXT")
        group.add_argument("--" + f.name.replace("_", "-"), **form | f.metadata["form"])
    return kind(**vars(parser.parse_args(arguments)))


# ---- files ----

def in_standard_input(settings: DecodingSettings) -> bool:
    """Is the prompt there? Only one rank can read it."""
    return settings.prompt == ("-",)


def read_prompts(settings: DecodingSettings) -> list[str]:
    """The texts to continue: --prompt, standard input, --prompts or tiny/prompt.txt."""
    if in_standard_input(settings):
        texts = [sys.stdin.buffer.read().decode("utf-8", "surrogateescape")]
    elif settings.prompt:
        texts = list(settings.prompt)
    elif settings.prompts is not None:
        texts = read_json_lines(settings.prompts)
    else:
        texts = [(TINY / "prompt.txt").read_text("utf-8")]
    for number, text in enumerate(texts, start=1):
        name = f"prompt {number} of {len(texts)}"
        if not text:
            raise UserError(f"{name} is empty")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(f"{name} is no text: half a character, or not UTF-8")
    if not texts:
        raise UserError(f"--prompts {settings.prompts} holds no prompt")
    return texts


def read_json_lines(path: str) -> list[str]:
    """The texts of a JSON Lines file. Raises `UserError`, naming the line."""
    file = Path(path)
    try:
        if file.exists() and not file.is_file():
            raise ValueError("not a file that every rank can read for itself")
        lines = file.read_text("utf-8-sig").split("\n")  # U+2028 ends no line
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise UserError(f"--prompts {path!r}: {reason}") from problem
    texts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found = [row[name] for name in PROMPT_FIELDS if isinstance(row.get(name), str)]
            texts.append(found[0])
        except (ValueError, AttributeError, IndexError, RecursionError):
            raise UserError(f"--prompts {path}, line {number}: not a JSON object with a text in a "
                            "field prompt, question or text") from None
    return texts


def check_writable(flag: str, path: str) -> None:
    """Refuse what `write_json` could not write."""
    file = Path(path)
    if file.exists() and not file.is_file() or not file.resolve().parent.is_dir():
        raise UserError(f"{flag} {path!r}: not a file in an existing folder")
    try:
        tempfile.TemporaryFile(dir=file.resolve().parent).close()
    except OSError as problem:
        raise UserError(f"{flag} {path}: {problem.strerror}") from problem


def write_json(flag: str, path: str, result: dict) -> None:
    """Written beside and renamed, so that a crash leaves the old file or the new one."""
    file = Path(path).resolve()
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        beside.replace(file)
    except OSError as problem:
        beside.unlink(missing_ok=True)
        raise UserError(f"{flag} {path}: {problem.strerror}") from problem
