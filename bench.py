"""The paper's evaluation section in small (`python bench.py --help`).

SSD is worth something where target and draft compute on devices of their own. So by default every
pass is paced: it takes as long as on the paper's hardware, four times slower, and everything else
is real: processes, messages, overlap, the acceptance and the hits of a real pair, the wall clock.
This emulates latencies that others have measured; it does not measure GPUs. It assumes that a pass
takes as long for one token as for hundreds, as on a GPU while weights, not arithmetic, bound it.

Speed is that of decoding: prefill, and the token it yields, are apart. Beside it stands Theorem 7
(in a batch Corollary 16), `cache.throughput`, with the parts that were measured in the same run.

In the figures points are measured, and lines are predicted: hits and tokens are counted in runs
without a pace, times are those of the pace, and the theorem gives the speed.
"""
from runtime.launch import launch
from runtime.settings import SWEEPS, BenchSettings, Settings, UserError, write_json

if __name__ == "__main__":
    launch(BenchSettings, "bench")  # parses first, then imports this module: torch takes seconds

import bisect
import platform
import sys
import time
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm

from cache import (PRIMARY, critical_batch_size, expected_tokens, fan_out_shape,
                   speedup_over_sd_bounds, throughput)
from figures import draw
from runtime.model import Pace
from runtime.placement import Job
from runtime.rank_counts import (counted_acceptance_rate, counted_hit_rate, counted_miss_rates,
                                 fit_power_law)
from runtime.screen import theorem_7
from saguaro import Decoder, warm_up

SLOWER = {1: 1, 2: 2, 4: 3, 8: 6, 12: 9}  # the pace that two cores can keep, by batch size
LOOKAHEADS = (3, 4, 5, 6)  # among which each line of the comparison has its best
SLACK = 1.1  # where K is chosen: a pre-speculation may take so many times its paced passes
LARGEST = 64  # budget: the ranks of so many guesses tell the hits of every smaller cache
PAPER = {("SSD", 0): "1.58 x SD, 4.68 x AR"}  # 70B / 1B, mean of four data sets
COLUMNS = ("lookahead", "tokens/s", "tokens_per_round", "acceptance_rate", "hit_rate", "E_hit",
           "E_miss", "T_v in ms", "T_p", "T_b", "verifier_utilisation", "measured / Theorem 7",
           "pace_kept")
COUNTED = ("rounds", "tokens_per_round", "acceptance_rate", "hit_rate", "E_hit", "E_miss",
           "bonus_ranks", "bonus_ranks_after_backup")
Figures = dict[str, Any]


class Point(NamedTuple):
    """One way of decoding: a row of a table, a point of a figure."""
    name: str                # of its line
    value: Any               # on the axis
    changes: dict[str, Any]  # of settings
    seeds: int = 8           # if sampled
    counted: bool = False    # not measured: Theorem 7 on what is counted without a pace


# ---- measuring and counting ----

class Bench:
    """Target and draft on rank 0, the draft on rank 1. Both ranks go through the same points in the
    same order, and get the same figures."""

    def __init__(self, settings: BenchSettings):
        self.settings = settings
        self.job = Job(settings)
        if self.job.placement.world_size != 2:
            raise UserError("bench.py measures one target rank and one draft rank: start two")
        self.leads = self.job.placement.rank == 0
        self.models = self.job.load()
        self.sd_models = self.models
        if self.leads:
            self.sd_models = self.models._replace(draft=self.job.load_draft())
        self.prompts = self.job.prompts[:3 if settings.quick else None]
        rows = min(max(SLOWER), len(self.prompts))
        slots = self.job.max_length + 8 * (1 + LARGEST)  # 8: the largest K
        for model in (self.models.target, self.models.draft, self.sd_models.draft):
            if model:  # its buffers, with the graphs captured in them, serve all points
                model.allocate(rows, slots, self.job.max_length)
        self.decoded = {}  # figures by settings and number of prompts: points share them

    def settings_of(self, point: Point) -> Settings:
        return self.settings.to_settings(
            ignore_eos=True, max_new_tokens=self.settings.max_new_tokens, **point.changes)

    def figures(self, points: list[Point]) -> list[Figures]:
        """Of every point. What was decoded before is not decoded again."""
        keys = []
        new = {}
        for point in points:
            settings = self.settings_of(point)
            if point.counted:
                settings = to_count(settings)
            key = f"{settings} {point.seeds} {len(self.prompts)}"
            keys.append(key)
            if key not in self.decoded and key not in new:
                new[key] = self.decoders(settings, point.seeds)
        turns = [(start, decoder) for start in range(len(self.prompts))
                 for decoder in chain(*new.values()) if start % decoder.settings.batch_size == 0]
        silent = None if self.leads else True
        for start, decoder in tqdm(turns, unit="turn", leave=False, disable=silent):
            rows = range(start, start + decoder.settings.batch_size)
            self.decode(decoder, [self.prompts[row % len(self.prompts)] for row in rows])
        found = [self.leads and {key: measured(decoders[0]) for key, decoders in new.items()}]
        dist.broadcast_object_list(found, 0)
        self.decoded |= found[0]
        return [predicted(self.settings_of(point), self.decoded[key]) if point.counted
                else self.decoded[key] for point, key in zip(points, keys)]

    def decoders(self, settings: Settings, num_seeds: int) -> list[Decoder]:
        """One for each seed, where texts or hits depend on it; their statistics are one."""
        if settings.temperature == 0 or settings.mode == "ar" or self.settings.quick:
            num_seeds = 1
        models = (self.sd_models, None)
        if settings.mode == "ssd":
            models = (self.models, self.job.placement)
        if self.job.placement.any_gpu and (self.leads or settings.mode == "ssd"):
            warm_up(settings, *models, self.prompts[:settings.batch_size])
        decoders = [Decoder(replace(settings, seed=settings.seed + i), *models)
                    for i in range(num_seeds)]
        for decoder in decoders:
            decoder.stats = decoders[0].stats
        return decoders

    def decode(self, decoder: Decoder, batch: list[list[int]], on_tokens=lambda *_: None) -> None:
        """At the pace of its batch size. Rank 1 has no part in AR and SD."""
        slower = SLOWER[decoder.settings.batch_size]
        for models in (self.models, self.sd_models):
            for model, pace in zip((models.target, models.draft), decoder.settings.pace):
                if model:
                    model.pace = Pace(slower * pace / 1000)
        if self.leads or decoder.settings.mode == "ssd":
            decoder(batch, on_tokens)
        dist.barrier()  # no rank begins while the other is still at work

    def trace(self, point: Point) -> Figures:
        """The first prompt: spans of work on both ranks, (work, start, end) in seconds, and of each
        round (its end, number of new tokens, was its outcome a hit?)."""
        rounds = []
        decoder = self.decoders(self.settings_of(point), 1)[0]
        self.decode(decoder, self.prompts[:1], lambda row, tokens, source: rounds.append(
            (time.perf_counter(), len(tokens), source == PRIMARY)))
        outcomes = [(end, count, hit) for (end, count, _), (*_, hit) in zip(rounds, rounds[1:])]
        return {"spans": decoder.stats.spans, "rounds": outcomes}


def measured(decoder: Decoder) -> Figures:
    """`Stats.summary`, and Theorem 7 with these parts. Where the pace is slower for a batch, speeds
    are shown as if it were not."""
    settings = decoder.settings
    rows = settings.batch_size
    f = decoder.stats.summary()
    if settings.mode != "ssd":
        f["hit_rate"] = None  # draws no line
    T_v = decoder.stats.mean_seconds("verify")
    slower = SLOWER[rows] if any(settings.pace) else 1
    speed = slower * f["tokens_per_second"]
    by_theorem_7 = slower * rows * theorem_7(f, rows) / T_v
    return f | on_axes(settings, speed) | {
        "Theorem 7": by_theorem_7, "measured / Theorem 7": speed / by_theorem_7,
        "T_v in ms": 1000 * T_v}


def on_axes(settings: Settings, speed: float) -> Figures:
    """What figures may have on their axes besides."""
    return {"lookahead": settings.lookahead if settings.mode != "ar" else 0,
            "budget": settings.budget, "temperature": settings.temperature,
            "C": settings.downweight, "batch size": settings.batch_size,
            "tokens/s": speed, "tokens/s of one row": speed / settings.batch_size}


def ranks_tell(settings: Settings) -> bool:
    """Do the ranks of a run with the largest budget tell the hits of these settings, because what
    is drafted does not depend on the cache?"""
    return settings.mode == "ssd" and settings.backup == "neural" and settings.downweight == 1


def to_count(settings: Settings) -> Settings:
    """What is decoded to count the hits and tokens of these settings."""
    settings = replace(settings, pace=(0.0, 0.0), batch_size=1)
    if ranks_tell(settings):
        settings = replace(settings, budget=LARGEST, fan_out="geometric")
    return settings


def predicted(settings: Settings, f: Figures) -> Figures:
    """Of these settings, from what was counted: the speed at their pace, by Theorem 7 (in a batch,
    Corollary 16)."""
    f = {name: f.get(name) for name in COUNTED}
    if ranks_tell(settings):
        f["hit_rate"] = hit_rate_of_cache(settings, f)
        f["E_hit"] = f["tokens_per_round"]
        f["E_miss"] = f["tokens_per_round"]
    rows = settings.batch_size
    target, draft = settings.pace
    K = settings.lookahead if settings.mode != "ar" else 0
    f["T_p"] = (K + 1) * draft / target if settings.mode == "ssd" else None
    f["T_b"] = K * draft / target if settings.backup == "neural" else 0.0
    return f | on_axes(settings, 1000 * rows * theorem_7(f, rows) / target)


def hit_rate_of_cache(settings: Settings, f: Figures) -> float:
    """What a cache of these settings would have held of the outcomes that were counted. The ranks
    leave out round 0, for which all guesses have k = 0: of its outcome one is right, nearly
    always."""
    shape = fan_out_shape(settings.fan_out, settings.budget, settings.lookahead,
                          settings.acceptance_rate, settings.miss_exponent)
    ranks = rank_table(f)
    hits = float(ranks.sum()) * counted_hit_rate(ranks, shape)
    if settings.budget:
        hits += f["rounds"] - int(ranks.sum())
    return hits / f["rounds"]


# ---- the comparison ----

def lines_to_compare(paced: bool, temperature: float) -> dict[str, dict[str, Any]]:
    """Changes of settings, by name."""
    lines = {"AR": {"mode": "ar"}, "SD": {"mode": "sd"}, "SSD": {}}
    if not paced:  # with the K and the budget of the command line
        return lines
    lines["SSD"] = {"budget": 24}
    lines["SSD, budget 64"] = {"budget": 64}
    lines["SSD, look-up backup"] = {"budget": 24, "backup": "lookup"}
    if temperature:
        lines["SSD, budget 64, C = 0.75"] = {"budget": 64, "downweight": 0.75}
        lines["SSD, public noise"] = {"budget": 24, "public_noise": True}
    return lines


def best_lookahead(bench: Bench, changes: dict[str, Any]) -> int:
    """The K with which these settings are fastest by what is counted, so that the choice is the
    same in every launch."""
    points = [Point("", K, changes | {"lookahead": K}, seeds=3, counted=True)
              for K in LOOKAHEADS]
    speeds = [theorem_7(f | {"T_p": SLACK * (f["T_p"] or 0.0)}) for f in bench.figures(points)]
    return LOOKAHEADS[speeds.index(max(speeds))]


def comparison(bench: Bench, temperature: float) -> list[Figures]:
    """AR, SD and SSD, each with its best K."""
    settings = bench.settings
    paced = any(settings.pace)
    points = []
    for name, changes in lines_to_compare(paced, temperature).items():
        changes["temperature"] = temperature
        changes["lookahead"] = settings.lookahead
        if paced and not settings.quick and name != "AR":
            changes["lookahead"] = best_lookahead(bench, changes)
        points.append(Point(name, temperature, changes))
    found = bench.figures(points)
    best = {point.name: f for point, f in zip(points, found)}
    sd = best["SD"]
    if bench.leads:
        rows = [[name, f["tokens/s"], f["tokens/s"] / best["AR"]["tokens/s"],
                 f["tokens/s"] / sd["tokens/s"], f["Theorem 7"] / sd["Theorem 7"], bounds(f, sd),
                 PAPER.get((name, temperature))] for name, f in best.items()]
        print_table(f"temperature {temperature:g}: {len(bench.prompts)} prompts, "
                    f"{settings.max_new_tokens} tokens each",
                    ["", "tokens/s", "/ AR", "/ SD", "by Theorem 7", "Cor. 9", "paper"], *rows)
        print_figures("T_b of SD is T_SD, the drafting that SSD hides", best)
    return results("comparison", list(zip(points, found)))


def bounds(f: Figures, sd: Figures) -> str:
    """Corollary 9's, where it applies: the backup is the primary, T_p <= 1, and a miss is worth no
    less than a hit and no more than E_hit (1 + T_b)."""
    if not f["hit_rate"] or f["backup"] != "neural" or f["T_p"] > 1:
        return ""
    E_miss = f["E_miss"] or f["E_hit"]
    T_b = f["T_b"] or 0.0
    if not f["E_hit"] <= E_miss <= f["E_hit"] * (1 + T_b):
        return ""
    return "{:.2f}-{:.2f}".format(*speedup_over_sd_bounds(
        f["hit_rate"], f["E_hit"], sd["tokens_per_round"], sd["T_b"], T_b))


# ---- sweeps: the figures ----

def sweep(bench: Bench, name: str) -> list[Figures]:
    """Measure and count the points of a figure, and draw it."""
    settings = bench.settings
    points = [point for point in sweep_points(settings.temperature or 1.0)[name]
              if point.changes.get("batch_size", 1) <= len(bench.prompts)]  # all rows differ
    if not any(settings.pace):  # then nobody knows how long a pass takes, and all is measured
        points = [point._replace(counted=False) for point in points if point.counted] or points
    found = bench.figures(points)
    if name == "timeline":
        found = [f | bench.trace(point) for point, f in zip(points, found)]
    shown = list(zip(points, found))
    if bench.leads:
        draw.figure(bench, name, shown)
        rows = {f"{point.name} {point.value:g}{', counted' * point.counted}": f
                for point, f in shown}
        print_figures(name, rows)
        print_notes(name, shown)
    return results(name, shown)


def sweep_points(warm: float) -> dict[str, list[Point]]:
    """By figure. `warm`: the temperature of those at one temperature above 0."""
    ssd = {"lookahead": 5, "budget": 24}
    sampled = ssd | {"temperature": warm}
    sd = {"lookahead": 5, "mode": "sd"}
    heats = (0.0, 0.3, 0.7, 1.0)
    shares = (1.0, 0.75, 0.5, 0.25, 0.0)
    lookaheads = (1, 2, 3, 4, 5, 6, 8)
    budgets = (0, 6, 12, 18, 24, 36, 48, 64)
    sizes = tuple(SLOWER)

    def line(name: str, axis: str, counted: tuple, measured: tuple, changes: dict,
             **more) -> list[Point]:
        changes = changes | more
        return ([Point(name, value, changes | {axis: value}, counted=True) for value in counted]
                + [Point(name, value, changes | {axis: value}, seeds=3) for value in measured])

    return {
        "timeline": [Point("SD", 0, sd), Point("SSD", 0, ssd)],
        "fan-out": line("paper", "temperature", (0.0, 0.7, 1.0), (), ssd)
        + line("public noise", "temperature", (0.7, 1.0), (), ssd, public_noise=True),
        "shape": line("geometric", "temperature", heats, heats, ssd)
        + line("uniform", "temperature", heats, (), ssd, fan_out="uniform")
        + line("all accepted only", "temperature", heats, (), ssd, fan_out="0,0,0,0,0,24")
        + line("SD", "temperature", heats, heats, sd),
        "downweight": line("budget 24", "downweight", shares, (1.0, 0.5, 0.0), sampled)
        + line("budget 64", "downweight", shares, (), sampled, budget=64),
        "noise": line("paper", "temperature", heats, heats, ssd)
        + line("public noise", "temperature", heats, heats, ssd, public_noise=True),
        "batch": line("neural backup", "batch_size", sizes, sizes, ssd)
        + line("lookup backup", "batch_size", sizes, sizes, ssd, backup="lookup")
        + line("random backup", "batch_size", sizes, sizes, ssd, backup="random"),
        "frontier": line("AR", "batch_size", sizes, sizes, {"mode": "ar"})
        + line("SD", "batch_size", sizes, sizes, sd) + line("SSD", "batch_size", sizes, sizes, ssd),
        "lookahead": line("SSD", "lookahead", lookaheads, lookaheads, ssd)
        + line("SD", "lookahead", lookaheads, lookaheads, sd),
        "budget": line("greedy", "budget", budgets, (6, 24, 64), ssd)
        + line("sampled", "budget", budgets, (6, 24, 64), sampled)}


def print_notes(name: str, shown: list[tuple[Point, Figures]]) -> None:
    """The flags that fit this pair; Theorem 17's b*."""
    for point, f in shown if name == "fan-out" else ():
        ranks = rank_table(f)
        print(f"  {point.name} {point.value:g}: --acceptance-rate "
              f"{counted_acceptance_rate(ranks):.2f} --miss-exponent "
              f"{fit_power_law(counted_miss_rates(ranks)):.2f} ({int(ranks.sum())} tokens)")
    alone = {point.name: f for point, f in reversed(shown) if point.value == 1}
    for backup in ("lookup backup", "random backup") if name == "batch" else ():
        fast = alone[backup]
        neural = alone["neural backup"]
        b = critical_batch_size(neural["hit_rate"], neural["E_hit"], neural["E_miss"] or 0.0,
                                fast["E_miss"] or 0.0, neural["T_p"], neural["T_b"] or 0.0,
                                fast["T_b"] or 0.0)
        print(f"  neural against {backup}: b* = {b:.1f} (Thm. 17)")


def rank_table(f: Figures) -> torch.Tensor:
    """`[K+1, n+1]`, after primary and backup together."""
    return torch.tensor(f["bonus_ranks"]) + torch.tensor(f["bonus_ranks_after_backup"])


# ---- tables ----

def print_figures(title: str, rows: dict[str, Figures]) -> None:
    print_table(title, ["", *map(draw.words, COLUMNS)],
                *([name, *map(f.get, COLUMNS)] for name, f in rows.items()))


def print_table(title: str, *lines: list) -> None:
    """Header and rows. Columns as wide as they must be; the first is flush left."""
    def cell(value) -> str:
        if value is None:
            return ""
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    cells = [[cell(value) for value in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells)]
    print(f"\n{title}")
    for first, *others in cells:
        print("  ".join(["", first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip())


def results(sweep: str, shown: list[tuple[Point, Figures]]) -> list[dict[str, Any]]:
    """For --out; without lists."""
    found = []
    for point, f in shown:
        f = {key: value for key, value in f.items() if not isinstance(value, list)}
        found.append({"sweep": sweep, "name": point.name, "value": point.value,
                      "counted": point.counted, "with": point.changes, "figures": f})
    return found


# ---- at the paper's scale, without measuring ----

def predict() -> None:
    """Theorem 7 from known settings. Seconds of a draft pass and of a verification, and the speeds
    called measured, are others'."""
    draft_pass = 0.00254
    hit_rate = 0.9
    sd_lookahead = 6
    rows = [["", "K", "a", "T_p", "SD", "SSD", "measured", "error", "SSD/SD", "measured"]]
    for name, T_v, sd, measured in (
            ("70B / 1B, paper", 1 / 54.7, 161.8, {7: 255.8}),
            ("32B / 0.6B, paper", 1 / 88.8, 136.8, {7: 203.8}),
            ("32B / 0.6B, ssd-wl", 0.0115, 141.4, {4: 210.9, 5: 193.6, 6: 175.3, 7: 158.6})):
        tokens = sd * (T_v + (sd_lookahead + 1) * draft_pass)  # E(a, K), from which a follows
        a = bisect.bisect(range(10_000), tokens,
                          key=lambda i: expected_tokens(i / 10_000, sd_lookahead)) / 10_000
        for K, ssd in measured.items():
            E = expected_tokens(a, K)
            T_p = (K + 1) * draft_pass / T_v
            speed = throughput(hit_rate, E, E, T_p, T_p) / T_v
            rows.append([name, K, a, T_p, sd, speed, ssd, f"{100 * (speed / ssd - 1):+.0f}%",
                         speed / sd, ssd / sd])
    print_table("Theorem 7, tokens/s. RESULTS.md says what is known and what is assumed.", *rows)


def main(settings: BenchSettings) -> None:
    if settings.predict:
        return predict()
    bench = Bench(settings)
    found = []
    everything = "all" in settings.sweep
    if everything or not settings.sweep:
        found += comparison(bench, 0.0) + comparison(bench, settings.temperature or 1.0)
    prompts = bench.prompts
    for name in SWEEPS if everything else settings.sweep:
        bench.prompts = prompts if name in ("batch", "frontier") else prompts[:6]
        found += sweep(bench, name)
    machine = {"machine": platform.platform(), "torch": torch.__version__,
               "transformers": transformers.__version__,
               "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]}
    if bench.leads:
        print(f"\n{machine}")
    if bench.leads and settings.out is not None:
        result = {"machine": machine, "arguments": sys.argv[1:], "results": found}
        write_json("--out", settings.out, result)
