"""Speculative speculative decoding (SSD), Algorithm 1: the command, the ranks, and what they say to each other.

    torchrun --nproc-per-node 2 saguaro.py --help

Rank 0 holds the target and decodes; rank 1 holds the draft and answers. Both parse the same command line and read
the same prompts, so only data travels, in a fixed order and in messages of known size:

    target -> draft     outcome      [B, 2]     number accepted (negative: row finished) and bonus token
    draft  -> target    speculation  [B, 1+K]   hit flag and drafted tokens, then, if sampling, q [B, K, V]

    rank 0:  prefill | send v0 |          recv s1 | verify s1 | send v1 |         recv s2 | verify s2 | ...
    rank 1:  prefill, pre-speculate | recv v0, send s1 | pre-speculate | recv v1, send s2 | pre-speculate ...

Of more than two ranks the last one drafts, and the others hold the target together (tensor-parallel): they decode what
rank 0 decodes, from the speculation that it receives and by the verdict that it gives, and say nothing.
"""
import argparse
import json
import logging
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
import torch.distributed.run
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TextStreamer

from cache import Costs, FanOut, Outcome, Speculation, best_lookahead
from draft_worker import Backup, Downweight, DraftWorker
from model import CausalLM, UserError, context_length, load, load_sharded, parallel_plan
from sampling import logits_warpers
from target_worker import Generation, NoSpeculator, Speculator, Stats, TargetWorker, decode

TINY = Path(__file__).resolve().parent / "tiny"  # the embedded pair
TARGET, DRAFT = 0, max(1, int(os.environ.get("WORLD_SIZE", 1)) - 1)  # ranks; any between are target ranks, too
SMALL_DRAFT = 50_000_000  # parameters; with one GPU such a draft runs on the CPU
WEIGHTS = 0.8  # the share of several GPUs' free memory that a target's weights may fill: the rest is for the KV
MEASURED = (1, 2, 4, 8, 16, 32)  # tokens a row, in the passes that "auto" settings time at start-up
FAST_ACCEPTANCE = 0.2  # first guess of the acceptance rate of looked-up tokens
PROMPT_FIELDS = ("prompt", "question", "text")  # HumanEval's, GSM8K's, and others'
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def number_or_auto(kind: type):
    """Command line type: "auto" or a number of type `kind`."""
    def parse(text: str):
        return text if text == "auto" else kind(text)
    parse.__name__ = f"{kind.__name__} or auto"
    return parse


def option(default, help: str, **extra):
    """A field of `Settings`, and the command line option that sets it."""
    extra |= {"help": help + ("" if default in (None, False, ()) else " (default: %(default)s)")}
    return field(default=default, metadata=extra)


@dataclass
class Settings:
    """Speculative speculative decoding: the draft prepares for the target's verdict while the target is still
    verifying."""
    prompt: tuple[str, ...] = option((), "texts to continue", nargs="+", metavar="TEXT")
    prompts: str | None = option(None, "JSON Lines with a field prompt, question or text in each line", metavar="FILE")
    target: str = option(str(TINY / "target"), "target model: a Hugging Face Hub id or a folder", metavar="MODEL")
    draft: str = option(str(TINY / "draft"), "draft model with the target's vocabulary", metavar="MODEL")
    mode: str = option("ssd", "speculative speculative, speculative or autoregressive decoding",
                       choices=("ssd", "sd", "ar"))
    max_new_tokens: int = option(128, "tokens to generate for each prompt, at most", metavar="N")
    batch_size: int = option(1, "prompts decoded together", metavar="N")
    temperature: float = option(0.0, "0 is greedy", metavar="T")
    top_k: int = option(0, "sample among the N likeliest tokens; 0: among all", metavar="N")
    top_p: float = option(1.0, "sample among the likeliest tokens of total probability P", metavar="P")
    seed: int = option(0, "same seed, same flags: same text", metavar="N")
    ignore_eos: bool = option(False, "do not stop at an end-of-sequence token")
    apply_chat_template: bool = option(False, "make each prompt a user turn of the tokenizer's chat template")
    lookahead: int | str = option(4, "K, tokens drafted per round, or auto*", type=number_or_auto(int), metavar="K")
    budget: int | str = option(12, "outcomes prepared for per round and row, the sum of the fan-out, or auto*",
                               type=number_or_auto(int), metavar="N")
    fan_out: str = option("auto", "shape of the cache: Theorem 12's with a and r as given (geometric) or estimated on "
                          "the way (auto), or uniform", choices=("auto", "geometric", "uniform"))
    acceptance_rate: float = option(0.8, "a, the acceptance rate of the draft's tokens: given, or first guess",
                                    metavar="A")
    miss_exponent: float = option(1.0, "r of the power law of misses (Def. 11): given, or first guess", metavar="R")
    downweight: float | str = option(1.0, "C of Saguaro sampling (Def. 14), or auto*; 1 is ordinary sampling",
                                     type=number_or_auto(float), metavar="C")
    backup: str = option("neural", "who drafts after a cache miss: the draft model, a look-up in the text so far, or "
                         "auto*", choices=("neural", "fast", "auto"))
    no_early_outcome: bool = option(False, "the paper's plain algorithm: finish every speculation tree, even if the "
                                    "outcome is there")
    dtype: str = option("auto", "auto: bfloat16 on GPUs, float32 on CPU", choices=("auto", *DTYPES))
    device: str = option("auto", "auto: GPUs if there are any", choices=("auto", "cpu", "cuda"))
    eager: bool = option(False, "on a GPU: launch every kernel from Python instead of replaying CUDA graphs")
    compile: bool = option(False, "let torch.compile fuse the kernels of both models, which takes minutes at the start")
    json: str | None = option(None, "write settings, texts and statistics to FILE", metavar="FILE")

    def check(self) -> None:
        """Raise `UserError` for the first value that makes no sense."""
        for name, valid, wanted in (
                ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
                ("batch_size", self.batch_size >= 1, "at least 1"),
                ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
                ("top_k", self.top_k >= 0, "0 (off) or more"), ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
                ("seed", 0 <= self.seed < 2 ** 63 - 1, "a whole number from 0 to 2^63"),
                ("lookahead", self.lookahead == "auto" or self.lookahead >= 1,
                 "auto or at least 1 (--mode ar drafts nothing)"),
                ("budget", self.budget == "auto" or self.budget >= 1, "auto or at least 1"),
                ("acceptance_rate", 0 <= self.acceptance_rate <= 1, "between 0 and 1"),
                ("miss_exponent", 0 < self.miss_exponent < float("inf"), "above 0"),
                ("downweight", self.downweight == "auto" or 0 <= self.downweight <= 1, "auto or between 0 and 1")):
            if not valid:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be {wanted}")
        if self.prompt and self.prompts:
            raise UserError("--prompt and --prompts exclude each other")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: PyTorch sees no CUDA device here")
        if self.json and (Path(self.json).is_dir() or not Path(self.json).resolve().parent.is_dir()):
            raise UserError(f"--json {self.json}: not a file in an existing folder")


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(message)


def parse_settings(arguments: list[str] | None = None, kind: type[Settings] = Settings) -> Settings:
    """The command line as `kind`; its docstring is what --help begins with."""
    parser = Parser(description=kind.__doc__, allow_abbrev=False,
                    epilog="* Chosen by times measured at start-up: sampled text can then differ from machine to "
                           "machine and from run to run; greedy text never does.")
    for f in fields(kind):
        if f.metadata:  # else it is no option
            form = {"action": "store_true"} if f.type is bool else {"type": f.type if f.type in (int, float) else str}
            parser.add_argument("--" + f.name.replace("_", "-"), default=f.default, **form | f.metadata)
    settings = kind(**vars(parser.parse_args(arguments)))
    settings.check()
    return settings


def read_prompts(settings: Settings) -> list[str]:
    """The texts to continue: --prompt, the lines of --prompts, or the first embedded prompt."""
    if settings.prompt:
        texts = list(settings.prompt)
    elif settings.prompts:
        texts = list(read_json_lines(Path(settings.prompts)))
    else:
        texts = list(read_json_lines(TINY / "prompts.jsonl"))[:1]
    for number, text in enumerate(texts, start=1):
        if not text:
            raise UserError(f"prompt {number} of {len(texts)} is empty")
    if not texts:
        raise UserError(f"--prompts {settings.prompts} holds no prompt")
    return texts


def read_json_lines(path: Path) -> Iterator[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"--prompts {path}: {getattr(problem, 'strerror', None) or problem}") from problem
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield next(row[name] for name in PROMPT_FIELDS if isinstance(row.get(name), str))
        except (ValueError, AttributeError, StopIteration):
            raise UserError(f"--prompts {path}, line {number}: not a JSON object with a text in the field "
                            f"{', '.join(PROMPT_FIELDS[:-1])} or {PROMPT_FIELDS[-1]}") from None


def open_model(flag: str, path: str):
    """The configuration and tokenizer of a checkpoint; nothing big is read."""
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1  # no Hub id does
    if looks_local and not Path(path).is_dir():
        raise UserError(f"{flag} {path}: no such folder")
    try:
        return AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as problem:
        raise UserError(f"{flag} {path}: neither a folder with a model and its tokenizer nor a model on the Hugging "
                        f"Face Hub ({str(problem).splitlines()[0]})") from problem


def encode(tokenizer, texts: list[str], chat: bool, context: int) -> list[list[int]]:
    """The prompts as token ids, each with room for at least one more token."""
    if chat and not tokenizer.chat_template:
        raise UserError("--apply-chat-template: this model's tokenizer has no chat template")
    if chat:
        prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True,
                                                 tokenize=True, return_dict=True)["input_ids"] for text in texts]
    else:
        prompts = tokenizer(texts)["input_ids"]
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt) >= context:
            raise UserError(f"prompt {number} of {len(prompts)} has {len(prompt)} tokens, and the target's context is "
                            f"{context}")
    return prompts


class Wire:
    """What the ranks say to each other. Outcomes are needed by Python on all sides, so they travel between host
    memories; speculations are data and travel from device to device."""

    def __init__(self, device: torch.device, lookahead: int, vocab_size: int, q_dtype: torch.dtype | None,
                 targets: dist.ProcessGroup | None = None):
        """`device`: where speculations are sent from and received: a GPU if both ranks have one of their own, else
        the CPU. `q_dtype`: None if greedy, when no q is sent. `targets`: the target ranks, if they are several."""
        self.device, self.lookahead, self.vocab_size, self.q_dtype = device, lookahead, vocab_size, q_dtype
        self.targets = targets

    def send_outcome(self, outcome: Outcome) -> None:
        dist.send(torch.stack(outcome, 1), DRAFT)

    def receive_outcome(self, rows: int) -> Outcome:
        message = torch.empty(rows, 2, dtype=torch.long)
        dist.recv(message, TARGET)
        return Outcome(*message.unbind(1))

    def send_speculation(self, speculation: Speculation) -> None:
        hit = speculation.hit.to(speculation.tokens.device)[:, None]
        dist.send(torch.cat([hit, speculation.tokens], 1).to(self.device), TARGET)
        if self.q_dtype:
            dist.send(speculation.q.to(self.device).contiguous(), TARGET)

    def receive_speculation(self, rows: int) -> Speculation:
        message = torch.empty(rows, 1 + self.lookahead, dtype=torch.long, device=self.device)
        dist.recv(message, DRAFT)
        self.share(message)
        q = None
        if self.q_dtype:
            q = torch.empty(rows, self.lookahead, self.vocab_size, dtype=self.q_dtype, device=self.device)
            dist.recv(q, DRAFT)
        return Speculation(message[:, 1:], q, message[:, 0].cpu().bool())

    def overhear_speculation(self, rows: int) -> Speculation:
        """What rank 0 receives, on the other target ranks; without q, which only its verdict needs."""
        message = self.share(torch.empty(rows, 1 + self.lookahead, dtype=torch.long, device=self.device))
        return Speculation(message[:, 1:], None, message[:, 0].cpu().bool())

    def share(self, message: torch.Tensor) -> torch.Tensor:
        """Make `message` on all target ranks what it is on rank 0."""
        if self.targets is not None:
            dist.broadcast(message, TARGET, group=self.targets)
        return message

    def send_report(self, report: dict[str, Any]) -> None:
        dist.send_object_list([report], TARGET, device=torch.device("cpu"))

    def receive_report(self) -> dict[str, Any]:
        report = [None]
        dist.recv_object_list(report, DRAFT, device=torch.device("cpu"))
        return report[0]


class RemoteSpeculator:
    """The draft's process, as the target sees it."""

    def __init__(self, wire: Wire):
        self.wire = wire

    def start(self, prompts: list[list[int]], longest: int) -> None:
        pass  # the draft rank has read the same prompts

    def speculate(self, outcome: Outcome) -> Speculation:
        self.wire.send_outcome(outcome)
        rows = int((outcome.num_accepted >= 0).sum())
        return self.wire.receive_speculation(rows) if rows else Speculation.empty(0)

    def report(self) -> dict[str, Any]:
        return self.wire.receive_report()


class OverheardSpeculator:
    """The draft's process, as the target ranks other than 0 see it."""

    def __init__(self, wire: Wire):
        self.wire = wire

    def start(self, prompts: list[list[int]], longest: int) -> None:
        pass

    def speculate(self, outcome: Outcome) -> Speculation:
        rows = int((outcome.num_accepted >= 0).sum())
        return self.wire.overhear_speculation(rows) if rows else Speculation.empty(0)

    def report(self) -> dict[str, Any]:
        return {"times": {}, "learnt": {}}


class TargetShard(TargetWorker):
    """The target worker on one of several target ranks. Every pass is computed by all of them together, and judged by
    rank 0 for all: rounding, and a q that the others have not, can never part them."""

    def __init__(self, model: CausalLM, warpers: list | None, seed: int, wire: Wire):
        super().__init__(model, warpers, seed)
        self.wire = wire

    def verify(self, speculation: Speculation) -> Outcome:
        length, own = self.length, super().verify(speculation)
        outcome = Outcome(*self.wire.share(torch.stack(own, 1)).unbind(1))
        self.length, self.last = length + outcome.num_accepted + 1, outcome.bonus[:, None].to(self.model.device)
        return outcome


def serve(draft: DraftWorker, wire: Wire, prompts: list[list[int]], longest: int, early_outcome: bool) -> None:
    """The speculator's side of Algorithm 1 for one batch. A thread waits for the outcome, so that the tree can look
    for it between its steps."""
    draft.start(prompts, longest)
    rows = len(prompts)
    with ThreadPoolExecutor(1) as listener:
        while rows:
            pending = listener.submit(wire.receive_outcome, rows)
            draft.pre_speculate(lambda: pending.result() if early_outcome and pending.done() else None)
            speculation = draft.speculate(pending.result())
            rows = len(speculation.hit)
            if rows:
                wire.send_speculation(speculation)
    wire.send_report(draft.report())


class Run:
    """What all ranks know of a run: settings, prompts, devices, and, once measured, lookahead and budget."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.texts = read_prompts(settings)
        self.target_config, self.tokenizer = open_model("--target", settings.target)
        self.context = context_length(self.target_config)
        self.vocab_size = self.target_config.get_text_config().vocab_size
        self.prompts = encode(self.tokenizer, self.texts, settings.apply_chat_template, self.context)
        self.warpers = logits_warpers(settings.temperature, settings.top_k, settings.top_p)
        if settings.mode != "ar":
            self.draft_config, draft_tokenizer = open_model("--draft", settings.draft)
            if draft_tokenizer.get_vocab() != self.tokenizer.get_vocab():
                raise UserError(f"--target {settings.target} and --draft {settings.draft} have different vocabularies; "
                                "a draft must propose the target's tokens")
        self.shards = DRAFT if settings.mode == "ssd" else 1  # ranks that hold the target together
        self.plan = parallel_plan(self.target_config, self.shards) if self.shards > 1 else None
        if self.plan and settings.compile:
            raise UserError("--compile does not know a target that is shared by several ranks; start two ranks")
        self.place()

    def place(self) -> None:
        """Decide devices: GPUs if there are any, target and draft apart if there are two; each rank's own if the target
        is sharded or the ranks are on different machines."""
        gpus = torch.cuda.device_count() if self.settings.device != "cpu" else 0
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.target_device = self.draft_device = torch.device("cuda:0" if gpus else "cpu")
        self.apart = False  # do target and draft talk from GPU to GPU?
        self.target_gpus = range(gpus - 1)
        if self.settings.mode == "ssd" and gpus and (self.shards > 1 or ranks_here == 1):
            if ranks_here > gpus:
                raise UserError(f"{ranks_here} ranks were started on a machine with {gpus} GPUs; with more than two "
                                "ranks, each needs a GPU, or --device cpu")
            self.target_device = self.draft_device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            self.apart, self.target_gpus = True, range(gpus)
        elif self.settings.mode == "ssd" and gpus == 1:
            with torch.device("meta"):
                small = AutoModelForCausalLM.from_config(self.draft_config).num_parameters() <= SMALL_DRAFT
            if small:
                self.draft_device = torch.device("cpu")
            elif own_rank() == TARGET:
                print("one GPU for both models: drafting and verifying will not overlap", file=sys.stderr)
        elif self.settings.mode == "ssd" and gpus:
            self.draft_device = torch.device("cuda", gpus - 1)
            self.apart = True

    def dtype(self, device: torch.device) -> torch.dtype:
        """What the models on that device compute in: --dtype, or by default what suits it."""
        return DTYPES.get(self.settings.dtype, torch.bfloat16 if device.type == "cuda" else torch.float32)

    def join(self) -> None:
        """Meet the other ranks. Tensors on GPUs travel over NCCL, tensors in host memory over gloo."""
        own = self.draft_device if own_rank() == DRAFT else self.target_device
        self.wire_device = own if self.apart else torch.device("cpu")
        if self.apart:
            torch.cuda.set_device(own)
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.apart else "gloo", timeout=timedelta(minutes=10),
                                device_id=own if self.apart else None)
        self.targets = dist.new_group(list(range(DRAFT))) if self.shards > 1 else None  # made by all ranks

    def load_target(self) -> CausalLM:
        """Sharded over the target ranks; by one rank, on one device if it fits, else filling one GPU after the other up
        to the draft's."""
        dtype = self.dtype(self.target_device)
        if self.shards > 1:
            mesh = DeviceMesh.from_group(self.targets, self.target_device.type)
            return load_sharded(self.settings.target, self.target_config, dtype, self.plan, mesh)
        room = {gpu: int(WEIGHTS * torch.cuda.mem_get_info(gpu)[0]) for gpu in self.target_gpus}
        device, room = ("sequential", room) if len(room) > 1 else (self.target_device, None)
        return self.speed_up(load(self.settings.target, self.target_config, dtype, device, max_memory=room))

    def load_draft(self, device: torch.device) -> CausalLM:
        return self.speed_up(load(self.settings.draft, self.draft_config, self.dtype(device), device, self.vocab_size))

    def speed_up(self, model: CausalLM) -> CausalLM:
        return model.speed_up(graphs=not self.settings.eager, compiled=self.settings.compile)

    def tune(self, target: CausalLM | None, draft: CausalLM | None) -> None:
        """Fix lookahead and budget; where something is "auto", after measuring the models. A rank has only its own
        model: what it measures it tells the others."""
        s = self.settings
        self.lookahead, self.budget = s.lookahead, s.budget
        self.times = {"T_p": 1.0, "T_b": 0.5}
        if "auto" not in (s.lookahead, s.budget, s.downweight, s.backup):
            return
        rows = min(s.batch_size, len(self.prompts))
        length = min(max(map(len, self.prompts)) + s.max_new_tokens // 2, self.context - max(MEASURED))
        if own_rank() == TARGET:
            print("measuring both models ...", end=" ", file=sys.stderr, flush=True)
        costs = [model and {n: model.seconds_per_pass(rows, n, length) for n in MEASURED} for model in (target, draft)]
        if s.mode == "ssd":
            told = [None] * dist.get_world_size()
            dist.all_gather_object(told, costs[own_rank() == DRAFT])
            costs = told[TARGET], told[DRAFT]
        costs = Costs(*costs)
        lookaheads = range(1, 9) if s.lookahead == "auto" else [s.lookahead]
        budgets = (4, 8, 12, 16, 24, 32) if s.budget == "auto" else [s.budget]
        self.lookahead, self.budget = best_lookahead(costs, lookaheads, budgets, s.acceptance_rate, s.miss_exponent,
                                                     rows)
        self.times = {"T_p": costs.T_p(self.lookahead, self.budget), "T_b": costs.T_b(self.lookahead)}
        if own_rank() == TARGET:
            print(f"lookahead {self.lookahead}, budget {self.budget}: one verification takes "
                  f"{1000 * costs.verify(self.lookahead):.1f} ms, T_p {self.times['T_p']:.2f}, "
                  f"T_b {self.times['T_b']:.2f}", file=sys.stderr)

    def draft_worker(self, model: CausalLM) -> DraftWorker:
        s = self.settings
        fast_rate = s.acceptance_rate if s.backup == "neural" else FAST_ACCEPTANCE
        fan_out = FanOut(s.fan_out, self.budget, self.lookahead, s.acceptance_rate, fast_rate, s.miss_exponent)
        auto_downweight = s.downweight == "auto" and self.warpers is not None
        C = 1.0 if s.downweight == "auto" else s.downweight
        downweight = Downweight(None if auto_downweight else C, **self.times)
        backup = Backup(s.backup, self.lookahead, s.acceptance_rate, FAST_ACCEPTANCE, self.times["T_p"],
                        self.times["T_b"])
        return DraftWorker(model, self.warpers, s.seed + 1, self.lookahead, fan_out, downweight, backup)

    def wire(self) -> Wire:
        q_dtype = None if self.warpers is None else torch.float64 if self.settings.dtype == "float64" else torch.float32
        return Wire(self.wire_device, self.lookahead, self.vocab_size, q_dtype, self.targets)

    def batches(self) -> Iterator[list[list[int]]]:
        size = self.settings.batch_size
        return (self.prompts[start:start + size] for start in range(0, len(self.prompts), size))


def own_rank() -> int:
    return int(os.environ.get("RANK", 0))


def run_target(run: Run) -> None:
    """Rank 0: decode all prompts, show what comes out, write --json."""
    s = run.settings
    target = run.load_target()
    draft = run.load_draft(run.draft_device) if s.mode == "sd" else None
    speculator: Speculator = NoSpeculator()
    lookahead = 0
    if s.mode != "ar":
        run.tune(target, draft)
        lookahead = run.lookahead
        speculator = run.draft_worker(draft) if draft else RemoteSpeculator(run.wire())
    worker = (TargetShard(target, run.warpers, s.seed, run.wire()) if run.shards > 1 else
              TargetWorker(target, run.warpers, s.seed))
    eos = [] if s.ignore_eos else target.eos_tokens
    stats, generations = Stats(), []
    display = Display(run)
    for batch in run.batches():
        generations += decode(worker, speculator, batch, s.max_new_tokens, lookahead, eos, stats, display.show)
    summary = stats.summary(lookahead)
    display.finish(generations, summary)
    if s.json:
        outputs = [{"prompt": text, "text": run.tokenizer.decode(g.tokens, skip_special_tokens=True),
                    "tokens": g.tokens, "finish_reason": g.finish_reason} for text, g in zip(run.texts, generations)]
        result = {"config": asdict(s), "outputs": outputs, "stats": summary}
        Path(s.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def run_shard(run: Run) -> None:
    """The other target ranks: decode with rank 0."""
    s = run.settings
    target = run.load_target()
    run.tune(target, None)
    worker, speculator = TargetShard(target, run.warpers, s.seed, run.wire()), OverheardSpeculator(run.wire())
    for batch in run.batches():
        decode(worker, speculator, batch, s.max_new_tokens, run.lookahead, [] if s.ignore_eos else target.eos_tokens,
               Stats())


def run_draft(run: Run) -> None:
    """The last rank: draft for every batch that rank 0 decodes."""
    model = run.load_draft(run.draft_device)
    run.tune(None, model)
    draft, wire = run.draft_worker(model), run.wire()
    for batch in run.batches():
        longest = max(min(len(prompt) + run.settings.max_new_tokens, run.context) for prompt in batch)
        serve(draft, wire, batch, longest, not run.settings.no_early_outcome)


REPORT = (
    ("tokens_per_second", "tokens per second", ".1f", "decoding only, prefill apart"),
    ("tokens_per_round", "tokens per round", ".2f", "of a row: accepted tokens and the bonus token"),
    ("acceptance_rate", "acceptance rate", ".2f", "of drafted tokens, judged one by one"),
    ("hit_rate", "cache hit rate", ".2f", "outcomes found in the speculation cache"),
    ("verifier_utilisation", "verifier utilisation", ".2f", "time spent verifying / wall time"),
    ("T_p", "T_p", ".2f", "one pre-speculation, in verifications: hidden while below 1"),
    ("T_b", "T_b", ".2f", "one backup speculation, in verifications"),
)


class Display:
    """Rank 0's screen: one prompt is streamed as it is verified; of several, a progress bar, then the texts."""

    def __init__(self, run: Run):
        self.tokenizer, self.texts, self.settings = run.tokenizer, run.texts, run.settings
        self.bar = self.streamer = None
        if len(self.texts) > 1:
            self.bar = tqdm(total=len(self.texts) * self.settings.max_new_tokens, unit="token")
        else:
            print(self.texts[0], end="", flush=True)
            self.streamer = TextStreamer(self.tokenizer, skip_special_tokens=True)

    def show(self, index: int, new: list[int]) -> None:
        """New tokens of prompt `index`, just verified."""
        if self.bar is not None:
            self.bar.update(len(new))
        else:
            self.streamer.put(torch.tensor(new))

    def finish(self, generations: list[Generation], summary: dict[str, Any]) -> None:
        """The rest of the texts, and the summary."""
        if self.bar is None:
            self.streamer.end()
        else:
            self.bar.close()
            for number, (text, generation) in enumerate(zip(self.texts, generations), start=1):
                continuation = self.tokenizer.decode(generation.tokens, skip_special_tokens=True)
                print(f"\n----- prompt {number} -----\n{text}{continuation}")
        full = sum(generation.finish_reason == "context" for generation in generations)
        if full:
            print(f"\n{full} of {len(generations)} texts ended at the target's context limit")
        print(f"\n{summary['tokens']} tokens with {self.settings.mode}:")
        for name, title, form, meaning in REPORT:
            if summary[name] is not None:
                print(f"  {title:21}{summary[name]:7{form}}   {meaning}")
        if self.settings.mode == "ssd":
            self.tell_choices(summary)
        if self.settings.downweight != 1 and self.settings.temperature == 0:
            print("  --downweight has no effect on greedy decoding")

    def tell_choices(self, summary: dict[str, Any]) -> None:
        """What the draft settled on (section 4)."""
        print("  fan-out              {fan_out} after a hit, {fan_out_after_backup} after a backup, for\n"
              "                       a = {acceptance_rate_primary:.2f} and {acceptance_rate_backup:.2f}, "
              "r = {miss_exponent:.2f}; C = {downweight}, {backup} backup".format(**summary))
        state = "off" if self.settings.no_early_outcome else "on"
        print(f"  early outcome        {state:>7}   a missed outcome ends pre-speculation; an addition to the paper")
        if self.settings.backup == "auto":
            b = summary["critical_batch_size"]
            print("  critical batch size ", "none: neural is better at every size" if b is None else f"{b:7.1f}")
        if (summary["T_p"] or 0) > 1:
            print("  T_p is above 1: the target waits for the draft; a smaller --lookahead or --budget may be faster")


@record
def main() -> None:
    start(parse_settings, Run, {TARGET: run_target, DRAFT: run_draft}.get(own_rank(), run_shard))


def start(parse: Callable[[], Settings], kind: type[Run], work: Callable[[Run], None]) -> None:
    """Do the work in as many ranks as the settings ask for; launch them first, if nobody has."""
    rank, world = own_rank(), int(os.environ.get("WORLD_SIZE", 1))
    try:
        settings = parse()
        ranks = max(2, world) if settings.mode == "ssd" else 1
        if world < ranks:
            read_prompts(settings)  # what is wrong with them is better said before two processes start
            sys.exit(launch(ranks))
        if rank >= ranks:
            return  # only ssd needs more than one process
        run = kind(settings)
    except UserError as problem:
        complain(problem, speaks=os.environ.get("LOCAL_RANK", "0") == "0")  # all ranks find the same fault
    try:
        torch.set_num_threads(threads(settings.mode, rank))
        if settings.mode == "ssd":
            run.join()
        work(run)
    except torch.OutOfMemoryError as problem:
        reason = ". ".join(str(problem).split(". ")[:2])
        complain(UserError(f"rank {rank} ({role(rank)}) lacks GPU memory ({reason}): a smaller --batch-size or "
                           "--max-new-tokens may help, or more target ranks"), speaks=True)
    except (UserError, RuntimeError, dist.DistBackendError) as problem:
        if "Connection closed by peer" in str(problem) or "reset by peer" in str(problem):
            sys.exit(f"rank {rank} ({role(rank)}) stops: another rank is gone")
        if not isinstance(problem, UserError):
            raise
        complain(problem, speaks=rank in (TARGET, DRAFT))  # all target ranks find the same fault
    if dist.is_initialized():
        dist.destroy_process_group()


def role(rank: int) -> str:
    return "draft" if rank == DRAFT else "target"


def complain(problem: UserError, speaks: bool) -> None:
    """One sentence, exit status 2. Where several ranks find the same fault, one says so and the others leave it the
    time."""
    if speaks:
        print(f"{Path(sys.argv[0]).name}: error: {problem}", file=sys.stderr, flush=True)
    else:
        time.sleep(3)
    sys.exit(2)


def threads(mode: str, rank: int) -> int:
    """CPU threads of a rank: the draft has one, the target ranks share the rest; a process that is alone has all."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    target_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", 2)) - 1)  # of this machine
    return cpus if mode != "ssd" else 1 if rank == DRAFT else max(1, (cpus - 1) // target_ranks)


def launch(ranks: int) -> int:
    """`python saguaro.py`, `python bench.py` and a torchrun of one process: start the ranks through torch's own
    launcher; returns the exit status."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each rank sets its own number of threads
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torch.distributed.run.main(["--standalone", "--nproc-per-node", str(ranks), *sys.argv])
    except ChildFailedError as failure:
        rank, cause = failure.get_first_failure()
        if cause.exitcode != 2:  # 2: the rank has said what was wrong
            print(f"{Path(sys.argv[0]).name}: rank {rank} ({role(rank)}) failed with exit code {cause.exitcode}",
                  file=sys.stderr)
        return 2 if cause.exitcode == 2 else 1
    return 0


if __name__ == "__main__":
    main()
