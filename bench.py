"""The paper's evaluation section in small (`python bench.py --help`).

SSD is worth something where target and draft compute on devices of their own. So by default every
pass is paced: it takes as long as on the paper's hardware, four times slower, and everything else
is real: processes, messages, overlap, the acceptance and the hits of a real pair, the wall clock.
This emulates latencies that others have measured; it does not measure GPUs. It assumes that a pass
takes as long for one token as for hundreds, as on a GPU while weights, not arithmetic, bound it.

Speed is that of decoding: prefill, and the token it yields, are apart. Beside it stands Theorem 7
(in a batch Corollary 16) with the parts that were measured in the same run; T_v is a verification:

    speed = (p_hit E_hit + (1-p_hit) E_miss) / (p_hit max(1, T_p) + (1-p_hit) (1 + T_b)) / T_v.
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
from runtime.screen import Stats, theorem_7
from saguaro import Decoder, warm_up

SLOWER = {1: 1, 2: 2, 4: 3, 8: 6, 12: 9}  # the pace that two cores can keep, by batch size
LOOKAHEADS = (3, 4, 5, 6)  # among which each line of the comparison has its best
SLACK = 1.1  # a pre-speculation takes up to so many times its paced passes: see T_p in RESULTS.md
BASE = "base"  # a budget of 64, of whose ranks the hits of other caches are counted
PAPER = {("SSD", 0): "1.58 x SD, 4.68 x AR"}  # 70B / 1B, mean of four data sets
COLUMNS = ("lookahead", "tokens/s", "tokens_per_round", "acceptance_rate", "hit_rate", "E_hit",
           "E_miss", "T_v in ms", "T_p", "T_b", "verifier_utilisation", "measured / Theorem 7",
           "pace_kept")
COUNTED = ("lookahead", "tokens_per_round", "acceptance_rate", "hit_rate", "E_hit", "E_miss",
           "backup", "bonus_ranks", "bonus_ranks_after_backup", "T_v in ms", "T_p", "T_b")
Figures = dict[str, Any]


class Point(NamedTuple):
    """One way of decoding: a row of a table, a point of a figure."""
    name: str                # of its line
    value: Any               # on the axis
    changes: dict[str, Any]  # of settings
    seeds: int = 3           # if sampled
    counted: bool = False    # decoded without the pace, and its speed found by Theorem 7


# ---- measuring ----

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
        slots = self.job.max_length + 8 * (1 + 64)  # those of the largest K and budget
        for model in (self.models.target, self.models.draft, self.sd_models.draft):
            if model:  # its buffers, with the graphs captured in them, serve all points
                model.allocate(rows, slots, self.job.max_length)
        self.measured = {}  # figures by point: lines share points

    def settings_of(self, point: Point) -> Settings:
        given = {"ignore_eos": True, "max_new_tokens": self.settings.max_new_tokens}
        if point.counted:
            given["pace"] = (0.0, 0.0)
        return self.settings.to_settings(**given | point.changes)

    def decoders(self, point: Point) -> list[Decoder]:
        """One for each seed, where texts or hits depend on it."""
        settings = self.settings_of(point)
        once = settings.temperature == 0 or settings.mode == "ar" or self.settings.quick
        seeds = range(settings.seed, settings.seed + (1 if once else point.seeds))
        models = (self.sd_models, None)
        if settings.mode == "ssd":
            models = (self.models, self.job.placement)
        if self.job.placement.any_gpu and (self.leads or settings.mode == "ssd"):
            warm_up(settings, *models, self.prompts[:settings.batch_size])
        return [Decoder(replace(settings, seed=seed), *models) for seed in seeds]

    def measure(self, points: list[Point]) -> list[Figures]:
        """The figures of every point. What was measured before is not decoded again."""
        keys = [(len(self.prompts), point.seeds, repr(self.settings_of(point)))
                for point in points]
        new = {key: point for key, point in zip(keys, points) if key not in self.measured}
        turns = []
        for key, point in new.items():
            stats = Stats()
            for decoder in self.decoders(point):
                decoder.stats = stats  # of all seeds
                rows = decoder.settings.batch_size
                turns += [(rows, n, key, decoder) for n in range(0, len(self.prompts), rows)]
        if not any(self.settings.pace):  # then speed drifts, and points take turns
            turns.sort(key=lambda turn: turn[:2])
        silent = None if self.leads else True
        for rows, start, _, decoder in tqdm(turns, unit="turn", leave=False, disable=silent):
            batch = [self.prompts[(start + row) % len(self.prompts)] for row in range(rows)]
            self.decode(decoder, batch)
        decoders = {key: decoder for *_, key, decoder in turns}
        found = [self.leads and {key: figures_of(decoder) for key, decoder in decoders.items()}]
        dist.broadcast_object_list(found, 0)
        self.measured |= found[0]
        found = [self.measured[key] for key in keys]
        return [at_pace(self.settings, f) if point.counted else f
                for point, f in zip(points, found)]

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
        decoder = self.decoders(point)[0]
        self.decode(decoder, self.prompts[:1], lambda row, tokens, source: rounds.append(
            (time.perf_counter(), len(tokens), source == PRIMARY)))
        outcomes = [(end, count, hit) for (end, count, _), (*_, hit) in zip(rounds, rounds[1:])]
        return {"spans": decoder.stats.spans, "rounds": outcomes}


def figures_of(decoder: Decoder) -> Figures:
    """`Stats.summary`, and Theorem 7 with these parts. Where the pace is slower for a batch, speeds
    are shown as if it were not."""
    settings = decoder.settings
    rows = settings.batch_size
    found = decoder.stats.summary()
    if settings.mode != "ssd":
        found["hit_rate"] = None  # draws no line
    T_v = decoder.stats.mean_seconds("verify")
    slower = SLOWER[rows] if any(settings.pace) else 1
    speed = slower * found["tokens_per_second"]
    predicted = slower * rows * theorem_7(found, rows) / T_v
    return found | {
        "lookahead": settings.lookahead if settings.mode != "ar" else 0,
        "tokens/s": speed, "tokens/s of one row": speed / rows, "Theorem 7": predicted,
        "measured / Theorem 7": speed / predicted, "T_v in ms": 1000 * T_v}


def at_pace(settings: BenchSettings, f: Figures) -> Figures:
    """What was counted, and the speed that follows from it by Theorem 7: at the pace as given or,
    where there is none, with the times that were measured."""
    target, draft = settings.pace
    K = f["lookahead"]
    f = {name: f[name] for name in COUNTED}
    if target:
        f["T_v in ms"] = target
        f["T_p"] = SLACK * (K + 1) * draft / target
        f["T_b"] = K * draft / target if f["backup"] == "neural" else 0.0
    return f | {"tokens/s": 1000 * theorem_7(f) / f["T_v in ms"]}


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
    """The K with which these settings are fastest, as `at_pace` tells from what is counted: so the
    choice is the same in every launch."""
    points = [Point("", K, changes | {"lookahead": K}, counted=True) for K in LOOKAHEADS]
    speeds = [f["tokens/s"] for f in bench.measure(points)]
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
    found = bench.measure(points)
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
    """Measure the points of a figure, and draw it."""
    points = [point for point in sweep_points(bench.settings.temperature or 1.0)[name]
              if point.changes.get("batch_size", 1) <= len(bench.prompts)]  # all rows differ
    found = bench.measure(points)
    if name == "timeline":
        found = [f | bench.trace(point) for point, f in zip(points, found)]
    shown = []
    for point, f in zip(points, found):
        shown += other_caches(bench, name, point, f) if point.name == BASE else [(point, f)]
    if bench.leads:
        draw.figure(bench, name, shown)
        rows = {f"{point.name} {point.value:g}": f for point, f in shown}
        print_figures(name, rows)
        print_notes(name, points, found)
    return results(name, shown)


def sweep_points(warm: float) -> dict[str, list[Point]]:
    """By figure. `warm`: the temperature of those at one temperature above 0."""
    ssd = {"lookahead": 5, "budget": 24}
    large = {"lookahead": 5, "budget": 64}  # its ranks tell the hits of every smaller cache
    sd = {"mode": "sd", "lookahead": 5}
    heats = (0.0, 0.3, 0.7, 1.0)
    shares = (1.0, 0.75, 0.5, 0.25, 0.0)
    lookaheads = (1, 2, 3, 4, 5, 6, 8)
    sizes = tuple(SLOWER)

    def line(name: str, axis: str, values: tuple, changes: dict, **more) -> list[Point]:
        return [Point(name, value, changes | more | {axis: value}) for value in values]

    def count(*what, **more) -> list[Point]:
        return [point._replace(seeds=8, counted=True) for point in line(*what, **more)]

    return {
        "timeline": [Point("SD", 0, sd), Point("SSD", 0, ssd)],
        "fan-out": count("paper", "temperature", (0.0, 0.7, 1.0), large)
        + count("public noise", "temperature", (0.7, 1.0), large, public_noise=True),
        "shape": count(BASE, "temperature", heats, large)
        + line("geometric, measured", "temperature", heats, ssd)
        + line("SD", "temperature", heats, sd),
        "downweight": count("budget 24", "downweight", shares, ssd, temperature=warm)
        + line("budget 24, measured", "downweight", (1.0, 0.5, 0.0), ssd, temperature=warm)
        + count("budget 64", "downweight", shares, large, temperature=warm),
        "noise": line("paper", "temperature", heats, ssd)
        + line("public noise", "temperature", heats, ssd, public_noise=True),
        "batch": line("neural backup", "batch_size", sizes, ssd)
        + line("lookup backup", "batch_size", sizes, ssd, backup="lookup")
        + line("random backup", "batch_size", sizes, ssd, backup="random"),
        "frontier": line("AR", "batch_size", sizes, {"mode": "ar"})
        + line("SD", "batch_size", sizes, sd) + line("SSD", "batch_size", sizes, ssd),
        "lookahead": line("SSD", "lookahead", lookaheads, {"budget": 24})
        + line("SD", "lookahead", lookaheads, {"mode": "sd"}),
        "budget": count(BASE, "temperature", (0.0, warm), large)
        + line("greedy, measured", "budget", (6, 24, 64), large)
        + line("sampled, measured", "budget", (6, 24, 64), large, temperature=warm)}


def other_caches(bench: Bench, name: str, point: Point, f: Figures) -> list[tuple[Point, Figures]]:
    """What caches of other shapes and budgets would have held of the very same outcomes, from the
    ranks counted with a budget of 64."""
    K = f["lookahead"]
    if name == "shape":
        last = ",".join(["0"] * K + ["24"])
        caches = [(line, point.value, policy, 24) for line, policy in (
            ("geometric", "geometric"), ("uniform", "uniform"), ("all accepted only", last))]
    else:
        line = "sampled" if point.value else "greedy"
        caches = [(line, budget, "geometric", budget) for budget in (0, 6, 12, 18, 24, 36, 48, 64)]
    others = []
    for line, value, policy, budget in caches:
        shape = fan_out_shape(policy, budget, K, bench.settings.acceptance_rate,
                              bench.settings.miss_exponent)
        E = f["tokens_per_round"]
        held = {"hit_rate": counted_hit_rate(rank_table(f), shape), "E_hit": E, "E_miss": E}
        others.append((Point(line, value, {}), at_pace(bench.settings, f | held)))
    return others


def print_notes(name: str, points: list[Point], found: list[Figures]) -> None:
    """The flags that fit this pair; Theorem 17's b* from what was measured at batch size 1."""
    alone = {point.name: f for point, f in zip(points, found) if point.value == 1}
    for point, f in zip(points, found) if name == "fan-out" else ():
        ranks = rank_table(f)
        print(f"  {point.name} {point.value:g}: --acceptance-rate "
              f"{counted_acceptance_rate(ranks):.2f} --miss-exponent "
              f"{fit_power_law(counted_miss_rates(ranks)):.2f} ({int(ranks.sum())} tokens)")
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


def results(sweep: str, shown: list[tuple[Point, Figures]]) -> list[Figures]:
    """For --out; without lists."""
    return [{"sweep": sweep, "name": point.name, "value": point.value, "with": point.changes,
             "figures": {key: value for key, value in f.items() if not isinstance(value, list)}}
            for point, f in shown]


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
