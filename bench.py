"""The paper's tables and figures, measured on the machine in front of you.

    torchrun --nproc-per-node 2 bench.py           AR, SD, SSD and transformers' own decoding: who is how fast, and why
    python bench.py --quick                        the same, shorter; bench.py launches its two ranks itself
    python bench.py --sweep timeline fan-out       some of the paper's figures; --help names the others
    python bench.py --gpu-steps                    the steps of large models on one GPU, beside its memory bandwidth
    python bench.py --predict                      no measurement: Theorem 7 on the paper's hardware

How it measures. All variants live in one launch and take turns, batch by batch and in rotating order, so that a
machine that drifts drifts for all; ratios are paired by batch. Speed is that of decoding: prefill, and the tokens it
yields, are apart. Every variant generates the same number of tokens (end-of-sequence tokens do not end a text), and
greedy text must be the same for all. Where a competitor has settings of its own, several are measured and its best
is reported.

In units of one verification, of T_v seconds, Theorem 7 predicts

    speed = (p_hit E_hit + (1 - p_hit) E_miss) / (p_hit max(1, T_p) + (1 - p_hit) (1 + T_b)) / T_v   tokens per second,

plain SD is its case p_hit = 0 with T_b = T_SD, and a verifier that never waits would give E_hit / T_v.
"""
import copy
import json
import math
import platform
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterable, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, StoppingCriteria

from cache import FanOut, Speculation, critical_batch_size, expected_tokens, fit_power_law, throughput
from draft_worker import Backup, Downweight, DraftWorker
from model import RECORD_FROM, CausalLM, Stopwatch, UserError, context_length
from sampling import logits_warpers
from saguaro import (DRAFT, DTYPES, FAST_ACCEPTANCE, TARGET, TINY, RemoteSpeculator, Run, Settings, option, own_rank,
                     parse_settings, serve, start, threads)
from target_worker import NoSpeculator, Stats, TargetWorker, decode

WARM_UP, HOPELESS = 8, 3  # tokens; times as slow as with another number of threads
QUICK_PROMPTS, QUICK_TOKENS = 3, 24
FIRST_ROUND = 21  # most tokens that transformers' assisted decoding may yield at once, by default
SD_LOOKAHEADS = (4, 5, 7)
LOOKUP_TOKENS = 10  # the value of transformers' own examples
RESAMPLES = 2000  # of the bootstrap
TEMPERATURES = (0.0, 0.7, 1.0)


# ---- measuring: variants that take turns ----

class Bench(Run):
    """What a rank knows and holds for all variants: the settings they start from, the prompts, the models."""

    def __init__(self, settings: "BenchSettings"):
        if settings.quick:
            settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, QUICK_TOKENS))
        super().__init__(settings)
        if self.shards > 1:
            raise UserError("bench.py measures one target rank and one draft rank: start two")
        if settings.quick:
            self.prompts = self.prompts[:QUICK_PROMPTS]
        context, longest = min(self.context, context_length(self.draft_config)), max(map(len, self.prompts))
        if longest + settings.max_new_tokens > context:
            raise UserError(f"--max-new-tokens {settings.max_new_tokens}: the longest prompt has {longest} tokens, and "
                            f"no text may outgrow the models' context, {context}")

    def load_models(self) -> None:
        """The models; and what is "auto" among lookahead and budget, decided once for all variants."""
        transformers.logging.set_verbosity_error()
        self.target = self.load_target() if own_rank() == TARGET else None
        if self.target and self.settings.body:
            network = enlarge(self.target.network, **BODIES[self.settings.body])
            self.target = self.speed_up(CausalLM(network))
            print(f"the target's function in a body of {network.num_parameters() / 1e9:.2f}B parameters")
        device = self.target_device if self.target else self.draft_device  # the target's rank drafts too: for SD
        self.draft = self.load_draft(device)
        self.tune(self.target, self.draft)
        self.settings = replace(self.settings, lookahead=self.lookahead, budget=self.budget)

    def in_batches(self, size: int | None = None, least: int = 1) -> list[list[list[int]]]:
        """All prompts in batches of `size` (default: --batch-size), repeated until there are at least so many; the
        first prompts fill up the last batch."""
        count = len(self.prompts)
        size = min(size or self.settings.batch_size, count)
        batches = [[self.prompts[(first + i) % count] for i in range(size)] for first in range(0, count, size)]
        return batches * math.ceil(least / len(batches))


# The layers of Qwen3-0.6B and of Llama-3.1-8B; two more stand in for the output head of the latter, for the vocabulary
# stays the small one's.
BODIES = {"0.6b": dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
                       head_dim=128, intermediate_size=3072),
          "8b": dict(hidden_size=4096, num_hidden_layers=34, num_attention_heads=32, num_key_value_heads=8,
                     head_dim=128, intermediate_size=14336)}


@torch.no_grad()
def enlarge(small: PreTrainedModel, **body) -> PreTrainedModel:
    """The function of a small Llama at the cost of a large one: natural acceptance at realistic times.

    What is new in the large network has random weights, but no way out: its embeddings are 0 beyond the small width,
    and so are the output projections of new heads, new feed-forward units and new layers. Norms divide by a root mean
    square over more places, hence smaller weights and epsilon; attention scores by the root of a larger head size,
    hence larger queries. The rotary frequency of a coordinate depends on its place in the head: with `stretch` times
    the size, that of coordinate i is found at `stretch` i."""
    old, new = small.config, copy.deepcopy(small.config)
    new.update(body | {"rms_norm_eps": old.rms_norm_eps * old.hidden_size / body["hidden_size"]})
    stretch, shrink = new.head_dim // old.head_dim, (old.hidden_size / new.hidden_size) ** 0.5
    group, new_group = (c.num_attention_heads // c.num_key_value_heads for c in (old, new))
    sizes = "hidden_size", "num_hidden_layers", "num_key_value_heads", "intermediate_size"
    if (old.model_type != "llama" or old.attention_bias or old.rope_parameters["rope_type"] != "default" or
            new.head_dim % old.head_dim or new_group < group or any(getattr(new, n) < getattr(old, n) for n in sizes)):
        raise UserError("--body: only a smaller Llama, without biases and rotary scaling, fits into it")
    with small.device:
        large = AutoModelForCausalLM.from_config(new, dtype=small.dtype).eval()

    width, units, every = slice(old.hidden_size), slice(old.intermediate_size), slice(None)
    lanes = (stretch * torch.arange(old.head_dim // 2) + torch.tensor([[0], [new.head_dim // 2]])).flatten()
    head = torch.arange(old.num_attention_heads) // group * new_group + torch.arange(old.num_attention_heads) % group
    queries = (new.head_dim * head[:, None] + lanes).flatten()  # rows of the large projection
    keys = (new.head_dim * torch.arange(old.num_key_value_heads)[:, None] + lanes).flatten()
    places = {"q_proj": (queries, width), "k_proj": (keys, width), "v_proj": (keys, width), "o_proj": (width, queries),
              "gate_proj": (units, width), "up_proj": (units, width), "down_proj": (width, units),
              "embed_tokens": (every, width), "lm_head": (every, width)}  # all others are norms
    for name, weight in large.named_parameters():
        if name.split(".")[-2] in ("embed_tokens", "lm_head", "o_proj", "down_proj"):
            weight.zero_()
    for layer in large.model.layers[:old.num_hidden_layers]:
        layer.self_attn.q_proj.weight.view(-1, new.head_dim, new.hidden_size)[head] = 0  # no score but from the lanes
    for name, weight in small.named_parameters():
        kind = name.split(".")[-2]
        factor = stretch ** 0.5 if kind == "q_proj" else 1.0 if kind in places else shrink
        large.get_parameter(name)[places.get(kind, width)] = factor * weight
    return large


class Variant(NamedTuple):
    """One way of decoding. Variants of one name compete for it: the fastest is reported."""
    name: str
    changes: dict[str, Any]  # of the settings; mode may also be "generate", "assisted" or "lookup": transformers' own
    threads: int | None = None  # of the target's rank; None: all but the draft's


def threads_alone() -> list[int]:
    """What a variant without draft process may use: one thread, or as many as both ranks have together."""
    return sorted({1, threads("ar", TARGET)})


class Competitor:
    """A variant at work: the same on both ranks, with the workers, what they have learnt, and what was measured."""

    def __init__(self, bench: Bench, variant: Variant):
        self.run, self.name, self.threads = copy.copy(bench), variant.name, variant.threads or threads("ssd", TARGET)
        self.settings = self.run.settings = s = replace(bench.settings, **variant.changes)
        self.run.warpers = logits_warpers(s.temperature, s.top_k, s.top_p)
        self.lookahead, self.speculator, self.draft, self.target = 0, NoSpeculator(), None, None
        self.stats, self.speeds, self.prefills, self.texts = Stats(), [], [], []
        if s.mode == "ssd" or s.mode == "sd" and own_rank() == TARGET:
            self.run.tune(bench.target, bench.draft)
            self.lookahead, self.draft = self.run.lookahead, self.run.draft_worker(bench.draft)
            self.speculator = self.draft if s.mode == "sd" else RemoteSpeculator(self.run.wire())
        if own_rank() == TARGET:
            self.target = TargetWorker(bench.target, self.run.warpers, s.seed)

    def __str__(self) -> str:
        """What it runs with."""
        parts = [f"{self.threads} thread{'s' * (self.threads > 1)}"]
        if self.settings.mode not in ("ar", "generate"):
            parts.append(f"K {self.lookahead or self.settings.lookahead}")
        if self.settings.mode == "ssd":
            parts += [f"budget {self.run.budget}", f"{self.settings.backup} backup"]
        return ", ".join(parts)

    def decode(self, prompts: list[list[int]], max_new_tokens: int, stats: Stats) -> list[list[int]]:
        """Rank 0: the new tokens of every prompt. Rank 1 drafts, if it has a part in this variant, and has none."""
        if own_rank() == DRAFT:
            if self.settings.mode == "ssd":
                longest = max(map(len, prompts)) + max_new_tokens
                serve(self.draft, self.run.wire(), prompts, longest, not self.settings.no_early_outcome)
            return []
        torch.set_num_threads(self.threads)
        if self.settings.mode in ("ar", "sd", "ssd"):
            generations = decode(self.target, self.speculator, prompts, max_new_tokens, self.lookahead, [], stats)
            return [generation.tokens for generation in generations]
        return generate(self.run, prompts, max_new_tokens, stats)

    def take_turn(self, prompts: list[list[int]]) -> None:
        stats = self.stats
        before = stats.tokens - stats.prefill_tokens, stats.seconds, stats.prefill_seconds
        texts = self.decode(prompts, self.settings.max_new_tokens, stats)
        dist.barrier()  # nobody begins while a rank is still at work
        if texts:
            self.texts += texts
            self.speeds.append((stats.tokens - stats.prefill_tokens - before[0]) / (stats.seconds - before[1]))
            self.prefills.append(stats.prefill_seconds - before[2])

    def summary(self) -> dict[str, Any]:
        """`Stats.summary` of all turns, `verify_seconds` (T_v), and `rows`, the mean number of rows in a round."""
        stats = self.stats
        rows = stats.row_rounds / stats.rounds if stats.rounds else None
        return stats.summary(self.lookahead) | {"verify_seconds": stats.mean_seconds("verify"), "rows": rows}

    @property
    def speed(self) -> float:
        """Tokens per second, all rows of a batch together: the median of the turns."""
        return statistics.median(self.speeds)


def measure(bench: Bench, variants: Iterable[Variant], batches: list[list[list[int]]]) -> list[Competitor]:
    """Let every variant decode every batch, taking turns. Only rank 0's competitors hold figures and texts."""
    competitors = warm_up([Competitor(bench, variant) for variant in variants], batches[0])
    turns = tqdm(total=len(batches) * len(competitors), unit="run", leave=False, disable=own_rank() != TARGET)
    for number, batch in enumerate(batches):
        first = number % len(competitors)
        for competitor in competitors[first:] + competitors[:first]:
            competitor.take_turn(batch)
            turns.update()
    turns.close()
    if own_rank() == TARGET:
        check_texts(bench, competitors)
    return competitors


def warm_up(competitors: list[Competitor], prompts: list[list[int]]) -> list[Competitor]:
    """Some tokens by each. Who then takes `HOPELESS` times as long as with another number of threads is left out:
    threads that wait for a core that others use would make the measurement last, and change nothing."""
    seconds = []
    for competitor in competitors:
        started = time.perf_counter()
        competitor.decode(prompts, WARM_UP, Stats())
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    dist.broadcast_object_list(seconds, TARGET, device=torch.device("cpu"))
    fastest: dict[str, float] = {}
    for competitor, taken in zip(competitors, seconds):
        same = f"{competitor.name} {competitor.settings}"
        fastest[same] = min(taken, fastest.get(same, taken))
    return [competitor for competitor, taken in zip(competitors, seconds)
            if taken <= HOPELESS * fastest[f"{competitor.name} {competitor.settings}"]]


def check_texts(bench: Bench, competitors: list[Competitor]) -> None:
    """Nobody wins by cheating: the agreed number of tokens, and one greedy text for all."""
    wanted = bench.settings.max_new_tokens
    for competitor in competitors:
        if any(len(text) != wanted for text in competitor.texts):
            sys.exit(f"{competitor.name} ({competitor}) did not generate {wanted} tokens for every prompt")
    greedy = [competitor for competitor in competitors if competitor.settings.temperature == 0]
    for other in greedy[1:]:
        differing = sum(a != b for a, b in zip(greedy[0].texts, other.texts))
        if differing:
            said = (f"{other.name} ({other}) wrote other greedy text than {greedy[0].name} for {differing} of "
                    f"{len(other.texts)} prompts")
            if torch.finfo(bench.target.dtype).bits >= 32:
                sys.exit(said)
            print(f"{said}: rounding to {bench.target.dtype} can decide between tokens that are nearly as likely")


class Clock(StoppingCriteria):
    """Stops nothing; notes when a round of `generate` ended, and how long the texts then were."""

    def __init__(self):
        self.calls: list[tuple[float, int]] = []  # (seconds, tokens)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.calls.append((time.perf_counter(), input_ids.shape[1]))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def generate(bench: Bench, prompts: list[list[int]], max_new_tokens: int, stats: Stats) -> list[list[int]]:
    """transformers' `generate` on the same weights; what its first round yields counts as prefill."""
    settings, network, device = bench.settings, bench.target.network, bench.target.device
    network.generation_config = GenerationConfig(pad_token_id=0)  # no end of sequence, no penalties, nothing but:
    options = {"do_sample": False}
    if settings.temperature > 0:
        options = {"do_sample": True, "temperature": float(settings.temperature), "top_k": settings.top_k,
                   "top_p": settings.top_p}
    if settings.mode == "assisted":
        given = {} if settings.lookahead == "auto" else {
            "num_assistant_tokens": settings.lookahead, "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0}
        options["assistant_model"] = bench.draft.network
        bench.draft.network.generation_config = GenerationConfig(pad_token_id=0, **given)
    if settings.mode == "lookup":
        options["prompt_lookup_num_tokens"] = settings.lookahead
    longest, clock = max(map(len, prompts)), Clock()
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    torch.manual_seed(settings.seed)
    started = time.perf_counter()
    with torch.inference_mode():
        output = network.generate(tokens, attention_mask=mask, max_new_tokens=max_new_tokens, stopping_criteria=[clock],
                                  **options)
    (first, first_length), (last, last_length) = clock.calls[0], clock.calls[-1]
    stats.tokens += len(prompts) * (last_length - longest)
    stats.prefill_tokens += len(prompts) * (first_length - longest)
    stats.prefill_seconds += first - started
    stats.seconds += last - first
    stats.row_rounds += len(prompts) * (len(clock.calls) - 1)
    return output[:, longest:].tolist()


# ---- what the figures mean ----

def predicted_speed(summary: dict[str, Any]) -> float:
    """Tokens per second by Theorem 7 (Cor. 16 in a batch) from a summary's measured parts. AR is E = 1 and nothing to
    wait for; plain SD never hits."""
    parts = [summary[name] or 0.0 for name in ("hit_rate", "E_hit", "E_miss", "T_p", "T_b")]
    return summary["rows"] * throughput(*parts, summary["rows"]) / summary["verify_seconds"]


def ratio(ours: Competitor, theirs: Competitor, seed: int) -> str:
    """Median of the speed ratios by batch, and its 95% interval: percentiles of the median of resampled batches."""
    ratios = torch.tensor(ours.speeds) / torch.tensor(theirs.speeds)
    draws = torch.randint(len(ratios), (RESAMPLES, len(ratios)), generator=torch.Generator().manual_seed(seed))
    low, high = ratios[draws].quantile(0.5, 1).quantile(torch.tensor([0.025, 0.975])).tolist()
    return "1" if ours is theirs else f"{statistics.median(ratios.tolist()):.2f} ({low:.2f}-{high:.2f})"


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo")  # on Linux; `platform` knows no model there
    models = [line.split(":")[1].strip() for line in (info.read_text().splitlines() if info.exists() else [])
              if line.startswith("model name")]
    return {"cpu": (models or [platform.processor() or platform.machine()])[0], "cores": threads("ar", TARGET),
            "gpus": [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())],
            "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def number(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


def print_table(title: str, header: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Columns as wide as they must be; the first is flush left."""
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    print(f"\n{title}")
    for line in lines:
        cells = [line[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        print("  " + "  ".join(cells).rstrip())


# ---- the comparison ----

SD = {"mode": "sd", "budget": 1, "downweight": 1.0, "backup": "neural"}  # there is no cache to shape or to favour


def comparison_variants(s: "BenchSettings") -> Iterable[Variant]:
    for count in threads_alone():
        yield Variant("ar", {"mode": "ar"}, count)
        for lookahead in sorted({s.lookahead, *(() if s.quick else SD_LOOKAHEADS)}):
            yield Variant("sd", SD | {"lookahead": lookahead}, count)
    for count in sorted({1, threads("ssd", TARGET)}):
        for backup in sorted({s.backup, "neural", "fast"}):
            yield Variant("ssd", {"backup": backup}, count)
        yield Variant("ssd, all auto", dict.fromkeys(("lookahead", "budget", "downweight", "backup"), "auto"), count)
    for count in threads_alone():
        yield Variant("generate", {"mode": "generate"}, count)
        if s.batch_size == 1:  # transformers' limit
            yield Variant("generate, look-up", {"mode": "lookup", "lookahead": LOOKUP_TOKENS}, count)
            for lookahead in ("auto",) if s.quick else ("auto", s.lookahead):
                yield Variant("generate, assisted", {"mode": "assisted", "lookahead": lookahead}, count)


def compare(bench: Bench) -> None:
    """AR, SD, SSD, and transformers' three ways, each at its best."""
    s = bench.settings
    competitors = measure(bench, comparison_variants(s), bench.in_batches())
    if own_rank() == DRAFT:
        return
    best = {c.name: c for c in sorted(competitors, key=lambda c: c.speed)}
    shown = [best[name] for name in dict.fromkeys(c.name for c in competitors)]
    print_table(f"{len(bench.prompts)} prompts, {s.max_new_tokens} tokens each, batch {s.batch_size}, temperature "
                f"{s.temperature:g}, {len(competitors)} variants; with 95% intervals of the ratios",
                ("", "best with", "tokens/s", "quartiles", "/ ar", "/ sd", "tokens/round", "acceptance", "hit rate",
                 "T_p", "T_b", "utilisation"), (speed_row(c, best, s.seed) for c in shown))
    print("  T_b of sd is T_SD, the drafting that SSD hides; utilisation: time spent verifying / wall time")
    if s.batch_size > 1:
        print("  transformers' assisted and look-up decoding know no batches")
    print_table("Theorem 7 with the measured parts, tokens/s over all rounds",
                ("", "T_v in ms", "p_hit", "E_hit", "E_miss", "measured", "predicted", "measured / predicted",
                 "ceiling E_hit / T_v", "measured / ceiling"), (theory_row(c) for c in shown if c.stats.rounds))
    print("\n" + ", ".join(f"{key} {value}" for key, value in machine().items() if value))
    if s.out:
        results = [{"name": c.name, "with": str(c), "best": c is best[c.name], "tokens_per_second": c.speeds,
                    "prefill_seconds": c.prefills, "summary": c.summary()} for c in competitors]
        result = {"machine": machine(), "settings": asdict(s), "results": results}
        Path(s.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def speed_row(c: Competitor, best: dict[str, Competitor], seed: int) -> list[str]:
    low, high = torch.tensor(c.speeds).quantile(torch.tensor([0.25, 0.75])).tolist()
    measured = [number(c.summary()[name]) for name in ("tokens_per_round", "acceptance_rate", "hit_rate", "T_p", "T_b",
                                                       "verifier_utilisation")]
    return [c.name, str(c), f"{c.speed:.1f}", f"{low:.1f}-{high:.1f}", ratio(c, best["ar"], seed),
            ratio(c, best["sd"], seed), *measured]


def theory_row(c: Competitor) -> list[str]:
    summary = c.summary()
    T_v, measured, predicted = summary["verify_seconds"], summary["tokens_per_second"], predicted_speed(summary)
    ceiling = summary["rows"] * summary["E_hit"] / T_v if summary["E_hit"] else None
    return [c.name, f"{1000 * T_v:.1f}", *(number(summary[name]) for name in ("hit_rate", "E_hit", "E_miss")),
            f"{measured:.1f}", f"{predicted:.1f}", f"{measured / predicted:.2f}", number(ceiling, ".1f"),
            number(ceiling and measured / ceiling)]


# ---- the sweeps: the paper's figures ----

INK = ("#12365c", "#d1662b", "#8aa36b")  # dark, middle, light: different in grey too


@contextmanager
def figure(bench: Bench, name: str, width: float = 4.2, height: float = 3.2, **panels):
    """Axes to draw on, saved as SVG in the folder --figures. Lines differ in marker and dashes as well as in colour."""
    import matplotlib  # here, because only sweeps need it
    matplotlib.use("Agg")
    from matplotlib import cycler, pyplot
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "lines.markersize": 4.5,
             "axes.prop_cycle": cycler(color=INK, marker=["o", "s", "^"], linestyle=["-", "--", ":"]),
             "legend.frameon": False, "svg.hashsalt": name}  # the salt: same figures, same file
    with pyplot.rc_context(style):
        drawn, axes = pyplot.subplots(**panels, figsize=(width, height), layout="constrained")
        yield axes
        path = Path(bench.settings.figures) / f"{name}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, metadata={"Date": None})
        pyplot.close(drawn)
    print(f"\n{path}")


def logarithmic(axis, ticks: Iterable[float]) -> None:
    """A logarithmic axis with plain numbers at `ticks`."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_ticks(ticks, map(str, ticks))
    axis.set_ticks([], minor=True)


def sweep_fan_out(bench: Bench) -> None:
    """Def. 11, the power law: how often F guesses miss the bonus token."""
    shown = (1, 2, 4, 8, 16, 32)
    competitors = measure(bench, (Variant(f"temperature {t:g}", {"temperature": t, "budget": shown[-1]})
                                  for t in TEMPERATURES), bench.in_batches())
    if own_rank() == DRAFT:
        return
    rows, fan_out = [], torch.arange(1, shown[-1] + 1)
    with figure(bench, "fan-out") as axes:
        for c in competitors:
            ranks = torch.tensor(c.summary()["bonus_ranks"]).double()
            miss = 1 - ranks[:-1].cumsum(0) / ranks.sum()
            missed, r = miss > 0, fit_power_law(miss.tolist())
            scale = (miss[missed].log() + r * fan_out[missed].log()).mean().exp()
            points, = axes.plot(fan_out[missed], miss[missed], linestyle="", label=f"{c.name}: r = {r:.2f}")
            axes.plot(fan_out, scale * fan_out ** -r, color=points.get_color(), marker="", linewidth=1)
            rows.append([c.name, f"{int(ranks.sum())}", f"{r:.2f}", *(f"{miss[F - 1]:.3f}" for F in shown)])
        axes.set(xlabel="fan-out F (guesses at one position)", ylabel="share of bonus tokens not guessed")
        logarithmic(axes.xaxis, shown)
        logarithmic(axes.yaxis, (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1))
        axes.legend()
    print_table("miss rate of the bonus token by fan-out F; r is the fitted exponent",
                ("", "bonus tokens", "r", *(f"F={F}" for F in shown)), rows)


def sweep_shape(bench: Bench) -> None:
    """Thm. 12: geometric against uniform fan-out at equal budget."""
    shapes = {"geometric": "auto", "uniform": "uniform"}
    competitors = measure(bench, (Variant(shape, {"temperature": t, "fan_out": policy})
                                  for shape, policy in shapes.items() for t in TEMPERATURES), bench.in_batches())
    if own_rank() == DRAFT:
        return
    with figure(bench, "shape", width=7, ncols=2) as (left, right):
        for shape in shapes:
            members = [c for c in competitors if c.name == shape]
            left.plot(TEMPERATURES, [c.summary()["hit_rate"] for c in members], label=shape)
            right.plot(TEMPERATURES, [c.speed for c in members], label=shape)
        left.set(xlabel="temperature", ylabel="hit rate", ylim=(0, 1), xticks=TEMPERATURES)
        right.set(xlabel="temperature", ylabel="tokens per second", ylim=(0, None), xticks=TEMPERATURES)
        left.legend()
    print_table(f"shape of the cache at {competitors[0]}", ("", "temperature", "acceptance", "hit rate", "tokens/s",
                                                            "fan-out at the end (a, r estimated)"),
                ((c.name, f"{c.settings.temperature:g}", number(c.summary()["acceptance_rate"]),
                  number(c.summary()["hit_rate"]), f"{c.speed:.1f}", str(c.summary()["fan_out"])) for c in competitors))


def sweep_downweight(bench: Bench) -> None:
    """Def. 14: acceptance against hit rate as C falls, and what that does to the speed."""
    temperature = bench.settings.temperature or 1.0  # at 0 there is nothing to act on
    downweights = (1.0, 0.7, 0.4, 0.2, 0.1, 0.0)
    competitors = measure(bench, (Variant("ssd", {"temperature": temperature, "downweight": C}) for C in downweights),
                          bench.in_batches())
    if own_rank() == DRAFT:
        return
    summaries = [c.summary() for c in competitors]
    predicted = [predicted_speed(summary) for summary in summaries]
    with figure(bench, "downweight", width=7, ncols=2) as (left, right):
        points = [(summary["hit_rate"], summary["acceptance_rate"]) for summary in summaries]
        left.plot(*zip(*points))
        for C, point in zip(downweights, points):
            left.annotate(f"C = {C:g}", point, xytext=(5, 4), textcoords="offset points", fontsize=8)
        left.set(xlabel="hit rate", ylabel="acceptance rate")
        left.margins(x=0.2, y=0.12)
        right.plot(downweights, [c.speed for c in competitors], label="measured")
        right.plot(downweights, predicted, label="Theorem 7")
        right.set(xlabel="C", ylabel="tokens per second", xlim=(1.05, -0.05), ylim=(0, None))
        right.legend(loc="lower left")
    print_table(f"Saguaro sampling at temperature {temperature:g}",
                ("C", "acceptance", "hit rate", "E_hit", "E_miss", "tokens/s", "Theorem 7"),
                ((f"{C:g}", *(number(summary[name]) for name in ("acceptance_rate", "hit_rate", "E_hit", "E_miss")),
                  f"{c.speed:.1f}", f"{speed:.1f}")
                 for C, c, summary, speed in zip(downweights, competitors, summaries, predicted)))


def batch_sizes(bench: Bench) -> list[int]:
    """1, 2, 4, ... up to the number of prompts."""
    count = len(bench.prompts)
    return [size for size in (1, 2, 4, 8, 16, 32) if size < count] + [min(count, 32)]


def sweep_batch(bench: Bench) -> None:
    """Cor. 16, Thm. 17: who should draft after a miss, by batch size."""
    kinds, sizes = ("neural", "fast", "auto"), batch_sizes(bench)
    measured = [measure(bench, (Variant(kind, {"backup": kind, "batch_size": size}) for kind in kinds),
                        bench.in_batches(size, least=3)) for size in sizes]
    if own_rank() == DRAFT:
        return
    rows, critical = [], []
    for size, competitors in zip(sizes, measured):
        neural, fast, _ = (c.summary() for c in competitors)
        parts = (neural["hit_rate"], neural["E_hit"], neural["E_miss"], fast["E_miss"], neural["T_p"], neural["T_b"],
                 fast["T_b"])
        critical.append(critical_batch_size(*(part or 0.0 for part in parts)))
        rows.append([f"{size}", *(f"{c.speed:.1f}" for c in competitors), *map(number, parts), f"{critical[-1]:.1f}"])
    with figure(bench, "batch") as axes:
        for i, kind in enumerate(kinds):
            axes.plot(sizes, [competitors[i].speed for competitors in measured], label=f"{kind} backup")
        if 1 <= critical[0] <= sizes[-1]:
            axes.axvline(critical[0], color="grey", linewidth=1)
            axes.annotate(f" b* = {critical[0]:.1f}", (critical[0], 0), va="bottom")
        axes.set(xlabel="batch size", ylabel="tokens per second, all rows", ylim=(0, None))
        logarithmic(axes.xaxis, sizes)
        axes.legend()
    print_table("backups by batch size; b* is Theorem 17's, from what was measured at that size (in the figure: at 1)",
                ("batch", *(f"{kind} tok/s" for kind in kinds), "p_hit", "E_hit", "E neural", "E fast", "T_p",
                 "T neural", "T fast", "b*"), rows)


def sweep_frontier(bench: Bench) -> None:
    """Latency against throughput: AR, SD and SSD over batch sizes."""
    sizes, sd = batch_sizes(bench), SD | {"lookahead": bench.settings.lookahead}
    variants = [Variant(name, changes, count) for name, changes in (("ar", {"mode": "ar"}), ("sd", sd))
                for count in threads_alone()] + [Variant("ssd", {"backup": backup}) for backup in ("neural", "fast")]
    measured = [measure(bench, variants, bench.in_batches(size, least=3)) for size in sizes]
    if own_rank() == DRAFT:
        return
    rows = []
    with figure(bench, "frontier") as axes:
        for name in ("ar", "sd", "ssd"):
            best = [max((c for c in competitors if c.name == name), key=lambda c: c.speed) for competitors in measured]
            points = [(c.speed / size, c.speed) for c, size in zip(best, sizes)]
            axes.plot(*zip(*points), label=name.upper())
            for size, point in zip(sizes, points):
                axes.annotate(f"{size}", point, xytext=(4, 4), textcoords="offset points", fontsize=7)
            rows += [[name, f"{size}", str(c), f"{each:.1f}", f"{total:.1f}"]
                     for size, c, (each, total) in zip(sizes, best, points)]
        axes.set(xlabel="tokens per second of one sequence", ylabel="tokens per second, all rows", xlim=(0, None),
                 ylim=(0, None))
        axes.legend(title="at batch size")
    print_table("latency against throughput", ("", "batch", "best with", "tokens/s of one sequence", "tokens/s"), rows)


def sweep_lookahead(bench: Bench) -> None:
    """Speed against K: where pre-speculation outlasts verification (T_p > 1), the verifier of the paper's plain
    algorithm waits; the early outcome softens that."""
    lookaheads = (1, 2, 3, 4, 5, 6, 8)
    kinds = {"SSD": {}, "SSD, no early outcome": {"no_early_outcome": True}, "SD": SD}
    competitors = measure(bench, (Variant(name, changes | {"lookahead": K}) for name, changes in kinds.items()
                                  for K in lookaheads), bench.in_batches())
    if own_rank() == DRAFT:
        return
    groups = [[c for c in competitors if c.name == name] for name in kinds]
    T_p = [c.summary()["T_p"] for c in groups[1]]
    with figure(bench, "lookahead", width=7, ncols=2) as (left, right):
        for name, members in zip(kinds, groups):
            left.plot(lookaheads, [c.speed for c in members], label=name)
        left.set(xlabel="lookahead K", ylabel="tokens per second", ylim=(0, None), xticks=lookaheads)
        left.legend()
        right.plot(lookaheads, T_p)
        right.axhline(1, color="grey", linewidth=1)
        right.annotate("above: the verifier waits", (lookaheads[0], 1), xytext=(0, 3), textcoords="offset points",
                       color="grey", fontsize=8)
        right.set(xlabel="lookahead K", ylabel="T_p, in verifications", ylim=(0, None), xticks=lookaheads)
    print_table(f"tokens/s by lookahead, budget {bench.settings.budget}", ("K", *kinds, "T_p"),
                ((f"{K}", *(f"{c.speed:.1f}" for c in row), number(T_p[i]))
                 for i, (K, row) in enumerate(zip(lookaheads, zip(*groups)))))


class Span(NamedTuple):
    """Something a rank did. Seconds are those of `time.perf_counter`: on Linux CLOCK_MONOTONIC, one clock for all
    processes of a machine, so that the spans of both ranks can stand on one axis."""
    name: str
    start: float
    end: float


class Timeline(NamedTuple):
    verified: list[Span]
    drafted: list[Span]

    def hits(self) -> list[bool]:
        """Per verification: was there no need of a backup since the one before?"""
        ends = [-float("inf"), *(span.end for span in self.verified)]
        return [not any(work.name == "backup" and end <= work.start < span.start for work in self.drafted)
                for end, span in zip(ends, self.verified)]


def record_timeline(bench: Bench, variant: Variant) -> Timeline:
    """What target and draft did while the first batch was decoded."""
    competitor, prompts = Competitor(bench, variant), bench.in_batches()[0]
    competitor.decode(prompts, WARM_UP, Stats())
    workers = [worker for worker in (competitor.target, competitor.draft) if worker]
    for worker in workers:
        worker.watch.spans = []
    competitor.decode(prompts, bench.settings.max_new_tokens, Stats())
    spans, everything = [Span(*span) for worker in workers for span in worker.watch.spans], [None, None]
    dist.all_gather_object(everything, spans)
    return Timeline(*([span for span in everything[0] + everything[1] if (span.name == "verify") is verifies]
                      for verifies in (True, False)))


def sweep_timeline(bench: Bench) -> None:
    """Fig. 1, measured: who works when, in the first rounds of SD, and in rounds of SSD with hits and about two
    misses."""
    rounds = 7
    sd = record_timeline(bench, Variant("sd", SD | {"lookahead": bench.settings.lookahead}, 1))
    ssd = record_timeline(bench, Variant("ssd", {}))
    if own_rank() == DRAFT:
        return
    hits = ssd.hits()
    first = min(range(1, max(2, len(hits) - rounds)), key=lambda i: abs(hits[i:i + rounds].count(False) - 2))
    seconds = ssd.verified[min(first + rounds, len(hits) - 1)].start - ssd.verified[first].start
    with figure(bench, "timeline", width=8, nrows=2, sharex=True) as (above, below):
        draw_timeline(above, "SD", sd, sd.verified[1].start, seconds)
        draw_timeline(below, "SSD", ssd, ssd.verified[first].start, seconds)
        below.set(xlabel="time in ms")
        handles, labels = below.get_legend_handles_labels()
        above.legend(*zip(*dict(zip(labels, zip(handles, labels))).values()), ncols=3, loc="lower center",
                     bbox_to_anchor=(0.5, 1.02))
        for i, hit in enumerate(hits):
            middle = 500 * (ssd.verified[i].start + ssd.verified[i].end - 2 * ssd.verified[first].start)
            if 0 < middle < 1000 * seconds:
                below.annotate("hit" if hit else "miss", (middle, 1.36), ha="center", weight=None if hit else "bold")
    print_table("the whole text", ("", "rounds", "misses", "share of time verifying", "drafting"),
                (timeline_row("SD", sd), timeline_row("SSD", ssd)))


def draw_timeline(axes, mode: str, timeline: Timeline, origin: float, seconds: float) -> None:
    """What the target (upper lane) and the draft did in the `seconds` after `origin`."""
    looks = {"verify": ("verify", INK[0], ""), "backup": ("draft, the target waits", INK[1], "////")}
    for lane, spans in enumerate((timeline.drafted, timeline.verified)):
        for span in spans:
            if origin <= span.start < origin + seconds:
                label, colour, hatch = looks.get(span.name, ("draft ahead", "#f2c490", ""))
                axes.barh(lane, 1000 * (span.end - span.start), left=1000 * (span.start - origin), height=0.6,
                          color=colour, hatch=hatch, edgecolor="white", linewidth=0.4, label=label)
    axes.set(yticks=[0, 1], yticklabels=["draft", "target"], ylim=(-0.4, 1.6), xlim=(0, 1000 * seconds), ylabel=mode)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)


def timeline_row(mode: str, timeline: Timeline) -> list[str]:
    (first, *verified), drafted = timeline.verified, timeline.drafted  # the first is part of prefill
    wall = verified[-1].end - first.end
    shares = [sum(span.end - span.start for span in spans if first.end <= span.start) / wall
              for spans in (verified, drafted)]
    return [mode, f"{len(verified)}", f"{timeline.hits()[1:].count(False)}", *map(number, shares)]


SWEEPS = {"fan-out": sweep_fan_out, "shape": sweep_shape, "downweight": sweep_downweight, "batch": sweep_batch,
          "frontier": sweep_frontier, "lookahead": sweep_lookahead, "timeline": sweep_timeline}


# ---- the steps of decoding, on a GPU ----

LLAMA_8B = BODIES["8b"] | dict(num_hidden_layers=32, vocab_size=128256, tie_word_embeddings=False)
LLAMA_1B = dict(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
                intermediate_size=8192, vocab_size=128256, tie_word_embeddings=True)
STEP_CONTEXT, STEP_LOOKAHEAD, STEP_BUDGET, STEP_REPEATS = 1024, 5, 24, 20
COPIED = 2 ** 30  # bytes, to measure the memory bandwidth


def median_seconds(device: torch.device, work: Callable[[], Any]) -> float:
    """Of `STEP_REPEATS` calls, after those in which passes are recorded."""
    seconds = []
    for _ in range(STEP_REPEATS + RECORD_FROM + 1):
        watch = Stopwatch(device)
        with watch("work"):
            work()
        seconds.append(watch.read()["work"][0])
    return statistics.median(seconds[-STEP_REPEATS:])


def random_llama(s: "BenchSettings", shape: dict, context: int, device: torch.device) -> tuple[CausalLM, int]:
    """A Llama with random weights, on which no time depends, and the bytes that a pass reads: weights, and the KV of
    `context` tokens."""
    config = AutoConfig.for_model("llama", max_position_embeddings=2 * context, **shape)
    dtype = DTYPES.get(s.dtype, torch.bfloat16)
    with device:
        network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights = sum(weight.numel() for name, weight in network.named_parameters()
                  if config.tie_word_embeddings or "embed_tokens" not in name)  # else one row of it is read
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * context
    return CausalLM(network).speed_up(graphs=not s.eager, compiled=s.compile), (weights + kv) * dtype.itemsize


def generate_seconds(network: PreTrainedModel, tokens: torch.Tensor) -> float:
    """Seconds a token of transformers' `generate` after `tokens` `[1, n]`, with a static cache, which makes it compile
    its decode step on a GPU."""
    seconds = []
    for count in (2 * STEP_REPEATS, STEP_REPEATS, 2 * STEP_REPEATS):  # the first to compile
        watch = Stopwatch(tokens.device)
        with watch("generate"):
            network.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=count,
                             min_new_tokens=count, pad_token_id=0, cache_implementation="static")
        seconds.append(watch.read()["generate"][0])
    return (seconds[2] - seconds[1]) / STEP_REPEATS


def measure_steps(s: "BenchSettings", target_shape: dict, draft_shape: dict, context: int, device: torch.device
                  ) -> list[tuple[str, float, float | None]]:
    """What a step is, its seconds, and those that reading its weights and KV from memory takes."""
    K, prompt = STEP_LOOKAHEAD, [1] * context
    block = torch.empty(COPIED, dtype=torch.uint8, device=device)
    copied = torch.empty_like(block)
    bandwidth = 2 * COPIED / median_seconds(device, lambda: copied.copy_(block))  # read and written
    print(f"memory bandwidth, measured by copying: {bandwidth / 1e9:.0f} GB/s")
    target, target_bytes = random_llama(s, target_shape, context, device)
    draft, draft_bytes = random_llama(s, draft_shape, context, device)
    one, verify = (target.seconds_per_pass(1, count, context) for count in (1, K + 1))
    trunk, step = (draft.seconds_per_pass(1, count, context) for count in (K + 1, STEP_BUDGET))

    verifier = TargetWorker(target, None, 0)
    verifier.prefill([prompt], context + (STEP_REPEATS + RECORD_FROM + 2) * (K + 1), K)
    speculation = Speculation(torch.ones(1, K, dtype=torch.long, device=device), None, torch.ones(1, dtype=torch.bool))
    verifying = median_seconds(device, lambda: verifier.verify(speculation))
    drafter = DraftWorker(draft, None, 0, K, FanOut("geometric", STEP_BUDGET, K, 0.8, 0.8, 1.0), Downweight(1.0),
                          Backup("neural", K))
    drafter.start([prompt], context + K + 1)
    drafter.drafted = speculation.tokens
    drafting = median_seconds(device, drafter.pre_speculate)
    by_generate = generate_seconds(target.network, torch.tensor([prompt], device=device))

    target_memory, draft_memory = target_bytes / bandwidth, draft_bytes / bandwidth
    return [("target, one token", one, target_memory), (f"target, {K + 1} tokens", verify, target_memory),
            ("target, one token by generate, static cache", by_generate, target_memory),
            (f"draft, {K + 1} tokens (trunk)", trunk, draft_memory),
            (f"draft, {STEP_BUDGET} branches (tree step)", step, draft_memory),
            (f"outside its pass, of a verification of {1000 * verifying:.2f} ms", verifying - verify, None),
            (f"outside its passes, of a pre-speculation of {1000 * drafting:.2f} ms", drafting - trunk - K * step,
             None)]


def gpu_steps(s: "BenchSettings") -> None:
    """How near the steps of decoding come to what memory allows: Llama-3.1-8B's and Llama-3.2-1B's shapes, batch 1."""
    if not torch.cuda.is_available():
        raise UserError("--gpu-steps: PyTorch sees no CUDA device here")
    rows = measure_steps(s, LLAMA_8B, LLAMA_1B, STEP_CONTEXT, torch.device("cuda:0"))
    print_table(f"steps at a context of {STEP_CONTEXT} tokens, 8B target and 1B draft with random weights",
                ("", "ms", "from memory alone, ms", "ratio"),
                ((name, f"{1000 * seconds:.2f}", number(memory and 1000 * memory), number(memory and seconds / memory))
                 for name, seconds, memory in rows))
    print("\n" + ", ".join(f"{key} {value}" for key, value in machine().items() if value))


# ---- at scale, on paper ----

PAPER = {"70B / 1B": (54.7, 161.8, 255.8), "32B / 0.6B": (88.8, 136.8, 203.8)}  # AR, SD, SSD: tokens/s, greedy, batch 1
DRAFT_PASS, VERIFICATION = 0.00254, 0.0115  # seconds, by a third party: tree step of Qwen3-0.6B, Qwen3-32B
REPRODUCED = {4: 210.9, 5: 193.6, 6: 175.3, 7: 158.6}  # SSD tokens/s by K, Qwen3-32B / 0.6B, by the same third party
ASSUMPTIONS = """The paper's pairs: Llama-3.1-70B on 4 H100 with Llama-3.2-1B on 1 H100; Qwen3-32B with Qwen3-0.6B.
Known: the speeds called measured; T_v = 1 / AR's speed; a third party's tree step of Qwen3-0.6B, {ms} ms.
Assumed: K = {K} (--lookahead) and p_hit = {p:g} (--hit-rate), which decide SSD/SD; the 1B draft is as fast as the 0.6B,
a plain draft pass takes as long as a tree step, verifying K+1 tokens as long as one; E_hit = E_miss = E(a, K), with a
either given (--acceptance-rate) or such that SD comes out as measured."""


def fitted_acceptance_rate(tokens: float, lookahead: int) -> float:
    """The a of E(a, K) = `tokens`, by bisection; 0 or 1 if there is none."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, lookahead) < tokens else (low, middle)
    return high


def draft_times(lookahead: int, verification: float) -> tuple[float, float]:
    """T_p, a trunk pass and K tree steps, and T_b = T_SD, K passes, for a verification of so many seconds."""
    return (lookahead + 1) * DRAFT_PASS / verification, lookahead * DRAFT_PASS / verification


def against(predicted: float, measured: float, form: str = ".1f") -> tuple[str, str, str]:
    return format(predicted, form), format(measured, form), f"{round(100 * (predicted / measured - 1)):+d}%"


def predict(s: "BenchSettings") -> None:
    """Theorem 7 and Corollary 16 on the paper's hardware, beside what was measured there."""
    K, p, rows, fitted = 5 if s.lookahead == "auto" else s.lookahead, s.hit_rate, [], {}
    print(ASSUMPTIONS.format(K=K, p=p, ms=1000 * DRAFT_PASS))
    for name, (ar, sd, ssd) in PAPER.items():
        T_p, T_b = draft_times(K, 1 / ar)
        fitted[name] = fitted_acceptance_rate(sd / ar * (1 + T_b), K)
        for how, a in (("given", s.acceptance_rate), ("fitted", fitted[name])):
            E = expected_tokens(a, K)
            speeds = [ar * throughput(hit_rate, E, E, T_p, T_b) for hit_rate in (0, p)]
            rows.append([name, f"{a:.2f} {how}", f"{T_p:.2f}", f"{T_b:.2f}", *against(speeds[0], sd),
                         *against(speeds[1], ssd), *against(speeds[1] / speeds[0], ssd / sd, ".2f")])
    print_table("Theorem 7, tokens/s", ("", "a", "T_p", "T_SD = T_b", *("SD", "measured", "off"),
                                        *("SSD", "measured", "off"), *("SSD/SD", "measured", "off")), rows)
    print_table(f"32B / 0.6B past T_p = 1, tokens/s: the third party's speeds and T_v = {1000 * VERIFICATION} ms, a as "
                "fitted above", ("K", "T_p", "SSD", "measured", "off"),
                (predicted_lookahead(k, p, fitted["32B / 0.6B"]) for k in REPRODUCED))
    predict_batches(K, p, PAPER["70B / 1B"][0], fitted["70B / 1B"])


def predicted_lookahead(lookahead: int, hit_rate: float, acceptance_rate: float) -> list[str]:
    T_p, T_b = draft_times(lookahead, VERIFICATION)
    E = expected_tokens(acceptance_rate, lookahead)
    return [f"{lookahead}", f"{T_p:.2f}", *against(throughput(hit_rate, E, E, T_p, T_b) / VERIFICATION,
                                                   REPRODUCED[lookahead])]


def predict_batches(lookahead: int, hit_rate: float, ar: float, acceptance_rate: float) -> None:
    """Corollary 16 and Theorem 17."""
    T_p, T_b = draft_times(lookahead, 1 / ar)
    good, poor = expected_tokens(acceptance_rate, lookahead), expected_tokens(FAST_ACCEPTANCE, lookahead)
    critical = critical_batch_size(hit_rate, good, good, poor, T_p, T_b, 0.0)
    print_table("70B / 1B in batches by Corollary 16, tokens/s of all rows; nothing measured to compare with. Assumed "
                "besides: no T\ndepends on the batch (they do), and a fast backup takes no time and has a = "
                f"{FAST_ACCEPTANCE}. Then b* = {critical:.1f} (Thm. 17).", ("batch", "neural", "fast"),
                ([f"{b}"] + [f"{b * ar * throughput(hit_rate, good, miss, T_p, T, b):.0f}"
                             for miss, T in ((good, T_b), (poor, 0.0))] for b in (1, 2, 4, 8, 16, 32)))


# ---- the command ----

@dataclass
class BenchSettings(Settings):
    """What speculative speculative decoding buys on this machine, and why."""
    prompt: tuple[str, ...] = ()  # what has no `option` here is none of this command's
    mode: str = "ssd"
    ignore_eos: bool = True
    json: str | None = None
    prompts: str = option(str(TINY / "prompts.jsonl"), "JSON Lines with a field prompt, question or text in each line",
                          metavar="FILE")
    max_new_tokens: int = option(64, "tokens to generate for each prompt, exactly", metavar="N")
    quick: bool = option(False, f"only {QUICK_PROMPTS} prompts, {QUICK_TOKENS} tokens, and fewer variants")
    body: str | None = option(None, "measure the target's function at the cost of a larger model, whose new parts have "
                              "no effect", choices=tuple(BODIES))
    out: str | None = option(None, "write machine, settings and results of the comparison to FILE (JSON)",
                             metavar="FILE")
    sweep: tuple[str, ...] = option((), "measure and draw figures of the paper instead: " + ", ".join(SWEEPS),
                                    nargs="+", choices=tuple(SWEEPS), metavar="NAME")
    figures: str = option("figures", "folder for the figures of --sweep", metavar="FOLDER")
    predict: bool = option(False, "no measurement: Theorem 7 on the paper's hardware")
    gpu_steps: bool = option(False, "on a GPU: the steps of decoding, of models of 8B and 1B parameters, beside the "
                             "memory bandwidth")
    hit_rate: float = option(0.9, "p_hit for --predict", metavar="P")

    def check(self) -> None:
        super().check()
        least = max(FIRST_ROUND, 0 if self.lookahead == "auto" else self.lookahead + 1) + 1
        if self.max_new_tokens < least:
            raise UserError(f"--max-new-tokens is {self.max_new_tokens}; it must be at least {least}, for a first "
                            f"round, which counts as prefill, may yield {least - 1} tokens")
        if not 0 <= self.hit_rate <= 1:
            raise UserError(f"--hit-rate is {self.hit_rate}; it must be between 0 and 1")
        if bool(self.sweep) + self.predict + self.gpu_steps > 1:
            raise UserError("--sweep, --predict and --gpu-steps exclude each other")
        if self.out and (self.sweep or self.predict or self.gpu_steps):
            raise UserError("--out holds the comparison; it does not go with --sweep, --predict or --gpu-steps")
        if self.out and (Path(self.out).is_dir() or not Path(self.out).resolve().parent.is_dir()):
            raise UserError(f"--out {self.out}: not a file in an existing folder")
        if self.sweep and Path(self.figures).exists() and not Path(self.figures).is_dir():
            raise UserError(f"--figures {self.figures}: not a folder")


def parse() -> BenchSettings:
    """The settings of a measurement; --predict and --gpu-steps need no ranks, and end here."""
    settings = parse_settings(kind=BenchSettings)
    if settings.predict or settings.gpu_steps:
        if own_rank() == TARGET:
            (predict if settings.predict else gpu_steps)(settings)
        sys.exit(0)
    return settings


def work(bench: Bench) -> None:
    bench.load_models()
    for measurement in [SWEEPS[name] for name in bench.settings.sweep] or [compare]:
        measurement(bench)


@record
def main() -> None:
    start(parse, Bench, work)


if __name__ == "__main__":
    main()
