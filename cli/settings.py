"""The options that commands share, and those of saguaro.py, from the command line or from Python.

Importing torch takes seconds, so nothing here does: a wrong flag or --help is answered at once.
"""
import argparse
import math
import os
import sys
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TextIO, get_args

from engine.errors import UserError, read_json_lines, reported_as

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tiny"  # the embedded pair
KINDS = {int: Integral, float: Real, str: (str, os.PathLike), bool: bool}  # by a field's type
PROMPT_FIELDS = ("prompt", "question", "text")  # HumanEval's, GSM8K's, and others'


# ---- the options ----

CACHE = "section 4.1, the cache"  # groups of --help
FALLBACK = "section 4.3, fallback"


def option(group: str, default, help: str, min: float = -math.inf, max: float = math.inf, **form):
    """Declare a field of settings, its command line option and, of a number, its range. `form`
    holds further arguments for argparse."""
    shown = str(default).strip("()").replace(",", "").removeprefix(f"{ROOT}/")
    form["help"] = help if shown in ("", "None", "False") else f"{help} (default: {shown})"
    return field(default=default, metadata=dict(group=group, range=(min, max), form=form))


def pace_option(default: tuple[float, float] | None, more: str = ""):
    return option(
        "machine", default, "the least time of a verification, and of each pass that drafts, in "
        "milliseconds, with sampling: work done sooner sleeps for the rest. 75.5 8.75: latencies "
        "of Llama 70B and 1B on H100s, times five; 0 0: off" + more, min=0, max=1e6,
        nargs=2, metavar=("TARGET_MS", "DRAFT_MS"))


@dataclass(frozen=True)
class DecodingSettings:
    """Holds the options that all commands share. What was checked cannot be changed:
    `dataclasses.replace` makes other settings of it."""
    target: str = option(
        "models", str(TINY / "target"), "target model: a Hugging Face Hub id or a folder")
    draft: str = option("models", str(TINY / "draft"), "draft model with the target's tokenizer")
    apply_chat_template: bool = option(
        "text", False, "make each prompt a user turn of the chat template")
    lookahead: int = option("method", 4, "K, tokens drafted per round", min=1, max=64)
    temperature: float = option("sampling", 0.0, "0 is greedy", min=0, max=1e9)
    top_k: int = option("sampling", 0, "sample among the N likeliest tokens; 0: among all", min=0,
                        metavar="N")
    top_p: float = option(
        "sampling", 1.0, "sample among the likeliest tokens of total probability P", min=1e-9,
        max=1, metavar="P")
    seed: int = option(
        "sampling", 0, "same seed, flags, machine and library versions: same text", min=0,
        max=2 ** 30 - 1)
    budget: int = option(
        CACHE, 12, "outcomes prepared for per round and row, the sum of the fan-out; 0: "
        "plain speculative decoding", min=0, max=4096)
    fan_out: str = option(
        CACHE, "geometric", "geometric (Thm. 12), uniform, confident (ours: in each round by how "
        "sure the draft is), or F_0 to F_K, 4,3,2,1,2: the budget is their sum", metavar="SHAPE")
    acceptance_rate: float = option(
        CACHE, 0.8, "a, the acceptance rate of drafted tokens, for the shape", min=0, max=1)
    miss_exponent: float = option(
        CACHE, 1.0, "r: F guesses miss in proportion to F^-r (Def. 11)", min=1e-9, max=1e9)
    downweight: float = option(
        "section 4.2, Saguaro sampling", 1.0, "C (Def. 14); 1 is ordinary sampling; when greedy "
        "it does nothing", min=0, max=1, metavar="C")
    backup: str = option(
        FALLBACK, "neural", "who drafts after a cache miss: neural (the draft model), lookup "
        "(prompt look-up), random (random tokens), or auto: neural below Theorem 17's batch size, "
        "random above, for T_p <= 1; by the times of --pace, if given", metavar="NAME")
    backup_acceptance_rate: float | None = option(
        FALLBACK, None, "a for the shape after a backup; none: that of --acceptance-rate after "
        "neural, 0.2 after lookup, 0.1 after random", min=0, max=1)
    dtype: str = option("machine", "auto", "auto: bfloat16 (or float16) on GPUs, float32 on CPUs",
                        choices=("auto", "float32", "bfloat16", "float16", "float64"))
    device: str = option("machine", "auto", "auto: GPUs if there are any",
                         choices=("auto", "cpu", "cuda"))
    passes: str = option(
        "machine", "compiled", "how passes run on GPUs: layers compiled, then captured as CUDA "
        "graphs; captured alone; or launched from Python, as on CPUs",
        choices=("compiled", "captured", "eager"))
    pace: tuple[float, float] = pace_option((0.0, 0.0))

    # of commands that have no such option
    mode = "ssd"
    prompt = ()
    prompts = None
    max_new_tokens = 0

    def __post_init__(self):
        """Raises `UserError` for the first value that makes no sense, wherever it was set."""
        values = vars(self)  # whose attributes cannot be assigned
        by_hand = str(self.fan_out).split(",")
        if all(F.isdecimal() for F in by_hand):
            values["budget"] = sum(map(int, by_hand))  # has the range of --budget
        for entry in fields(self):
            values[entry.name] = checked(entry, values[entry.name])
        if 0 < self.temperature < 1e-6:
            raise UserError(f"--temperature is {self.temperature}; it must be 0 or at least 1e-6")
        if self.prompt and self.prompts is not None:
            raise UserError("--prompt and --prompts exclude each other")

    def to_settings(self, **changes) -> "Settings":
        """Return settings of `saguaro.py` with these options and `changes`."""
        shared = {entry.name: getattr(self, entry.name) for entry in fields(DecodingSettings)}
        return Settings(**shared | changes)


def value_type(entry) -> type:
    """Return the type T of a field's values, of T | None, tuple[T, T], tuple[T, ...] and T."""
    parts = get_args(entry.type)
    return parts[0] if parts else entry.type


def checked(entry, value) -> Any:
    """Return the value of a field, or the values of one that has several, as `checked_value`."""
    number = entry.metadata["form"].get("nargs")  # None: one value; "+": any number
    if value is entry.default:
        return value
    if number is None:
        return checked_value(entry, value)
    values = value if isinstance(value, (tuple, list)) else [value]
    if number not in ("+", len(values)):
        raise UserError(f"argument --{entry.name}: expected {number} values, but got {value!r}")
    return tuple(checked_value(entry, value) for value in values)


def checked_value(entry, value) -> int | float | str | bool | None:
    """Return a value as its field's type; NumPy's numbers and paths are taken, too. Raises
    `UserError` for one of another type, out of the field's range, or none of its choices."""
    name = f"--{entry.name.replace('_', '-')}"
    kind = value_type(entry)
    if not isinstance(value, KINDS[kind]):
        raise UserError(f"argument {name}: invalid {kind.__name__} value: {value!r}")
    minimum, maximum = entry.metadata["range"]
    if kind in (int, float) and not minimum <= value <= maximum:  # so that NaN is out
        raise UserError(f"{name} is {value!r}; it must be from {minimum} to {maximum}")
    choices = entry.metadata["form"].get("choices", [value])
    if value not in choices:
        raise UserError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")
    return kind(value)


@dataclass(frozen=True)
class Settings(DecodingSettings):
    """Speculative speculative decoding: while the target verifies, the draft works ahead."""

    prompt: tuple[str, ...] = option(
        "text", (), "texts to continue; none: tiny/prompt.txt", nargs="+")
    prompts: str | None = option("text", None, "JSON Lines with a field prompt, question or text")
    max_new_tokens: int = option("text", 128, "tokens to generate for each prompt, at most", min=1)
    batch_size: int = option("text", 1, "prompts decoded together", min=1)
    ignore_eos: bool = option("text", False, "do not stop at an end-of-sequence token")
    output: str | None = option(
        "text", None, "write settings, each text as soon as its batch has ended, and statistics to "
        "this file (JSON Lines), with the other fields of its prompt", metavar="FILE")
    trace: str | None = option(
        "machine", None, "write what every rank did, and when, and every round to this file "
        "(Chrome trace JSON: open it in ui.perfetto.dev)", metavar="FILE")
    mode: str = option(
        "method", "ssd", "speculative speculative, speculative or autoregressive decoding",
        choices=("ssd", "sd", "ar"))
    verification: str = option(
        "method", "token", "what accepts drafted tokens: token (each by itself, as in the paper), "
        "block (all together: Sun et al. 2024), or race (block, and the draft foresees the bonus "
        "token)", metavar="NAME")


# ---- the command line ----

class Parser(argparse.ArgumentParser):
    def __init__(self, **options):
        """Name the command as it was typed, also before Python 3.14: `python -m course.mark`."""
        module = sys.modules["__main__"].__spec__  # None if a file is run
        program = f"python -m {module.name}" if module else None
        super().__init__(prog=program, **options)

    def error(self, message: str):
        raise UserError(f"{message} (--help lists all options)")


def parse(kind: type[DecodingSettings], arguments: list[str] | None = None) -> DecodingSettings:
    """Parse and check the command line as settings of `kind`."""
    parser = Parser(description=f"{kind.__doc__} Words: docs/WORDS.md.", allow_abbrev=False)
    titles = dict.fromkeys(entry.metadata["group"] for entry in fields(kind))
    groups = {title: parser.add_argument_group(title) for title in titles}
    for entry in fields(kind):
        group = groups[entry.metadata["group"]]
        form = {"default": entry.default}
        if entry.type is bool:
            form["action"] = "store_true"
        else:
            form["type"] = value_type(entry)
            if "choices" not in entry.metadata["form"]:
                form["metavar"] = entry.name.split("_")[-1].upper()
        if entry.name == "prompt":
            group = group.add_mutually_exclusive_group()
            group.add_argument("prompt", nargs="*", default=argparse.SUPPRESS, metavar="TEXT",
                               help="the same as --prompt TEXT")
        group.add_argument("--" + entry.name.replace("_", "-"), **form | entry.metadata["form"])
    return kind(**vars(parser.parse_args(arguments)))


# ---- files ----

def read_prompts(settings: DecodingSettings) -> list[dict]:
    """Return the texts to continue, each the "prompt" of a dictionary: those of --prompt or
    tiny/prompt.txt, or those of --prompts with their other fields."""
    if settings.prompts is None:
        texts = settings.prompt or [(TINY / "prompt.txt").read_text("utf-8")]
        return [{"prompt": text} for text in texts]
    name = f"--prompts {settings.prompts}"
    if os.path.exists(settings.prompts) and not os.path.isfile(settings.prompts):
        raise UserError(f"{name}: every rank reads it, so it must be a regular file")
    rows = []
    for number, row in read_json_lines(name, settings.prompts):
        found = [row[key] for key in PROMPT_FIELDS if row.get(key) is not None] or [None]
        if not isinstance(found[0], str):
            other = f"only {', '.join(row)}" if found[0] is None else type(found[0]).__name__
            raise UserError(f"{name}, line {number}: no text in a field prompt, question or text, "
                            f"but {other}")
        rows.append(row | {"prompt": found[0]})
    if not rows:
        raise UserError(f"{name} holds no prompt")
    return rows


def open_for_writing(flag: str, path: str | None, mode="w", **others: str | None) -> TextIO:
    """Open a file, or without a path one that keeps nothing; with mode "a" it keeps what it holds.
    Raises `UserError`, naming `flag`, if that fails, if another run has opened it and is still at
    work, or if it would lose the file of one of the `others`, such as `prompts`."""
    with reported_as(f"{flag} {path!r}", (OSError, ValueError)):
        for name, other in others.items():
            if path and other and os.path.isfile(path) and os.path.samefile(path, other):
                raise ValueError(f"it is the file of --{name}")
        file = open(os.devnull if path is None else path, "a", encoding="utf-8")
        if os.path.isfile(file.name):  # not a pipe
            lock(file)
            if mode == "w":
                file.truncate(0)
        return file


def lock(file: TextIO) -> None:
    """Keep other runs from a file until it is closed. Raises ValueError if one has it."""
    try:
        if sys.platform == "win32":
            import msvcrt
            os.lseek(file.fileno(), 2 ** 30, os.SEEK_SET)  # a byte that nobody reads meanwhile
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise ValueError("another run is writing it") from None
    except OSError:
        pass  # this file system has no locks
