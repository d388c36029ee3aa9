"""The frame of the house: who computes where, the texts as they grow, counts, times and the screen.
Of the paper there is only the prediction on the screen (Thm. 7)."""
import os
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable

import huggingface_hub
import psutil
import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer

from cache import PRIMARY, Outcome, Speculation, throughput
from runtime.cuda_graphs import record_passes
from runtime.model import CausalLM, context_length, load
from runtime.settings import (Settings, UserError, complain, first_line, interrupted,
                              write_json)
from runtime.tensor_parallel import check_shardable, load_sharded

WEIGHTS = 0.8  # the share of several GPUs' free memory for weights: the rest is for the KV
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


# ---- models and ranks ----

def open_model(flag: str, path: str):
    """The configuration and tokenizer of a checkpoint; nothing big is read."""
    if not Path(path).is_dir():
        if path.startswith((".", "/", "~")) or path.count("/") > 1:  # no Hub id does
            raise UserError(f"{flag} {path}: no such folder")
        try:
            huggingface_hub.HfApi().model_info(path, timeout=10)
        except Exception:  # from here on what was downloaded before must do
            huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        return AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as problem:
        raise UserError(f"{flag} {path}: neither a folder with a model and its tokenizer nor a "
                        f"model on the Hugging Face Hub ({first_line(problem)})") from problem


def encode(tokenizer, texts: list[str], chat: bool, context: int,
           vocab_size: int) -> list[list[int]]:
    """The prompts as token ids below `vocab_size`, each with room for at least one more token."""
    if chat and not tokenizer.chat_template:
        raise UserError("--apply-chat-template: this model's tokenizer has no chat template")
    if chat:
        turns = ([{"role": "user", "content": text}] for text in texts)
        prompts = [tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True,
                                                 return_dict=True)["input_ids"] for turn in turns]
    else:
        prompts = tokenizer(texts)["input_ids"]
    for number, prompt in enumerate(prompts, start=1):
        if not 0 < len(prompt) < context:
            raise UserError(f"prompt {number} of {len(prompts)} has {len(prompt)} tokens, and the "
                            f"target's context is {context}")
        last = max(prompt)
        if last >= vocab_size:
            token = tokenizer.convert_ids_to_tokens(last)
            raise UserError(f"prompt {number} of {len(prompts)} holds the token {token!r}, number "
                            f"{last}, and the target's embedding ends at {vocab_size - 1}: leave "
                            "it out, or resize the target's embedding")
    return prompts


class Ranks:
    """Who this process is and where it computes. Rank r of a machine takes its GPU number r, if
    there is one, else the CPU. In ssd the last rank drafts (of D drafters the last D); all others
    hold the target together."""

    def __init__(self, s: Settings):
        self.rank, self.world, local, here = (
            int(os.environ.get(name, default)) for name, default in (
                ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
        gpus = 0 if s.device == "cpu" else torch.cuda.device_count()
        if s.device == "cuda" and not gpus:
            raise UserError("--device cuda: PyTorch sees no CUDA device here")
        drafters = s.drafters if s.mode == "ssd" and self.world > 1 else 0
        if self.world <= drafters:
            raise UserError(f"--drafters {drafters}: of {self.world} ranks none is left for the "
                            "target; start more")
        self.shards = self.world - drafters  # ranks that hold the target
        self.holds_target = self.rank < self.shards
        self.drafters = list(range(self.shards, self.world)) or [0]
        self.drafts = self.rank in self.drafters and s.mode != "ar"
        self.device = torch.device("cuda", local) if local < gpus else torch.device("cpu")
        self.on_gpus = self.device.type == "cuda"  # and so are all ranks that hold the same model
        alone = self.shards == 1  # then the target may spread over all GPUs but the draft's
        taken = range(max(1, here - drafters), here)  # by drafters
        self.target_gpus = [gpu for gpu in range(gpus) if alone and gpu not in taken]
        # a thread for each core: hyperthreads would share its units
        cpus = psutil.cpu_count(logical=False) or os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            cpus = min(cpus, len(os.sched_getaffinity(0)))
        self.threads = 1  # of a drafter; the others share the remaining cores
        if not drafters or self.holds_target:
            self.threads = max(1, (cpus - drafters) // max(1, here - drafters))
        torch.set_num_threads(self.threads)

    def join(self) -> None:
        """Meet the other ranks. Tensors in host memory travel over gloo, those of a group that has
        a GPU for each of its ranks over NCCL."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        # one rank may wait for another that downloads 140 GB; who is dead closes its connections
        patience, gpus = timedelta(days=7), [None] * self.world
        dist.init_process_group("gloo", timeout=patience)
        dist.all_gather_object(gpus, self.on_gpus)

        def group(ranks: list[int]) -> dist.ProcessGroup:
            backend = "nccl" if all(gpus[rank] for rank in ranks) else "gloo"
            return dist.new_group(ranks, timeout=patience, backend=backend)

        targets = list(range(self.shards))
        self.everybody, self.targets = group(list(range(self.world))), group(targets)
        self.wire_device = self.device if all(gpus) else torch.device("cpu")
        self.on_gpus = all(gpus[rank] for rank in (targets if self.holds_target else self.drafters))


class Run:
    """What all ranks know of a run before any model is loaded; then the models that this one holds:
    `target` and `draft`, or None."""

    def __init__(self, s: Settings, texts: list[str]):
        self.settings, self.ranks, self.texts = s, Ranks(s), texts
        self.target_config, self.tokenizer = open_model("--target", s.target)
        self.context = context_length(self.target_config)
        self.vocab_size = self.target_config.get_text_config().vocab_size
        self.prompts = encode(self.tokenizer, texts, s.apply_chat_template, self.context,
                              self.vocab_size)
        if s.mode != "ar":
            self.draft_config, draft_tokenizer = open_model("--draft", s.draft)
            if draft_tokenizer.get_vocab() != self.tokenizer.get_vocab():
                raise UserError(f"--target {s.target} and --draft {s.draft} have different "
                                "vocabularies; a draft must propose the target's tokens")
        if s.lookahead >= self.context:
            raise UserError(f"--lookahead {s.lookahead}: the target's context is {self.context}")
        most = (s.lookahead + 1) * (self.vocab_size - 1)
        if s.drafters * s.budget > most:
            raise UserError(f"--budget {s.budget}: {most} outcomes are all there are with K = "
                            f"{s.lookahead} and a vocabulary of {self.vocab_size}")
        if self.ranks.shards > 1:
            drafters = self.ranks.world - self.ranks.shards
            check_shardable(self.target_config, self.ranks.shards, drafters)

    def join_and_load(self) -> None:
        ranks = self.ranks
        if ranks.world > 1:
            ranks.join()
        self.target = self.load_target() if ranks.holds_target else None
        self.draft = self.load_draft() if ranks.drafts else None

    def load_draft(self) -> CausalLM:
        network = load(self.settings.draft, self.draft_config, self.dtype, self.ranks.device)
        return self.speed_up(CausalLM(network, self.vocab_size))

    def load_target(self) -> CausalLM:
        """Shared by several ranks; filling one GPU after the other; or on one device."""
        s, ranks, config = self.settings, self.ranks, self.target_config
        if ranks.shards > 1:
            return CausalLM(load_sharded(s.target, config, self.dtype, ranks.device, ranks.targets))
        if len(ranks.target_gpus) < 2:
            return self.speed_up(CausalLM(load(s.target, config, self.dtype, ranks.device)))
        room = {gpu: int(WEIGHTS * torch.cuda.mem_get_info(gpu)[0]) for gpu in ranks.target_gpus}
        return self.speed_up(CausalLM(load(s.target, config, self.dtype, "sequential", room)))

    @property
    def dtype(self) -> torch.dtype:
        """--dtype, or by default what suits the devices of all who compute the same."""
        if self.settings.dtype != "auto":
            return getattr(torch, self.settings.dtype)
        return torch.bfloat16 if self.ranks.on_gpus else torch.float32

    def speed_up(self, model: CausalLM) -> CausalLM:
        if not self.settings.eager:
            record_passes(model)
        return model


# ---- texts, counts and times ----

@dataclass
class Stats:
    """Counts and times of decoding. Rates speak of decoding alone: prefill, and the token that it
    yields, are apart."""
    tokens: int = 0             # new tokens, those of prefill included
    prefill_tokens: int = 0     # one a prompt
    prefill_seconds: float = 0.0
    seconds: float = 0.0        # decoding, wall clock
    rounds: int = 0
    row_rounds: int = 0         # rounds, counted once for every row taking part
    accepted: int = 0
    rejected: int = 0           # rejections: at most one per row and round
    hits: int = 0
    hit_tokens: int = 0         # those of `tokens` that the rounds after a hit gave
    lookahead: int = 0
    times: dict[str, tuple[float, int]] = field(default_factory=dict)  # (seconds, count) by work
    learnt: dict[str, Any] = field(default_factory=dict)  # the draft's estimates and choices

    def count(self, lookahead: int, accepted: list[int], kept: list[int], hit: list[bool]) -> None:
        """A round, row by row: tokens accepted, tokens kept, did the cache serve?"""
        self.lookahead = max(self.lookahead, lookahead)
        self.rounds += 1
        self.row_rounds += len(kept)
        self.accepted += sum(accepted)
        self.rejected += sum(k < lookahead for k in accepted)
        self.hits += sum(hit)
        self.hit_tokens += sum(tokens for tokens, served in zip(kept, hit) if served)

    def add(self, times: dict[str, tuple[float, int]], learnt: dict[str, Any]) -> None:
        """What the workers measured and learnt in a batch."""
        self.learnt = learnt
        for name, (seconds, count) in times.items():
            old_seconds, old_count = self.times.get(name, (0.0, 0))
            self.times[name] = (old_seconds + seconds, old_count + count)

    def mean_seconds(self, name: str) -> float | None:
        return ratio(*self.times.get(name, (None, None)))

    def summary(self) -> dict[str, Any]:
        """The figures of `--json`. `acceptance_rate` is the maximum-likelihood a of the paper's
        geometric model; T_p (one pre-speculation: a trunk pass and K tree steps) and T_b (one
        backup) are in units of one verification."""
        decoded, K = self.tokens - self.prefill_tokens, self.lookahead
        verify, trunk, step, backup = map(self.mean_seconds, ("verify", "trunk", "step", "backup"))
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": ratio(decoded, self.seconds),
            "rounds": self.rounds,
            "tokens_per_round": ratio(decoded, self.row_rounds),
            "acceptance_rate": ratio(self.accepted, self.accepted + self.rejected) if K else None,
            "hit_rate": ratio(self.hits, self.row_rounds) if K else None,
            "E_hit": ratio(self.hit_tokens, self.hits),
            "E_miss": ratio(decoded - self.hit_tokens, self.row_rounds - self.hits),
            "verifier_utilisation": ratio(self.times.get("verify", (None,))[0], self.seconds),
            "T_p": ratio(trunk + K * step, verify) if trunk and step else None,
            "T_b": ratio(backup, verify),
            "prefill_seconds": self.prefill_seconds,
            **self.learnt}


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


class Texts:
    """The new tokens of a batch, as they are verified."""

    def __init__(self, prompts: list[list[int]], max_new_tokens: int, context: int, eos: list[int],
                 stats: Stats, on_tokens: Callable[[int, list[int], int], None] = lambda *_: None):
        """A text ends with an `eos` token, after `max_new_tokens`, or at the model's `context`.
        `on_tokens(row, new, source)` is told the new tokens of a round; `stats` is added to."""
        self.prompts, self.eos, self.stats, self.on_tokens = prompts, eos, stats, on_tokens
        self.rooms = [min(max_new_tokens, context - len(prompt)) for prompt in prompts]
        self.longest = max(len(prompt) + room for prompt, room in zip(prompts, self.rooms))
        self.new, self.going_on = [[] for _ in prompts], torch.ones(len(prompts), dtype=torch.bool)
        self.since, self.prefilling = time.perf_counter(), True

    def extend(self, speculation: Speculation, outcome: Outcome) -> Outcome:
        """Keep what a round gave; returns its outcome, with k = -1 for the rows that have ended."""
        drafted, accepted, bonus, source = (part.tolist() for part in (
            speculation.tokens, *outcome, speculation.source))
        rows, kept = self.going_on.nonzero().flatten().tolist(), []
        for row in rows:
            new = drafted[row][:accepted[row]] + [bonus[row]]
            end = next((i for i, token in enumerate(new, 1) if token in self.eos), len(new))
            new = new[:min(end, self.rooms[row] - len(self.new[row]))]
            self.new[row] += new
            kept.append(len(new))
            self.on_tokens(row, new, source[row])
            ended = new[-1] in self.eos or len(self.new[row]) == self.rooms[row]
            self.going_on[row] = not ended and not interrupted.is_set()
        stats, now = self.stats, time.perf_counter()
        stats.tokens += sum(kept)
        if self.prefilling:
            stats.prefill_tokens += len(kept)
            stats.prefill_seconds += now - self.since
        else:
            stats.seconds += now - self.since
            stats.count(speculation.tokens.shape[1], [accepted[row] for row in rows], kept,
                        [source[row] == PRIMARY for row in rows])
        self.since, self.prefilling = now, False
        return Outcome(outcome.num_accepted.where(self.going_on, -1), outcome.bonus)

    @property
    def ended(self) -> bool:
        return not self.going_on.any()


# ---- the screen ----

REPORT = (
    ("tokens_per_second", "tokens per second", ".1f", "decoding only, prefill apart"),
    ("tokens_per_round", "tokens per round", ".2f", "of a row: accepted ones and the bonus token"),
    ("acceptance_rate", "acceptance rate", ".2f", "of drafted tokens, judged one by one"),
    ("hit_rate", "cache hit rate", ".2f", "outcomes found in the speculation cache"),
    ("verifier_utilisation", "verifier utilisation", ".2f", "time spent verifying / wall time"),
    ("T_p", "T_p", ".2f", "a pre-speculation in verifications: hidden below 1"),
    ("T_b", "T_b", ".2f", "a backup speculation in verifications"))
CHOICES = """\
  fan-out              {fan_out} after a hit, {fan_out_after_backup} after a backup,
                       for a = {acceptance_rate_primary:.2f} and {acceptance_rate_backup:.2f}, \
r = {miss_exponent:.2f}; C = {downweight}, {backup} backup"""


def visible(text: str) -> str:
    """Control characters as escapes: a text cannot move the cursor or hide a line."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def predicted_speedups(s: Settings, summary: dict[str, Any]) -> tuple[float, float] | None:
    """What this decoding is worth with the parts that were measured: over autoregressive decoding,
    and over speculative decoding with the same pair (Thm. 7; in batches Cor. 16), whose T_SD is
    T_b of a neural backup. None where a part was not seen."""
    p, E_hit, E_miss, T_p, T_b = (
        summary[name] for name in ("hit_rate", "E_hit", "E_miss", "T_p", "T_b"))
    if None in (p, E_hit, E_miss, T_p, T_b) or summary["backup"] != "neural":
        return None
    ssd = throughput(p, E_hit, E_miss, T_p, T_b, s.batch_size)
    return ssd, ssd / throughput(0, 0, summary["tokens_per_round"], 1, T_b)


class Display:
    """Rank 0's screen: one prompt is streamed as it is verified, on a terminal in colours; of
    several, a progress bar, and each text when its batch is done."""
    PROMPT, CACHE, BACKUP, UNDERLINED, PLAIN = (f"\x1b[{code}m" for code in (2, 32, 33, 4, 0))

    def __init__(self, run: Run):
        self.run, self.tokenizer, self.one = run, run.tokenizer, len(run.texts) == 1
        self.colours = self.one and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self.rows, self.tokens, self.shown = [], [], ""
        self.bar = tqdm(total=len(run.texts) * run.settings.max_new_tokens, unit="token",
                        disable=self.one)
        if self.one:
            self.write(run.texts[0], self.PROMPT)

    def write(self, text: str, style: str) -> None:
        text = visible(text)
        print(f"{style}{text}{self.PLAIN}" if self.colours else text, end="", flush=True)

    def show(self, row: int, new: list[int], source: int) -> None:
        """New tokens, just verified; the last is the bonus token."""
        self.bar.update(len(new))
        if self.one:
            colour = self.CACHE if source == PRIMARY else self.BACKUP
            self.stream(new[:-1], colour)
            self.stream(new[-1:], colour + self.UNDERLINED)

    def stream(self, new: list[int], style: str, last: bool = False) -> None:
        """What the tokens add to the text; half a character waits for the other half."""
        self.tokens += new
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if last or not text.endswith("\ufffd"):
            self.write(text[len(self.shown):], style)
            self.shown = text

    def end_batch(self, outputs: list[list[int]], eos: list[int]) -> None:
        """The texts of a batch are complete."""
        for new in outputs:
            number = len(self.rows)
            prompt = self.run.texts[number]
            text = self.tokenizer.decode(new, skip_special_tokens=True)
            self.rows.append({
                "prompt": prompt, "text": text, "tokens": new,
                "finish_reason": self.finish_reason(self.run.prompts[number], new, eos)})
            if not self.one:
                tqdm.write(f"\n----- prompt {number + 1} -----\n{visible(prompt + text)}")

    def finish(self, summary: dict[str, Any]) -> None:
        """The figures, and --json."""
        self.bar.close()
        self.stream([], self.PLAIN, last=True)
        full = sum(row["finish_reason"] == "context" for row in self.rows)
        if full:
            print(f"\n\n{full} of {len(self.rows)} texts ended at the target's context limit",
                  end="")
        self.summarise(summary)
        s = self.run.settings
        if s.json:
            result = {"config": asdict(s), "outputs": self.rows, "stats": summary}
            write_json("--json", s.json, result)

    def finish_reason(self, prompt: list[int], new: list[int], eos: list[int]) -> str:
        if new and new[-1] in eos:
            return "eos"
        if len(new) == self.run.settings.max_new_tokens:
            return "length"
        return "context" if len(prompt) + len(new) == self.run.context else "interrupted"

    def summarise(self, summary: dict[str, Any]) -> None:
        s = self.run.settings
        print(f"\n\n{summary['tokens']} tokens with {s.mode}:")
        if self.colours:
            print(f"  colours              {self.CACHE}from the cache{self.PLAIN}, {self.BACKUP}"
                  f"from a backup{self.PLAIN}, {self.UNDERLINED}bonus token{self.PLAIN}")
        for name, title, form, meaning in REPORT:
            if summary[name] is not None and (name, s.mode) != ("hit_rate", "sd"):
                print(f"  {title:21}{summary[name]:7{form}}   {meaning}")
        if self.run.ranks.shards > 1:
            print(f"  {self.run.ranks.shards} ranks share the target")
        worth = predicted_speedups(s, summary)
        if worth:
            print(f"  worth by Theorem 7  {worth[0]:8.2f} x autoregressive, {worth[1]:.2f} x "
                  "speculative decoding")
        if s.mode == "ssd":
            print(CHOICES.format(**summary))
            if s.backup == "auto":
                b = summary["critical_batch_size"]
                print("  critical batch size ",
                      "none: neural is better at every size" if b is None else f"{b:7.1f}")
            if not s.no_early_outcome:
                print("  early outcome             on   a miss ends its tree (not in the paper)")
        if round(summary["T_p"] or 0, 2) > 1:
            print("  T_p > 1: the target waits for the draft; try a smaller --lookahead or "
                  "--budget")
        for name, neutral in (("top_k", 0), ("top_p", 1), ("downweight", 1)):
            flag, given = f"--{name.replace('_', '-')}", getattr(s, name) != neutral
            if given and s.temperature == 0:
                print(f"  {flag} has no effect on greedy decoding")
            elif given and name == "downweight" and s.mode != "ssd":
                print(f"  {flag} is ignored: only a cache has something to gain from it")


# ---- the end ----

def run(s: Settings, work: Callable[[Settings], None]) -> None:
    """Do the work. What the user can mend is said in one sentence; what is over ends quietly."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    drafts = s.mode == "ssd" and rank >= world - s.drafters
    name = f"rank {rank} ({'draft' if drafts else 'target'})"
    try:
        work(s)
        sys.stdout.flush()
    except UserError as problem:  # until the ranks meet, all find the same faults
        complain(problem, speaks=rank == 0 or drafts and dist.is_initialized())
    except OSError as problem:  # standard output is closed, or full
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(problem, BrokenPipeError):
            print(f"{Path(sys.argv[0]).name}: {problem}", file=sys.stderr)
        sys.exit(141 if isinstance(problem, BrokenPipeError) else 1)
    except (RuntimeError, MemoryError) as problem:
        said = str(problem)
        if isinstance(problem, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in said:
            reason = ". ".join(said.split(". ")[:2])
            complain(UserError(f"{name} lacks memory ({reason}): a smaller --batch-size, "
                               "--max-new-tokens or --budget may help, or more target ranks"), True)
        if "closed by peer" not in said and "reset by peer" not in said:
            raise
        if not interrupted.is_set():
            print(f"{name} stops: another rank is gone", file=sys.stderr)
            sys.exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()
    if interrupted.is_set():
        sys.exit(130)
