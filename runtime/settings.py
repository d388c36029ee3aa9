"""The command line, before anything heavy is imported: flags, prompts, and who starts the ranks.

torch and transformers take seconds to import, so a wrong flag, a missing file or --help is answered
from here, and the second rank is started before the first begins to import them.
"""
import argparse
import atexit
import gc
import json
import math
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tiny"  # the embedded pair
PROMPT_FIELDS = ("prompt", "question", "text")  # HumanEval's, GSM8K's, and others'
BACKUPS = ("neural", "fast", "random")  # methods of the draft worker: `neural_backup`, ...
FAN_OUTS = ("geometric", "uniform")  # functions of the cache: `geometric_fan_out`, ...


class UserError(Exception):
    """Something the user can mend; its text is one sentence that says how."""


def first_line(problem: Exception) -> str:
    """The first line of what a library says of it."""
    return (str(problem) or repr(problem)).splitlines()[0]


def option(default, help: str, least: float | None = None, most: float = math.inf, **form):
    """A field of `Settings`, and the command line option that sets it; of a number, its range."""
    shown = "none" if default in (None, ()) else default
    if default is False:
        shown = "off"
    form["help"] = f"{help} (default: {shown})"
    return field(default=default, metadata={"form": form, "least": least, "most": most})


@dataclass
class Settings:
    """Speculative speculative decoding: the draft prepares for the target's verdict while the
    target is still verifying."""
    GROUPS = {"prompt": "text", "target": "models", "temperature": "sampling",
              "budget": "section 4.1, the cache", "downweight": "section 4.2, Saguaro sampling",
              "backup": "section 4.3, fallback", "dtype": "machine"}  # by the first option of each
    LACKS = ()  # fields that are no options of this command

    prompt: tuple[str, ...] = option((), "texts to continue", nargs="+")
    prompts: str | None = option(None, "JSON Lines, each with a field prompt, question or text")
    max_new_tokens: int = option(128, "tokens to generate for each prompt, at most", least=1)
    batch_size: int = option(1, "prompts decoded together", least=1)
    ignore_eos: bool = option(False, "do not stop at an end-of-sequence token")
    apply_chat_template: bool = option(False, "make each prompt a user turn of the chat template")
    json: str | None = option(None, "write settings, texts and statistics to this file")
    target: str = option(str(TINY / "target"), "target model: a Hugging Face Hub id or a folder")
    draft: str = option(str(TINY / "draft"), "draft model with the target's vocabulary")
    mode: str = option("ssd", "speculative speculative, speculative or autoregressive decoding",
                       choices=("ssd", "sd", "ar"))
    lookahead: int = option(4, "K, tokens drafted per round", least=1)
    temperature: float = option(0.0, "0 is greedy", least=0, most=1e9)
    top_k: int = option(0, "sample among the K likeliest tokens; 0: among all", least=0)
    top_p: float = option(
        1.0, "sample among the likeliest tokens of total probability P", least=1e-9, most=1)
    seed: int = option(0, "same seed, flags and machine: same text", least=0, most=2 ** 63 - 2)
    no_public_noise: bool = option(
        False, "the paper's plain algorithm: bonus tokens are drawn with the target's own coins, "
        "not with noise that the draft knows")
    budget: int = option(
        12, "outcomes prepared for per round and row, the sum of the fan-out; 0: none, plain "
        "speculative decoding on the very same ranks", least=0)
    fan_out: str = option(
        "geometric", "shape of the cache: geometric (Theorem 12), uniform, or by hand, F_0,...,F_K "
        "such as 4,3,2,1,2, whose sum is then the budget (of all drafters)", metavar="SHAPE")
    drafters: int = option(
        1, "ranks that draft, the last ones, each for a budget of outcomes of its own", least=1,
        most=99)
    acceptance_rate: float = option(
        0.8, "first guess of a, the acceptance rate of drafted tokens", least=0, most=1)
    miss_exponent: float = option(
        1.0, "first guess of r of the power law of misses (Def. 11)", least=1e-9, most=1e9)
    downweight: float = option(
        1.0, "C (Def. 14); 1 is ordinary sampling", least=0, most=1, metavar="C")
    backup: str = option(
        "neural", "who drafts after a cache miss: the draft model, a look-up in the text so far, a "
        "random number generator, or auto: neural below Theorem 17's batch size, fast above",
        choices=(*BACKUPS, "auto"))
    no_early_outcome: bool = option(
        False, "the paper's plain algorithm: finish every speculation tree, even if its outcome is "
        "there and a miss")
    dtype: str = option("auto", "auto: bfloat16 on GPUs, float32 on CPUs",
                        choices=("auto", "float32", "bfloat16", "float16", "float64"))
    device: str = option("auto", "auto: GPUs if there are any", choices=("auto", "cpu", "cuda"))
    eager: bool = option(False, "on a GPU: launch every kernel from Python, replay no CUDA graphs")

    def check(self) -> None:
        """Raise `UserError` for the first value that makes no sense; fix what follows from
        others."""
        self.check_numbers()
        if self.prompt and self.prompts is not None:
            raise UserError("--prompt and --prompts exclude each other")
        if self.fan_out not in FAN_OUTS:
            shape = self.fan_out.split(",")
            if len(shape) != self.lookahead + 1 or not all(F.isdecimal() for F in shape):
                raise UserError(f"--fan-out {self.fan_out}: neither {' nor '.join(FAN_OUTS)} nor "
                                f"{self.lookahead + 1} numbers, F_0,...,F_K for K = --lookahead")
            self.budget, rest = divmod(sum(map(int, shape)), self.drafters)
            if rest:
                raise UserError(f"--fan-out {self.fan_out}: {self.drafters} drafters cannot share "
                                "its sum evenly")
        if self.drafters > 1 and self.mode != "ssd":
            raise UserError(f"--drafters {self.drafters}: only ssd has work for more than one")
        if self.json is not None:
            check_writable("--json", self.json)

    def check_numbers(self) -> None:
        for f in fields(self):
            value, least, most = getattr(self, f.name), f.metadata["least"], f.metadata["most"]
            if least is not None and not least <= value <= most:
                allowed = f"at least {least}" + f" and at most {most}" * (most < math.inf)
                raise UserError(f"--{f.name.replace('_', '-')} is {value}; it must be {allowed}")
        if 0 < self.temperature < 1e-6:
            raise UserError(f"--temperature is {self.temperature}; it must be 0 or at least 1e-6")
        if self.lookahead > max(16, self.max_new_tokens):
            raise UserError(f"--lookahead {self.lookahead}: no text has room for so many tokens a "
                            f"round; --max-new-tokens is {self.max_new_tokens}")


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(message)


def parse(kind: type[Settings], arguments: list[str] | None = None) -> Settings:
    """The command line as `kind`, checked; its docstring is what --help begins with."""
    parser = group = Parser(description=kind.__doc__, allow_abbrev=False)
    for f in fields(kind):
        if f.name in kind.GROUPS:
            group = parser.add_argument_group(kind.GROUPS[f.name])
        if f.name in kind.LACKS:
            continue
        given = f.metadata["form"]
        if f.type is bool:
            form = {"action": "store_true"}
        else:
            form = {"type": f.type if f.type in (int, float) else str}
            if "choices" not in given:
                form["metavar"] = f.name.split("_")[-1].upper()
        group.add_argument("--" + f.name.replace("_", "-"), default=f.default, **form | given)
    settings = kind(**vars(parser.parse_args(arguments)))
    settings.check()
    return settings


def read_prompts(settings: Settings) -> list[str]:
    """The texts to continue: --prompt, the lines of --prompts, or the first embedded prompt."""
    if settings.prompt:
        texts = list(settings.prompt)
    elif settings.prompts is not None:
        texts = read_json_lines(settings.prompts)
    else:
        texts = read_json_lines(str(TINY / "prompts.jsonl"))[:1]
    for number, text in enumerate(texts, start=1):
        if not text:
            raise UserError(f"prompt {number} of {len(texts)} is empty")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(f"prompt {number} of {len(texts)} holds half a character (a lone "
                            "surrogate), which no tokenizer can read")
    if not texts:
        raise UserError(f"--prompts {settings.prompts} holds no prompt")
    return texts


def read_json_lines(path: str) -> list[str]:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("not a file that every rank can read for itself")
        lines = Path(path).read_text("utf-8-sig").split("\n")  # U+2028 is no end
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise UserError(f"--prompts {path or repr(path)}: {reason}") from problem
    texts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            texts.append(next(row[name] for name in PROMPT_FIELDS
                              if isinstance(row.get(name), str)))
        except (ValueError, AttributeError, StopIteration):
            raise UserError(f"--prompts {path}, line {number}: not a JSON object with a text in a "
                            "field prompt, question or text") from None
    return texts


def check_writable(flag: str, path: str) -> None:
    """Refuse what `write_json` could not write."""
    file = Path(path)
    if not path or file.exists() and not file.is_file() or not file.resolve().parent.is_dir():
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


# ---- processes ----

interrupted = threading.Event()  # Ctrl-C
decoding = threading.Event()     # until then Ctrl-C simply ends the process


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def begin(kind: type[Settings]) -> Settings:
    """The settings of this run, before anything heavy is imported. torchrun starts all ranks;
    `python saguaro.py` is rank 0, and starts the drafters' ranks itself."""
    gc.set_threshold(100_000)  # imports make many objects, no garbage: searching them took 0.6 s
    heed_ctrl_c()
    launched = "RANK" in os.environ  # by torchrun, or by another rank
    try:
        settings = parse(kind)
        read_prompts(settings)
    except UserError as problem:
        complain(problem, speaks=os.environ.get("LOCAL_RANK", "0") == "0")
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if launched:
        threading.Thread(target=follow_the_launcher, args=(os.getppid(),), daemon=True).start()
    if alone and settings.mode == "ssd":
        launch_drafters(settings.drafters)
    if rank() == 0 and sys.stderr.isatty():
        print("loading ...", file=sys.stderr, flush=True)
    return settings


def heed_ctrl_c() -> None:
    """Decoding ends at the next round; before it, and at a second Ctrl-C, everything ends at once.
    A thread sees to that: the main one may be waiting for a rank that has stopped."""
    keys, pressed = socket.socketpair()
    pressed.setblocking(False)
    signal.set_wakeup_fd(pressed.detach())
    signal.signal(signal.SIGINT, lambda *_: None)

    def wait() -> None:
        before = math.inf
        while keys.recv(1):
            if not decoding.is_set() or time.monotonic() > before + 1:
                os._exit(130)  # not at once: torchrun passes on what the terminal has sent already
            interrupted.set()
            before = min(before, time.monotonic())

    threading.Thread(target=wait, daemon=True).start()


def launch_drafters(count: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = str(1 + count)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": world,
                   "LOCAL_WORLD_SIZE": world}
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # of a torchrun with one process
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each rank sets its own number of threads
    for number in range(count, -1, -1):  # 0 is this process
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
        if number:
            child = subprocess.Popen([sys.executable, *sys.orig_argv[1:]])
            threading.Thread(target=end_with, args=(child,), daemon=True).start()
            atexit.register(child.kill)


def end_with(child: subprocess.Popen) -> None:
    """The draft's end is this rank's end, too, even where it waits for nothing from the draft."""
    status = child.wait()
    if status:
        time.sleep(2)  # this rank may find out by itself, and say so
        if status != 2:  # then the draft's rank has said why
            print(f"{Path(sys.argv[0]).name}: a draft's rank has ended with status {status}",
                  file=sys.stderr, flush=True)
        os._exit(2 if status == 2 else 1)


def follow_the_launcher(parent: int) -> None:
    """A rank ends soon after torchrun, or whoever started it, has been killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def complain(problem: UserError, speaks: bool) -> None:
    """One sentence, exit status 2. Where several ranks find the same fault, one says so and the
    others leave it the time."""
    if speaks:
        print(f"{Path(sys.argv[0]).name}: error: {problem}", file=sys.stderr, flush=True)
    else:
        time.sleep(3)
    sys.exit(2)
