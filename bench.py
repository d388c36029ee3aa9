"""The paper's evaluation section in small.

    python bench.py                         AR, SD and SSD, greedy and sampled, paced
    python bench.py --quick                 the same, shorter
    python bench.py --sweep timeline shape  figures of the paper; "all": these tables, and each one
    python bench.py --pace 0 0              as fast as this machine computes
    python bench.py --predict               no measurement: Theorem 7 at the paper's scale

SSD is worth something where target and draft compute on devices of their own. So by default every
pass is paced: it takes as long as on the paper's hardware, four times slower, and everything else
is real: processes, messages, overlap, the acceptance and the hits of a real pair, the wall clock.
This emulates latencies that others have measured; it does not measure GPUs. It assumes that a pass
takes as long for one token as for hundreds, as on a GPU while weights, not arithmetic, bound it.

The points of a comparison take turns, batch by batch. Speed is that of decoding: prefill, and the
token it yields, are apart. In units of one verification, of T_v seconds, Theorem 7 (in a batch
Corollary 16) says

    speed = (p_hit E_hit + (1-p_hit) E_miss) / (p_hit max(1, T_p) + (1-p_hit) (1 + T_b)) / T_v;

plain SD is its case p_hit = 0 with T_b = T_SD. What is counted (acceptance, hits) does not depend
on a clock: a run is a function of its seed and its flags. So points that are only to be counted
(`clock=False`) are decoded unpaced, and have the speed that Theorem 7 gives for the pace.
"""
from runtime.launch import launch
from runtime.settings import SWEEPS, BenchSettings, Settings, UserError, write_json

if __name__ == "__main__":
    launch(BenchSettings, "bench")  # parses first, then imports this module: torch takes seconds

import bisect
import platform
import time
from dataclasses import asdict
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm

from cache import (counted_acceptance_rate, counted_hit_rate, counted_miss_rates, expected_tokens,
                   fan_out_shape, fit_power_law, speedup_over_sd_bounds, throughput)
from figures import draw
from runtime.model import Pace
from runtime.placement import Job
from runtime.screen import Stats
from saguaro import Decoder

SEEDS = 3          # of a sampled point
SWEEP_PROMPTS = 6  # of a sweep, the first ones
TABLE_BUDGET = 64  # of the runs that count the ranks of bonus tokens, for every smaller cache
HEAT = (0.0, 0.3, 0.7, 1.0)
SLOWER = {1: 1, 2: 2, 4: 3, 8: 6, 16: 12}  # the pace that two cores can keep, by batch size
PAPER = {"SSD": "1.58 x SD, 4.68 x AR"}  # 70B / 1B, greedy, mean of four data sets
COLUMNS = ("tokens_per_round", "acceptance_rate", "hit_rate", "E_hit", "E_miss", "T_v in ms", "T_p",
           "T_b", "verifier_utilisation", "Theorem 7", "measured / Theorem 7", "pace_kept")
Figures = dict[str, Any]


# ---- measuring ----

class Point(NamedTuple):
    """One way of decoding: a row of a table, a point of a figure."""
    name: str                # of its line
    value: Any               # on the axis
    changes: dict[str, Any]  # of settings
    clock: bool = True       # speed: measured in wall clock, or Theorem 7's


class Bench:
    """Target and draft on rank 0, the draft on rank 1. Both ranks go through the same points in the
    same order, and get the same figures."""

    def __init__(self, settings: BenchSettings):
        self.settings = settings
        self.job = Job(settings, mode="ssd")
        self.prompts = self.job.prompts[:3 if settings.quick else None]
        if self.job.placement.world_size != 2:
            raise UserError("bench.py measures one target rank and one draft rank: start two")
        self.leads = self.job.placement.rank == 0
        self.models = self.job.load()
        self.sd_models = self.models
        self.counted = {}  # figures of points without a clock
        if self.leads:
            self.sd_models = self.models._replace(draft=self.job.load_draft())

    def settings_of(self, point: Point, seed: int = 0) -> Settings:
        given = dict(ignore_eos=True, max_new_tokens=self.settings.max_new_tokens,
                     seed=self.settings.seed + seed)
        return self.settings.to_settings(**given | point.changes)

    def pace_of(self, point: Point) -> tuple[float, float]:
        """Of target and draft, in seconds."""
        slower = SLOWER.get(point.changes.get("batch_size", 1), 12)
        target, draft = self.settings.pace
        return slower * target / 1000, slower * draft / 1000

    def measure(self, points: list[Point]) -> list[Figures]:
        """The figures of every point. What was counted before is not decoded again."""
        keys = [(len(self.prompts), point.clock, *sorted(point.changes.items()))
                for point in points]
        new = {key: point for key, point in zip(keys, points) if key not in self.counted}
        found = dict(zip(new, self.decode_in_turns(list(new.values()))))
        self.counted |= {key: found[key] for key, point in new.items() if not point.clock}
        return [(found | self.counted)[key] for key in keys]

    def decode_in_turns(self, points: list[Point]) -> list[Figures]:
        """Decode all prompts at every point. A sampled point has several seeds."""
        turns = []
        results = [(Stats(), []) for _ in points]  # and the speeds of all turns
        for point, result in zip(points, results):
            for seed in range(self.num_seeds(point)):
                settings = self.settings_of(point, seed)
                decoder = self.decoder(settings)
                for start in range(0, len(self.prompts), settings.batch_size):
                    turns.append((start, seed, point, settings, decoder, result))
        turns.sort(key=lambda turn: turn[:2])
        for start, _, point, settings, decoder, result in tqdm(
                turns, unit="turn", leave=False, disable=None if self.leads else True):
            self.take_turn(start, point, settings, decoder, *result)
        found = [None]
        if self.leads:
            found = [[self.figures(point, *result) for point, result in zip(points, results)]]
        dist.broadcast_object_list(found, 0)
        return found[0]

    def num_seeds(self, point: Point) -> int:
        """Several where texts and hits depend on it."""
        settings = self.settings_of(point)
        once = settings.temperature == 0 or settings.mode == "ar" or self.settings.quick
        return 1 if once else SEEDS

    def decoder(self, settings: Settings) -> Decoder | None:
        """None on rank 1 where rank 0 decodes alone."""
        if settings.mode == "ssd":
            return Decoder(settings, self.models, self.job.placement)
        return Decoder(settings, self.sd_models) if self.leads else None

    def take_turn(self, start: int, point: Point, settings: Settings, decoder: Decoder | None,
                  stats: Stats, speeds: list[float]) -> None:
        batch = [self.prompts[(start + i) % len(self.prompts)] for i in range(settings.batch_size)]
        self.set_pace(self.pace_of(point) if point.clock else (0.0, 0.0))
        if decoder:
            decoder.stats = stats
            tokens = stats.tokens - stats.prefill_tokens
            seconds = stats.seconds
            decoder(batch)
            if self.leads:
                tokens = stats.tokens - stats.prefill_tokens - tokens
                speeds.append(tokens / (stats.seconds - seconds))
        dist.barrier()  # no rank begins while the other is still at work

    def of_any_cache(self, f: Figures, policy: str, budget: int) -> Figures:
        """Hit rate and speed (Theorem 7) that another cache would have had on the outcomes counted
        in `f`; after a neural backup as after the primary."""
        s = self.settings
        ranks = rank_table(f)
        K = f["lookahead"]
        shape = fan_out_shape(policy, budget, K, s.acceptance_rate, s.miss_exponent)
        hit_rate = counted_hit_rate(ranks, shape)
        E = f["tokens_per_round"]
        speed = 1000 * throughput(hit_rate, E, E, f["T_p"], f["T_b"]) / f["T_v in ms"]
        return {"hit_rate": hit_rate, "tokens/s": speed}

    def trace(self, point: Point) -> Figures:
        """The first prompt: spans of work on both ranks, (work, start, end) in seconds, and the
        (time, count, source) of new tokens."""
        decoder = self.decoder(self.settings_of(point))
        new_tokens = []
        workers = [decoder.target, decoder.speculator] if decoder else []
        workers = [worker for worker in workers if worker]
        for worker in workers:
            worker.watch.spans = []
        self.set_pace(self.pace_of(point))
        if decoder:
            decoder(self.prompts[:1], lambda row, tokens, source: new_tokens.append(
                (time.perf_counter(), len(tokens), source)))
        spans = [None, None]
        dist.all_gather_object(spans, [span for worker in workers for span in worker.watch.spans])
        return {"spans": spans[0] + spans[1], "new_tokens": new_tokens}

    def set_pace(self, pace: tuple[float, float]) -> None:
        """Of target and draft, in seconds."""
        for models in (self.models, self.sd_models):
            for model, seconds in zip((models.target, models.draft), pace):
                if model:
                    model.pace = Pace(seconds)

    def figures(self, point: Point, stats: Stats, speeds: list[float]) -> Figures:
        """`Stats.summary`, and Theorem 7 with these parts."""
        settings = self.settings_of(point)
        found = stats.summary()
        rows = settings.batch_size
        T_v = stats.mean_seconds("verify")
        T_p = found["T_p"] or 0.0
        T_b = found["T_b"] or 0.0
        paced = any(self.settings.pace)
        if paced and not point.clock:
            T_v, draft_pass = self.pace_of(point)
            T_p, T_b = theory_times(settings, draft_pass / T_v)
        if settings.mode != "ssd":
            found["hit_rate"] = None
        parts = [found[key] or 0.0 for key in ("hit_rate", "E_hit", "E_miss")]
        predicted = rows * throughput(*parts, T_p, T_b, rows) / T_v
        speed = found["tokens_per_second"] if point.clock or not paced else predicted
        slower = SLOWER.get(rows, 12) if paced else 1  # speeds are shown as at the pace itself
        return found | {
            "tokens/s": slower * speed, "tokens/s of one row": slower * speed / rows,
            "Theorem 7": slower * predicted, "measured / Theorem 7": speed / predicted,
            "T_v in ms": 1000 * T_v, "T_p": T_p, "T_b": T_b, "speeds": speeds,
            "lookahead": settings.lookahead, "measured": point.clock or not paced}


def theory_times(settings: Settings, draft_pass: float) -> tuple[float, float]:
    """T_p and T_b of passes that take `draft_pass` verifications each."""
    K = settings.lookahead
    if settings.mode == "ar" or settings.backup != "neural":
        return (K + 1) * draft_pass, 0.0
    return (K + 1) * draft_pass, K * draft_pass


def best_of(bench: Bench, name: str, value: Any, changes: dict[str, Any],
            tried: list[dict[str, Any]]) -> Point:
    """The point of highest speed by Theorem 7. As it is counted, not timed, every launch chooses
    the same."""
    points = [Point(name, value, changes | more, clock=False) for more in tried]
    if len(points) == 1:
        return points[0]._replace(clock=True)
    speeds = [found["tokens/s"] for found in bench.measure(points)]
    return points[speeds.index(max(speeds))]._replace(clock=True)


# ---- the comparison ----

def comparison(bench: Bench, temperature: float) -> list[Figures]:
    """AR, SD and SSD, each with the settings among which it has its best."""
    heat = {"temperature": temperature}
    paced = any(bench.settings.pace)
    sd = [dict(lookahead=K) for K in (3, 4, 5)]
    ssd = [dict(lookahead=K, budget=24) for K in (4, 5, 6)]
    larger = [dict(lookahead=K, budget=64, downweight=C) for K in (4, 5)
              for C in ((1.0, 0.75) if temperature else (1.0,))]
    lines = {"AR": ({"mode": "ar"}, [{}]), "SD": ({"mode": "sd"}, sd),
             "SSD": ({}, ssd), "SSD, budget 64": ({}, larger),
             "SSD, look-up backup": ({"backup": "lookup"}, ssd)}
    if temperature:
        lines["SSD, public noise"] = ({"public_noise": True}, ssd)
    if not paced:  # one row each: here SSD wants a smaller tree
        lines = {"AR": ({"mode": "ar"}, [{}])}
        lines |= {f"SD, K = {K}": ({"mode": "sd"}, [dict(lookahead=K)]) for K in (3, 4)}
        lines |= {f"SSD, K = {K}": ({}, [dict(lookahead=K, budget=12)]) for K in (3, 4)}
    points = []
    for name, (changes, tried) in lines.items():
        if bench.settings.quick:
            tried = tried[1:2] or tried
        points.append(best_of(bench, name, temperature, heat | changes, tried))
    found = bench.measure(points)
    if bench.leads:
        show_comparison(bench, points, found)
    return results("comparison", points, found)


def show_comparison(bench: Bench, points: list[Point], found: list[Figures]) -> None:
    by_name = {point.name: figures for point, figures in zip(points, found)}
    sd = max((f for name, f in by_name.items() if name.startswith("SD")),
             key=lambda f: f["tokens/s"])
    rows = []
    for point, f in zip(points, found):
        changes = point.changes
        chosen = ", ".join(f"{short} {changes[key]}" for short, key in (
            ("K", "lookahead"), ("budget", "budget"), ("C", "downweight")) if key in changes)
        rows.append([point.name, chosen, f["tokens/s"], against(f, by_name["AR"]),
                     against(f, sd), f["Theorem 7"] / sd["Theorem 7"], bounds(f, sd),
                     PAPER.get(point.name, "")])
    settings = bench.settings
    print_table(
        f"temperature {points[0].value:g}: {len(bench.prompts)} prompts, "
        f"{settings.max_new_tokens} tokens each", [
            "", "best with", "tokens/s", "/ AR", "/ SD", "by Theorem 7", "Cor. 9", "paper"], *rows)
    print_table("T_b of SD is T_SD, the drafting that SSD hides", ["", *map(draw.words, COLUMNS)],
                *([point.name, *map(f.get, COLUMNS)] for point, f in zip(points, found)))


def against(ours: Figures, theirs: Figures) -> str:
    """The ratio of speeds, and a 95% interval: means of resampled ratios, paired by prompt. A
    method without seeds of its own is paired with each of the other's."""
    if ours is theirs:
        return "1"
    ratio = ours["tokens/s"] / theirs["tokens/s"]
    speeds = [torch.tensor(f["speeds"]) for f in (ours, theirs)]
    n = max(map(len, speeds))
    over, under = (each.repeat_interleave(n // len(each)) for each in speeds)
    paired = over / under
    generator = torch.Generator().manual_seed(0)
    resampled = paired[torch.randint(n, (2000, n), generator=generator)].mean(1)
    low, high = resampled.quantile(torch.tensor([0.025, 0.975])).tolist()
    return f"{ratio:.2f} ({low:.2f}-{high:.2f})"


def bounds(f: Figures, sd: Figures) -> str:
    """Corollary 9's, where it applies: the backup is the primary, T_p <= 1, and a miss is worth no
    more than a hit: E_miss <= E_hit (1 + T_b)."""
    if not f["hit_rate"] or f["backup"] != "neural" or f["T_p"] > 1:
        return ""
    if (f["E_miss"] or 0.0) > f["E_hit"] * (1 + f["T_b"]):
        return ""
    return "{:.2f}-{:.2f}".format(*speedup_over_sd_bounds(
        f["hit_rate"], f["E_hit"], sd["tokens_per_round"], sd["T_b"]))


def results(sweep: str, points: list[Point], found: list[Figures]) -> list[Figures]:
    """For --out; without lists."""
    return [{"sweep": sweep, "name": point.name, "value": point.value, "with": point.changes,
             "measured": point.clock,
             "figures": {key: value for key, value in f.items() if not isinstance(value, list)}}
            for point, f in zip(points, found)]


# ---- sweeps: the figures ----

def sweep(bench: Bench, name: str) -> list[Figures]:
    """Measure or count the points of a figure, and draw it."""
    points = sweep_points(bench.settings)[name]
    found = bench.measure(points)
    if name == "timeline":
        found = [figures | bench.trace(point) for point, figures in zip(points, found)]
    if bench.leads:
        show_ranks(bench, points, found)
        draw.figure(bench, name, points, found)
        print_table(name, ["", "", "tokens/s", *map(draw.words, COLUMNS)], *(
            [point.name, point.value, f["tokens/s"], *map(f.get, COLUMNS)]
            for point, f in zip(points, found)))
    return results(name, points, found)


def sweep_points(s: BenchSettings) -> dict[str, list[Point]]:
    warm = s.temperature or 1.0
    sizes = tuple(SLOWER)
    ssd = {"lookahead": 5, "budget": 24}
    sd = {"mode": "sd", "lookahead": 4}
    table = {"lookahead": 5, "budget": TABLE_BUDGET}

    def line(name: str, axis: str, values: tuple, changes: dict, clock: bool = True) -> list[Point]:
        return [Point(name, value, changes | {axis: value}, clock) for value in values]

    return {
        "timeline": [Point("SD", 0, sd), Point("SSD", 0, ssd)],
        "fan-out": line("paper", "temperature", (0.0, 0.7, 1.0), table, False)
        + line("public noise", "temperature", (0.7, 1.0), table | {"public_noise": True}, False),
        "shape": line("counted", "temperature", HEAT, table, False)
        + line("geometric", "temperature", (0.0, 1.0), ssd)
        + line("SD", "temperature", HEAT, sd, False),
        "downweight": line("budget 24", "downweight", (1.0, 0.75, 0.5, 0.25, 0.1, 0.0),
                           ssd | {"temperature": warm}, False)
        + line("budget 64", "downweight", (1.0, 0.75, 0.5, 0.25, 0.1, 0.0),
               table | {"temperature": warm}, False),
        "noise": line("paper", "temperature", HEAT, ssd, False)
        + line("public noise", "temperature", HEAT, ssd | {"public_noise": True}, False),
        "batch": [point for backup in ("neural", "lookup", "random") for point in line(
            f"{backup} backup", "batch_size", sizes, ssd | {"backup": backup})],
        "frontier": line("AR", "batch_size", sizes, {"mode": "ar"})
        + line("SD", "batch_size", sizes, sd) + line("SSD", "batch_size", sizes, ssd),
        "lookahead": line("SSD", "lookahead", (1, 2, 3, 4, 5, 6, 7, 8), {"budget": 24})
        + line("SD", "lookahead", (1, 2, 3, 4, 5, 6, 7, 8), {"mode": "sd"}),
        "budget": line("counted", "temperature", (0.0, warm), table, False)
        + line("measured", "budget", (6, 24, 64), {"lookahead": 5, "temperature": warm})}


def show_ranks(bench: Bench, points: list[Point], found: list[Figures]) -> None:
    """What the tables of ranks tell: a and r that fit, as the flags to use for this pair, and the
    hits of other shapes on the same outcomes."""
    for point, f in zip(points, found):
        if point.changes.get("budget") != TABLE_BUDGET or point.clock:
            continue
        ranks = rank_table(f)
        K = f["lookahead"]
        f["fitted a"] = counted_acceptance_rate(ranks)
        f["fitted r"] = fit_power_law(counted_miss_rates(ranks))
        shapes = {"geometric": "geometric", "uniform": "uniform",
                  "all accepted only": ",".join(["0"] * K + ["24"])}
        for name, policy in shapes.items():
            f[f"hits, {name}"] = bench.of_any_cache(f, policy, 24)["hit_rate"]
        print(f"  {point.name} {point.value:g}: --acceptance-rate {f['fitted a']:.2f} "
              f"--miss-exponent {f['fitted r']:.2f} ({int(ranks.sum())} bonus tokens); hits of "
              "budget 24: " + ", ".join(f"{name} {f[f'hits, {name}']:.2f}" for name in shapes))


def rank_table(f: Figures) -> torch.Tensor:
    """`[K+1, n+1]`, after primary and backup together."""
    return torch.tensor(f["bonus_ranks"]) + torch.tensor(f["bonus_ranks_after_backup"])


# ---- tables ----

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


# ---- at the paper's scale, without measuring ----

PASS = 0.00254  # seconds
P_HIT = 0.9
K_SD = 6
KNOWN = f"""\
Known: the speeds called measured, of the paper (4 + 1 and 1 + 1 H100, greedy, batch 1) and of a
third party (Weili-0234/ssd-wl); SD's K = {K_SD} and its K + 1 draft passes; SSD's K (the paper's:
7) and budget, 24; the third party's verification, 11.5 ms, and tree step of the 0.6B, 2.54 ms.
Assumed: p_hit = {P_HIT}; the paper's T_v = 1 / AR's speed; every pass of either draft takes as long
as that tree step; T_p and T_b are K + 1 of them; one acceptance rate a for all, such that SD comes
out as its own source measured it. So only SSD is predicted."""


def predict() -> None:
    """Theorem 7 from known settings."""
    print(KNOWN)
    rows = [["", "K", "a", "T_p", "SD", "SSD", "measured", "error", "SSD/SD", "measured"]]
    for name, T_v, sd, measured in (
            ("70B / 1B, paper", 1 / 54.7, 161.8, {7: 255.8}),
            ("32B / 0.6B, paper", 1 / 88.8, 136.8, {7: 203.8}),
            ("32B / 0.6B, ssd-wl", 0.0115, 141.4, {4: 210.9, 5: 193.6, 6: 175.3, 7: 158.6})):
        tokens = sd * (T_v + (K_SD + 1) * PASS)  # E(a, K)
        a = bisect.bisect(range(10000), tokens, key=lambda i: expected_tokens(i / 1e4, K_SD)) / 1e4
        for K, ssd in measured.items():
            E = expected_tokens(a, K)
            T_p = (K + 1) * PASS / T_v
            speed = throughput(P_HIT, E, E, T_p, T_p) / T_v
            rows.append([name, K, a, T_p, sd, speed, ssd, f"{100 * (speed / ssd - 1):+.0f}%",
                         speed / sd, ssd / sd])
    print_table("Theorem 7, tokens/s", *rows)


def main(settings: BenchSettings) -> None:
    if settings.predict:
        return predict()
    bench = Bench(settings)
    process = psutil.Process()
    process.cpu_percent()  # from now on
    psutil.cpu_percent()
    found = []
    everything = "all" in settings.sweep
    if everything or not settings.sweep:
        found += comparison(bench, 0.0) + comparison(bench, settings.temperature or 1.0)
    bench.prompts = bench.prompts[:SWEEP_PROMPTS]
    for name in SWEEPS if everything else settings.sweep:
        found += sweep(bench, name)
    own = [None, None]
    dist.all_gather_object(own, process.cpu_percent() / psutil.cpu_count())
    others = max(0, psutil.cpu_percent() - sum(own))
    if not bench.leads:
        return
    machine = {"machine": platform.platform(), "torch": torch.__version__,
               "transformers": transformers.__version__,
               "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
               "cores used by others": f"{others:.0f}%"}
    print(f"\n{machine}")
    if settings.out is not None:
        result = {"machine": machine, "settings": asdict(settings), "results": found}
        write_json("--out", settings.out, result)
