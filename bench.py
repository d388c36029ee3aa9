"""The paper's evaluation section in small (`python bench.py --help`).

SSD pays where target and draft compute on devices of their own. So by default every pass is paced:
it takes four times as long as others have measured on H100s, and everything else is real: the
processes, messages and overlap, the acceptance and the hits of a real pair, the wall clock. This
emulates latencies; it does not measure GPUs. It assumes that a pass takes as long for one token as
for hundreds, as on a GPU while weights, not arithmetic, bound it.

Speed is that of decoding, without prefill. In the figures points are measured, and lines are
predicted: hits and tokens are counted in runs without a pace, times are those of the pace, and
Theorem 7 (in a batch Corollary 16), `cache.throughput`, gives the speed.
"""
from runtime.launch import launch
from runtime.settings import SWEEPS, BenchSettings, Settings, UserError, open_for_writing

if __name__ == "__main__":
    launch(BenchSettings, "bench")  # parses first, then imports this module: torch takes seconds

import bisect
import json
import platform
import sys
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm

from cache import expected_tokens, fan_out_shape, speedup_over_sd_bounds, throughput
from figures import draw
from runtime.job import Job
from runtime.stats import (Stats, counted_acceptance_rate, counted_hit_rate, counted_miss_rates,
                           fit_power_law, theorem_7)
from saguaro import Decoder, warm_up, workers

SAMPLES = 6  # of each prompt, at temperatures above 0
SLOWER = {1: 1, 2: 2, 4: 3, 6: 5, 12: 9}  # the pace that two cores can keep, by batch size
NUM_PROMPTS = {"timeline": 1, "batch": 12, "frontier": 12}  # of a figure; of others 6
LOOKAHEADS = (3, 4, 5, 6)  # among which each line of the comparison has its best
SLACK = 1.1  # where K is chosen: a pre-speculation may take so many times its paced passes
LARGEST = 64  # budget: the ranks of so many guesses tell the hits of every smaller cache
LINES = {  # of the comparison: changes of settings
    "AR": {"mode": "ar"},
    "SD": {"mode": "sd"},
    "SSD": {"budget": 24},
    "SSD, budget 64": {"budget": 64},
    "SSD, look-up backup": {"budget": 24, "backup": "lookup"}}
SAMPLED_LINES = {
    "SSD, budget 64, C = 0.75": {"budget": 64, "downweight": 0.75},
    "SSD, public noise": {"budget": 24, "public_noise": True}}
PAPER = {("SSD", 0): "1.58 x SD, 4.68 x AR"}  # 70B / 1B, mean of four data sets
COMPARED = ("tokens/s", "/ AR", "/ SD", "by Theorem 7", "Cor. 9", "paper")
COLUMNS = ("lookahead", "tokens/s", "tokens_per_round", "acceptance_rate", "hit_rate", "E_hit",
           "E_miss", "T_v in ms", "T_p", "T_b", "verifier_utilisation", "measured / Theorem 7",
           "pace_kept")
Figures = dict[str, Any]  # see `figures_of`


class Point(NamedTuple):
    """One way of decoding: a row of a table, a point of a figure."""
    name: str                # of its line
    value: Any               # on the axis
    changes: dict[str, Any]  # of settings
    counted: bool = False    # not measured: Theorem 7 on what is counted without a pace


# ---- decoding ----

class Bench:
    """Rank 0 holds the target and SD's draft, rank 1 SSD's draft. Both go through the same points
    in the same order, and get the same figures."""

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
        largest = settings.to_settings(lookahead=8, budget=LARGEST, fan_out="geometric")
        for models in (self.models, self.sd_models):  # buffers, with graphs, that serve all points
            target, draft = workers(largest, models)
            if target:
                target.model.allocate(max(SLOWER), self.job.max_length, scratch=largest.lookahead)
            if draft:
                draft.allocate(max(SLOWER), self.job.max_length)
        self.decoders = {}  # that are done, by settings and number of prompts

    def figures(self, points: list[Point], num_prompts: int | None = None) -> list[Figures]:
        """Of every point, by the first prompts or all. What was decoded before is not decoded
        again."""
        prompts = self.prompts[:num_prompts]
        keys = []
        new = {}
        for point in points:
            settings = self.settings_of(point)
            if point.counted:
                settings = to_count(settings)
            key = f"{settings} {len(prompts)}"
            if key not in self.decoders and key not in new:
                new[key] = self.decoder(settings, prompts)
            keys.append(key)
        self.decode_in_turns(list(new.values()), prompts)
        self.decoders |= new
        found = [self.leads and [
            figures_of(point, self.settings_of(point), self.decoders[key].stats)
            for point, key in zip(points, keys)]]
        dist.broadcast_object_list(found, 0)
        return found[0]

    def settings_of(self, point: Point) -> Settings:
        pace = [SLOWER[point.changes.get("batch_size", 1)] * ms for ms in self.settings.pace]
        return self.settings.to_settings(
            ignore_eos=True, max_new_tokens=self.settings.max_new_tokens, pace=pace,
            **point.changes)

    def decoder(self, settings: Settings, prompts: list[list[int]]) -> Decoder:
        models = (self.sd_models, None)
        if settings.mode == "ssd":
            models = (self.models, self.job.placement)
        if self.job.placement.any_gpu and (self.leads or settings.mode == "ssd"):
            warm_up(settings, *models, prompts)
        return Decoder(settings, *models)

    def decode_in_turns(self, decoders: list[Decoder], prompts: list[list[int]]) -> None:
        """All prompts, several times where the texts are random and that matters. Rank 1 has no
        part in AR and SD."""
        batches = []
        for decoder in decoders:
            settings = decoder.settings
            random = settings.temperature > 0 and settings.mode != "ar"
            texts = prompts * (SAMPLES if random and not self.settings.quick else 1)
            batches.append([texts[start:start + settings.batch_size]
                            for start in range(0, len(texts), settings.batch_size)])
        silent = None if self.leads else True
        for turn in tqdm(list(zip_longest(*batches)), leave=False, disable=silent):
            for decoder, batch in zip(decoders, turn):
                self.set_pace(decoder.settings.pace)
                if batch and (self.leads or decoder.settings.mode == "ssd"):
                    decoder(batch)
                dist.barrier()  # no rank begins while the other is still at work

    def set_pace(self, pace: tuple[float, float]) -> None:
        for models in (self.models, self.sd_models):
            for model, ms in zip((models.target, models.draft), pace):
                if model:
                    model.pace.seconds = ms / 1000


# ---- from what was decoded to a point ----

def ranks_tell(settings: Settings) -> bool:
    """Do the ranks of a run with the largest budget tell the hits of these settings, because what
    is drafted does not depend on the cache?"""
    return settings.mode == "ssd" and settings.backup == "neural" and settings.downweight == 1


def to_count(settings: Settings) -> Settings:
    """What is decoded to count the hits and tokens of these settings."""
    settings = replace(settings, pace=(0.0, 0.0), batch_size=6)
    if ranks_tell(settings):
        settings = replace(settings, budget=LARGEST, fan_out="geometric")
    return settings


def figures_of(point: Point, settings: Settings, stats: Stats) -> Figures:
    """Of a point, from the statistics of what was decoded for it, with all that may stand on an
    axis. Where the pace is slower for a batch, speeds are shown as if it were not."""
    rows = settings.batch_size
    slower = SLOWER[rows] if any(settings.pace) else 1
    f = stats.summary()
    table = [f.get("guess_counts", 0), f.get("guess_counts_after_backup", 0)]  # AR has no draft
    f |= {"T_v in ms": 1000 * stats.mean_seconds("verify"), "spans": stats.spans,
          "ranks": torch.tensor(table).sum(0)}
    if point.counted:
        f = predicted(settings, f, stats.row_rounds)
    by_theorem_7 = 1000 * slower * rows * theorem_7(f, rows) / f["T_v in ms"]
    speed = by_theorem_7 if point.counted else slower * f["tokens_per_second"]
    return f | {
        "name": point.name, "value": point.value, "counted": point.counted, "with": point.changes,
        "hit_rate": f["hit_rate"] if settings.mode == "ssd" else None,  # None draws no line
        "lookahead": 0 if settings.mode == "ar" else settings.lookahead, "C": settings.downweight,
        "budget": settings.budget, "temperature": settings.temperature, "batch size": rows,
        "tokens/s": speed, "tokens/s of one row": speed / rows, "Theorem 7": by_theorem_7,
        "measured / Theorem 7": None if point.counted else speed / by_theorem_7}


def predicted(settings: Settings, f: Figures, num_outcomes: int) -> Figures:
    """What Theorem 7 takes: hits and tokens as counted, and the times of the pace. The ranks leave
    out round 0, for which all guesses have k = 0: of its outcome one is right, nearly always."""
    parts = {name: f.get(name) for name in ("tokens_per_round", "acceptance_rate", "hit_rate",
                                            "E_hit", "E_miss", "ranks")}
    if ranks_tell(settings):
        shape = fan_out_shape(settings.fan_out, settings.budget, settings.lookahead,
                              settings.acceptance_rate, settings.miss_exponent)
        ranked = int(f["ranks"].sum())
        hits = ranked * counted_hit_rate(f["ranks"], shape)
        if settings.budget:
            hits += num_outcomes - ranked
        parts["hit_rate"] = hits / num_outcomes
        parts["E_hit"] = f["tokens_per_round"]
        parts["E_miss"] = f["tokens_per_round"]
    target, draft = settings.pace
    K = settings.lookahead if settings.mode != "ar" else 0
    return parts | {"T_v in ms": target,
                    "T_p": (K + 1) * draft / target if settings.mode == "ssd" else None,
                    "T_b": K * draft / target if settings.backup == "neural" else 0.0}


# ---- the comparison ----

def comparison(bench: Bench, temperature: float) -> list[Figures]:
    """AR, SD and SSD, each with its best K; unpaced with the K and the budget of the command
    line."""
    settings = bench.settings
    paced = any(settings.pace)
    lines = {mode.upper(): {"mode": mode} for mode in ("ar", "sd", "ssd")}
    if paced:
        lines = LINES | (SAMPLED_LINES if temperature else {})
    points = []
    for name, changes in lines.items():
        changes = changes | {"temperature": temperature, "lookahead": settings.lookahead}
        if paced and not settings.quick and name != "AR":
            changes["lookahead"] = best_lookahead(bench, changes)
        points.append(Point(name, temperature, changes))
    found = bench.figures(points)
    ar, sd, *_ = found
    for f in found:
        f |= {"/ AR": f["tokens/s"] / ar["tokens/s"], "/ SD": f["tokens/s"] / sd["tokens/s"],
              "by Theorem 7": f["Theorem 7"] / sd["Theorem 7"], "Cor. 9": bounds(f, sd),
              "paper": PAPER.get((f["name"], temperature))}
    if bench.leads:
        title = f"temperature {temperature:g}: {len(bench.prompts)} prompts"
        print_table(title, COMPARED, found)
        print_table("T_b of SD is T_SD, the drafting that SSD hides", COLUMNS, found)
    return found


def best_lookahead(bench: Bench, changes: dict[str, Any]) -> int:
    """The K with which these settings are fastest by what is counted, so that the choice is the
    same in every launch."""
    points = [Point("", K, changes | {"lookahead": K}, counted=True) for K in LOOKAHEADS]
    speeds = [theorem_7(f | {"T_p": SLACK * (f["T_p"] or 0.0)}) for f in bench.figures(points)]
    return LOOKAHEADS[speeds.index(max(speeds))]


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
              if point.changes.get("batch_size", 1) <= len(bench.prompts)]
    if not any(settings.pace):  # then nobody knows how long a pass takes, and all is measured
        points = [point._replace(counted=False) for point in points if point.counted] or points
    found = bench.figures(points, NUM_PROMPTS.get(name, 6))
    if bench.leads:
        draw.figure(bench, name, found)
        print_table(name, ("value", "counted", *COLUMNS), found)
        for f in found if name == "fan-out" else ():
            a = counted_acceptance_rate(f["ranks"])
            r = fit_power_law(counted_miss_rates(f["ranks"]))
            at = f"{f['name']} {f['value']:g}"
            print(f"  {at}: --acceptance-rate {a:.2f} --miss-exponent {r:.2f}")
    return found


def sweep_points(warm: float) -> dict[str, list[Point]]:
    """By figure. `warm`: the temperature of those at one temperature above 0."""
    heats = (0.0, 0.3, 0.7, 1.0)
    shares = (1.0, 0.75, 0.5, 0.25, 0.0)
    lookaheads = (1, 2, 3, 4, 5, 6, 8)
    budgets = (0, 6, 12, 18, 24, 36, 48, 64)
    sizes = tuple(SLOWER)
    some_sizes = (1, 4, 12)

    def line(name: str, axis: str, counted: tuple, measured: tuple, **changes) -> list[Point]:
        changes = {"lookahead": 5, "budget": 24} | changes
        return ([Point(name, value, changes | {axis: value}, counted=True) for value in counted]
                + [Point(name, value, changes | {axis: value}) for value in measured])

    return {
        "timeline": line("SD", "temperature", (), (0.0,), mode="sd")
        + line("SSD", "temperature", (), (0.0,)),
        "fan-out": line("paper", "temperature", (0.0, 0.7, 1.0), ())
        + line("public noise", "temperature", (0.7, 1.0), (), public_noise=True),
        "shape": line("geometric", "temperature", heats, (0.0, 1.0))
        + line("uniform", "temperature", heats, (), fan_out="uniform")
        + line("all accepted only", "temperature", heats, (), fan_out="0,0,0,0,0,24")
        + line("SD", "temperature", heats, (), mode="sd"),
        "downweight": line("budget 24", "downweight", shares, (1.0, 0.5), temperature=warm)
        + line("budget 64", "downweight", shares, (), temperature=warm, budget=64),
        "noise": line("paper", "temperature", heats, (0.0, 1.0))
        + line("public noise", "temperature", heats, (1.0,), public_noise=True),
        "batch": line("neural backup", "batch_size", sizes, some_sizes)
        + line("lookup backup", "batch_size", sizes, some_sizes, backup="lookup")
        + line("random backup", "batch_size", sizes, some_sizes, backup="random"),
        "frontier": line("AR", "batch_size", sizes, (1, 12), mode="ar")
        + line("SD", "batch_size", sizes, some_sizes, mode="sd")
        + line("SSD", "batch_size", sizes, some_sizes),
        "lookahead": line("SSD", "lookahead", lookaheads, (2, 4, 6, 8))
        + line("SD", "lookahead", lookaheads, (2, 4, 6, 8), mode="sd"),
        "budget": line("greedy", "budget", budgets, (6, 24, 64))
        + line("sampled", "budget", budgets, (24, 64), temperature=warm)}


# ---- tables ----

def print_table(title: str, columns: tuple[str, ...], rows: list[Figures]) -> None:
    """Columns as wide as they must be; names are flush left."""
    def cell(value) -> str:
        if value is None:
            return ""
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = [["", *columns]]
    lines += [[cell(row.get(name)) for name in ("name", *columns)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    print(f"\n{title}")
    for first, *others in lines:
        print("  ".join(["", first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip())


# ---- at the paper's scale, without measuring ----

def predict() -> None:
    """Theorem 7 from known settings. Seconds of a draft pass and of a verification, and the speeds
    called measured, are others'."""
    draft_pass = 0.00254
    hit_rate = 0.9
    sd_lookahead = 6
    rows = []
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
            rows.append({"name": name, "K": K, "a": a, "T_p": T_p, "SD": sd, "SSD": speed,
                         "measured": ssd, "error": f"{100 * (speed / ssd - 1):+.0f}%",
                         "SSD / SD": speed / sd, "measured / SD": ssd / sd})
    print_table("Theorem 7, tokens/s. RESULTS.md says what is known and what is assumed.",
                tuple(rows[0])[1:], rows)


def check_files(settings: BenchSettings) -> None:
    """Refuse at once what could not be written at the end."""
    if settings.out is not None:
        open_for_writing("--out", settings.out, "a").close()
    if settings.sweep:
        open_for_writing("--figures", f"{settings.figures}/{SWEEPS[0]}.svg", "a").close()


def main(settings: BenchSettings) -> None:
    if settings.predict:
        return predict()
    check_files(settings)
    bench = Bench(settings)
    results = []
    everything = "all" in settings.sweep
    if everything or not settings.sweep:
        for temperature in (0.0, settings.temperature or 1.0):
            results += [{"sweep": "comparison"} | f for f in comparison(bench, temperature)]
    for name in SWEEPS if everything else settings.sweep:
        results += [{"sweep": name} | f for f in sweep(bench, name)]
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    machine = {"machine": platform.platform(), "torch": torch.__version__,
               "transformers": transformers.__version__,
               "gpus": [torch.cuda.get_device_name(n) for n in range(num_gpus)]}
    if bench.leads:
        print(f"\n{machine}")
    if bench.leads and settings.out is not None:
        results = [{key: value for key, value in f.items()
                    if not isinstance(value, (list, torch.Tensor))} for f in results]
        with open_for_writing("--out", settings.out) as file:
            json.dump({"machine": machine, "arguments": sys.argv[1:], "results": results}, file,
                      indent=1)
