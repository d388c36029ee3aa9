"""The paper's evaluation section in small (`python bench.py --help`).

SSD pays where target and draft compute on devices of their own. So by default their work is paced:
it takes five times as long as on H100s (`engine.timing.PacedClock`); all else is real. This
emulates latencies; it measures no GPU. Speed is that of decoding, without prefill.

In the figures points are measured, and lines are predicted: hits and tokens are counted in runs
without a pace, times are the pace's, and Theorem 7 (in a batch Corollary 16) gives the speed.
"""
if __name__ == "__main__":  # before the imports below, which take seconds
    from cli.launch import launch
    from cli.settings import BenchSettings
    launch(BenchSettings, "bench")  # parses, starts rank 1, and calls `main`

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

from cache import PRIMARY, speedup_over_sd_bounds, throughput
from cli.job import Job
from cli.settings import ROOT, SWEEPS, BenchSettings, Settings, open_for_writing
from cli.stats import Stats, theorem_7
from engine.counts import counted_hit_rate, fit_shape
from engine.errors import UserError
from figures import draw
from saguaro import Decoder, batches_of, plan, warm_up, workers

NUM_PROMPTS = 12
SAMPLES = 4  # of each prompt in the comparison, at temperatures above 0; no paced point has more
FEW = (NUM_PROMPTS, 2)  # prompts and samples of each, to choose K; and of a figure, except:
TEXTS = {"timeline": (1, 1)} | dict.fromkeys(("fan-out", "shape", "downweight", "batch"), (16, 6))
SLOWER = {1: 1, 2: 1, 4: 2, 8: 3, 16: 5}  # the pace that two cores can keep, by batch size
LOOKAHEADS = range(3, 9)  # among which each line of the comparison has its best
LARGEST = 64  # budget: so many guesses tell the hits of every smaller cache
LINES = {  # of the comparison: changes of settings
    "AR": {"mode": "ar"},
    "SD": {"mode": "sd"},
    "SSD": {"budget": 24},
    "SSD, budget 64": {"budget": 64},
    "SSD, look-up backup": {"budget": 24, "backup": "lookup"}}
SAMPLED_LINES = {
    "SSD, budget 64, C = 0.75": {"budget": 64, "downweight": 0.75}}
COMPARED = ("tokens/s", "/ AR", "/ SD", "by Theorem 7", "Cor. 9")
COLUMNS = {  # and how they are headed
    "lookahead": "K", "tokens/s": "tokens/s", "tokens_per_round": "a round", "acceptance_rate": "a",
    "hit_rate": "hits", "T_v in ms": "T_v", "T_p": "T_p", "T_b": "T_b",
    "verifier_utilisation": "util", "measured / Theorem 7": "/ Thm 7", "pace_kept": "kept"}
Metrics = dict[str, Any]  # see `metrics_of`


class Point(NamedTuple):
    """One way of decoding: a row of a table, a point of a figure."""
    name: str                # of its line
    value: Any               # on the axis
    changes: dict[str, Any]  # of settings
    counted: bool = False    # not measured: Theorem 7 on what is counted without a pace


# ---- decoding ----

class Bench:
    """Rank 0 holds the target and SD's draft, rank 1 SSD's draft. Both go through the same points
    in the same order, and get the same metrics."""

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
        largest = settings.to_settings(lookahead=max(LOOKAHEADS), budget=LARGEST)
        for models in (self.models, self.sd_models):  # buffers, with graphs, that serve all points
            target, draft = workers(largest, models)
            if target:
                target.model.allocate(max(SLOWER), self.job.max_length, scratch=largest.lookahead)
            if draft:
                draft.allocate(max(SLOWER), self.job.max_length)
        self.decoders = {}  # by what is decoded, and how
        self.done = []

    def texts(self, num_prompts: int, samples: int) -> list[list[int]]:
        """The first prompts, `samples` times: each time 8 tokens shorter, so that texts differ."""
        return [prompt[:max(1, len(prompt) - 8 * sample)]
                for sample in range(1 if self.settings.quick else samples)
                for prompt in self.prompts[:num_prompts]]

    def measure(self, points: list[Point], texts: list[list[int]]) -> list[Metrics]:
        """The metrics of every point. What was decoded before is not decoded again."""
        decoders = [self.decoder(point, texts) for point in points]
        new = [decoder for decoder in dict.fromkeys(decoders) if decoder not in self.done]
        if new:
            self.decode_in_turns(new, texts)
        self.done += new
        found = [None]
        if self.leads:
            found = [[metrics_of(point, self.settings_of(point), decoder.stats)
                      for point, decoder in zip(points, decoders)]]
        dist.broadcast_object_list(found, 0)
        return found[0]

    def settings_of(self, point: Point) -> Settings:
        pace = [SLOWER[point.changes.get("batch_size", 1)] * ms for ms in self.settings.pace]
        return self.settings.to_settings(
            ignore_eos=True, max_new_tokens=self.settings.max_new_tokens, pace=pace,
            **point.changes)

    def decoder(self, point: Point, texts: list[list[int]]) -> Decoder:
        """The decoder whose run tells of this point. Points with the same settings and texts, such
        as those that are counted with the `LARGEST` budget, share it."""
        settings = self.settings_of(point)
        if point.counted:
            settings = to_count(settings)
        key = f"{settings} {len(texts)}"
        if key not in self.decoders:
            models = (self.sd_models, None)
            if settings.mode == "ssd":
                models = (self.models, self.job.placement)
            if self.job.placement.any_gpu and (self.leads or settings.mode == "ssd"):
                warm_up(settings, *models, texts)
            self.decoders[key] = Decoder(settings, *models)
        return self.decoders[key]

    def decode_in_turns(self, decoders: list[Decoder], texts: list[list[int]]) -> None:
        """A batch with every decoder, then the next. Rank 1 has no part in AR and SD."""
        batches = []
        for decoder in decoders:
            own = texts[:NUM_PROMPTS * SAMPLES if any(decoder.settings.pace) else None]
            if decoder.settings.mode == "ar":  # its speed is that of any text
                own = texts[:NUM_PROMPTS]
            batches.append(batches_of(own, decoder.settings.batch_size))
        look = {"leave": False}
        if not sys.stderr.isatty():
            look = {"bar_format": "batch {n} of {total}, {elapsed}\n", "mininterval": 20}
        for turn in tqdm(list(zip_longest(*batches)), disable=not self.leads, **look):
            for decoder, batch in zip(decoders, turn):
                if batch and (self.leads or decoder.settings.mode == "ssd"):
                    decoder(batch)
                # no rank begins while the other is still at work
                dist.barrier(self.job.placement.patient_group)


# ---- from what was decoded to a point ----

def largest_tells(settings: Settings) -> bool:
    """True if what is drafted does not depend on the cache. Then one run with the `LARGEST` budget
    tells the tokens of a round and, by its counts of guesses, the hits of every smaller cache."""
    return settings.mode != "ar" and settings.backup == "neural" and settings.downweight == 1


def to_count(settings: Settings) -> Settings:
    """The settings to decode with in order to count the hits and tokens of `settings`."""
    settings = replace(settings, pace=(0.0, 0.0), batch_size=8)
    if largest_tells(settings):
        settings = replace(settings, mode="ssd", budget=LARGEST, fan_out="geometric",
                           acceptance_rate=0.8, miss_exponent=1.0)
    return settings


def metrics_of(point: Point, settings: Settings, stats: Stats) -> Metrics:
    """The metrics of one point, by the names the axes use. Where the pace is slower for a batch,
    speeds are shown as if it were not."""
    rows = settings.batch_size
    slower = SLOWER[rows] if any(settings.pace) else 1
    f = stats.summary()
    f |= {"T_v in ms": 1000 * stats.mean_seconds("verify"), "spans": stats.spans,
          "guess_counts": torch.tensor(stats.guess_counts)}
    if point.counted:
        f = predicted(settings, f, stats.prefill_tokens)
    by_theorem_7 = 1000 * slower * rows * theorem_7(f, rows) / f["T_v in ms"]
    speed = by_theorem_7
    if not point.counted:  # by the rounds in which all rows are active
        rounds = [(tokens, seconds) for active, tokens, seconds in stats.log if active == rows]
        tokens, seconds = map(sum, zip(*rounds))
        speed = slower * tokens / seconds
    return f | {
        "name": point.name, "value": point.value, "counted": point.counted, "with": point.changes,
        "hit_rate": f["hit_rate"] if settings.mode == "ssd" else None,  # None draws no line
        "lookahead": 0 if settings.mode == "ar" else settings.lookahead, "C": settings.downweight,
        "budget": settings.budget, "temperature": settings.temperature, "batch size": rows,
        "backup": settings.backup, f"hit rate, {settings.backup} backup": f["hit_rate"],
        "tokens/s": speed, "Theorem 7": by_theorem_7,
        "tokens a verification": speed / slower / rows * f["T_v in ms"] / 1000,  # of one row
        "measured / Theorem 7": None if point.counted else speed / by_theorem_7}


def predicted(settings: Settings, f: Metrics, num_texts: int) -> Metrics:
    """The values that Theorem 7 takes: hits and tokens as counted, times by the pace. The counts of
    guesses leave out round 0 of each text: its outcome has k = 0, and the first guess is right.
    Where T_p > 1, misses take longer than the theorem assumes, see `cache.throughput`."""
    parts = {name: f.get(name) for name in ("tokens_per_round", "acceptance_rate", "hit_rate",
                                            "E_hit", "E_miss", "guess_counts")}
    if largest_tells(settings):
        table = f["guess_counts"].sum(0)
        table[0, 0] += num_texts
        parts["hit_rate"] = counted_hit_rate(table, plan(settings).fan_out[PRIMARY])
        parts["E_hit"] = f["tokens_per_round"]
        parts["E_miss"] = f["tokens_per_round"]
    target, draft = settings.pace
    K = settings.lookahead
    return parts | {"T_v in ms": target,
                    "T_p": (K + 1) * draft / target if settings.mode == "ssd" else None,
                    "T_b": K * draft / target if settings.backup == "neural" else 0.0}


# ---- the comparison ----

def comparison(bench: Bench, temperature: float) -> list[Metrics]:
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
    found = bench.measure(points, bench.texts(NUM_PROMPTS, SAMPLES if temperature else 1))
    ar, sd, *_ = found
    for f in found:
        f |= {"/ AR": f["tokens/s"] / ar["tokens/s"], "/ SD": f["tokens/s"] / sd["tokens/s"],
              "by Theorem 7": f["Theorem 7"] / sd["Theorem 7"], "Cor. 9": bounds(f, sd)}
    if bench.leads:
        print_table(f"temperature {temperature:g}", COMPARED, found)
        print_table("T_b of SD is T_SD, the drafting that SSD hides", COLUMNS, found)
    return found


def best_lookahead(bench: Bench, changes: dict[str, Any]) -> int:
    """The K with which these settings are fastest by Theorem 7 on what is counted, so the same in
    every launch. A pre-speculation may take a tenth longer than its passes."""
    points = [Point("", K, changes | {"lookahead": K}, counted=True) for K in LOOKAHEADS]
    found = bench.measure(points, bench.texts(*FEW))
    speeds = [theorem_7(f | {"T_p": 1.1 * (f["T_p"] or 0.0)}) for f in found]
    return LOOKAHEADS[speeds.index(max(speeds))]


def bounds(f: Metrics, sd: Metrics) -> str:
    """Corollary 9's bounds where it applies: the backup is the primary, T_p <= 1, and a miss is
    worth no less than a hit and no more than E_hit (1 + T_b)."""
    if not f["hit_rate"] or f["backup"] != "neural" or f["T_p"] > 1:
        return ""
    E_hit = f["E_hit"]
    T_b = f["T_b"] or 0.0
    if not E_hit <= (f["E_miss"] or E_hit) <= E_hit * (1 + T_b):
        return ""
    parts = f["hit_rate"], E_hit, sd["tokens_per_round"], sd["T_b"], T_b
    return "{:.2f}-{:.2f}".format(*speedup_over_sd_bounds(*parts))


# ---- sweeps: the figures ----

def sweep(bench: Bench, name: str) -> list[Metrics]:
    """Measure and count the points of a figure, and draw it."""
    settings = bench.settings
    texts = bench.texts(*TEXTS.get(name, FEW))
    points_of = sweep_points(settings)
    points = [point for point in points_of[name]
              if point.changes.get("batch_size", 1) <= len(bench.prompts)]
    if name == "shape":  # for each temperature the best shape, by the a and r counted there
        fits = {f["value"]: fit_shape(f["guess_counts"][PRIMARY])
                for f in bench.measure(points_of["fan-out"], texts)}
        points = [point._replace(changes=point.changes | fits[point.value]) for point in points]
    found = bench.measure(points, texts)
    if bench.leads:
        draw.figure(bench, name, found)
        if found:
            print_table(name, ("value", "counted", *COLUMNS), found)
        for f in found if name == "fan-out" else ():
            a, r = fit_shape(f["guess_counts"][PRIMARY]).values()
            print(f"  {f['value']:g}: --acceptance-rate {a:.2f} --miss-exponent {r:.2f}")
    return found


def sweep_points(settings: BenchSettings) -> dict[str, list[Point]]:
    """The points of every figure."""
    warm = settings.temperature or 1.0  # of figures at one temperature
    heats = (0.0, 0.3, 0.7, 1.0)
    shares = (1.0, 0.75, 0.5, 0.25, 0.0)
    lookaheads = range(1, 9)
    sizes = tuple(SLOWER)

    def line(name: str, axis: str, counted: tuple, measured: tuple, **changes) -> list[Point]:
        changes = {"lookahead": 7, "budget": 24} | changes  # as the authors' engine
        if not any(settings.pace):  # nobody knows how long a pass takes, so all is measured
            measured = counted or measured
            counted = ()
        return ([Point(name, value, changes | {axis: value}, counted=True) for value in counted]
                + [Point(name, value, changes | {axis: value}) for value in measured])

    return {
        "timeline": line("SD", "temperature", (), (0.0,), mode="sd", lookahead=5)
        + line("SSD", "temperature", (), (0.0,)),
        "fan-out": line("random backup", "temperature", heats, (), backup="random"),
        "shape": [point for fan_out in ("geometric", "uniform") for backup in ("neural", "random")
                  for point in line(fan_out, "temperature", heats, (), fan_out=fan_out,
                                    backup=backup)],
        "downweight": line("SSD", "downweight", shares, (1.0, 0.5), temperature=warm),
        "residual": [],
        "batch": [point for backup in ("neural", "random")
                  for point in line(f"{backup} backup", "batch_size", sizes, sizes, lookahead=3,
                                    temperature=warm, backup=backup)],
        "lookahead": line("SSD", "lookahead", lookaheads, (3, 5, 7))
        + line("SD", "lookahead", lookaheads, (3, 5, 7), mode="sd")}


# ---- tables; Corollary 16 against logs of GPUs ----

def print_table(title: str, columns: tuple[str, ...], rows: list[Metrics]) -> None:
    """Columns as wide as they must be; names are flush left."""
    def cell(value) -> str:
        if value is None:
            return ""
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = [["", *(COLUMNS.get(name, name) for name in columns)]]
    lines += [[cell(row.get(name)) for name in ("name", *columns)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    print(f"\n{title}", flush=True)
    for first, *others in lines:
        print(" ".join(["", first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip())


def predict() -> None:
    """Print how long the rounds of published logs take by Corollary 16, and as measured."""
    columns = ("T", "b", "K", "F", "p_hit", "E_hit", "E_miss", "verification", "round",
               "by Cor. 16", "difference", "tokens/s", "tokens/s by it")
    for log in json.loads((ROOT / "figures/logs.json").read_text()).values():
        for f in log["rounds"]:
            T_v = f["verification"]
            T_p = f["pre-speculation"] / T_v
            T_b = f["backup"] / T_v
            tokens = f["p_hit"] * f["E_hit"] + (1 - f["p_hit"]) * f["E_miss"]
            speed = throughput(f["p_hit"], f["E_hit"], f["E_miss"], T_p, T_b, f["b"]) / T_v
            f |= {"by Cor. 16": tokens / speed, "difference": f["round"] - tokens / speed,
                  "tokens/s by it": 1000 * f["b"] * speed}
        print_table(f"{log['pair']}; times in ms", columns, log["rounds"])


def main(settings: BenchSettings) -> None:
    if settings.predict:
        return predict()
    if settings.out is not None:  # refuse at once what could not be written at the end
        open_for_writing("--out", settings.out, "a", settings.prompts).close()
    if settings.sweep:
        open_for_writing("--figures", f"{settings.figures}/{SWEEPS[0]}.svg", "a").close()
    bench = Bench(settings)
    names = settings.sweep or ("comparison",)
    if "all" in names:
        names = ("comparison", *SWEEPS)
    if bench.leads and not settings.quick:
        minutes = sum(12 if name == "comparison" else 2.5 for name in names)
        print(f"about {minutes:.0f} minutes on two quiet cores", file=sys.stderr, flush=True)
    results = []
    for name in names:
        if name == "comparison":
            found = [*comparison(bench, 0.0), *comparison(bench, settings.temperature or 1.0)]
        else:
            found = sweep(bench, name)
        results += [{"sweep": name} | f for f in found]
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
