"""The paper's evaluation section in small (`python bench.py --help`).

SSD pays where target and draft compute on devices of their own. Where every rank has a GPU, and
with `--pace 0 0`, speeds are measured as they are, beside that of transformers' `generate`.
Elsewhere the passes of the models are paced: they take five times as long as on H100s
(`engine.timing.PacedClock`), and all else is real. This emulates latencies, and measures no GPU. It
flatters SSD, since messages and Python do not take five times as long. Speed is that of decoding,
without prefill.

`Bench` does three things with a `Point`, a way of decoding. It counts the hits and tokens of its
rounds, without a pace. It predicts its speed, by Theorem 7 (in a batch Corollary 16), from these
counts and three times, which are the pace's, or those of a few texts. It measures its speed. In the
figures lines are predicted (those of rates are counted), and points are measured.
"""
if __name__ == "__main__":  # before the imports below, which take seconds
    from cli.launch import launch
    from figures.bench_options import BenchSettings
    launch(BenchSettings, "bench")  # parses, starts rank 1, and calls `main`

import json
import os
import platform
import shlex
import sys
from contextlib import suppress
from dataclasses import replace
from datetime import date
from itertools import product, zip_longest
from pathlib import Path
from statistics import median, stdev
from typing import Any, Iterable, NamedTuple

import torch
import transformers
from tqdm import tqdm

from cache import FAN_OUT_POLICIES, PRIMARY, throughput
from cli.launch import is_rank_0
from cli.settings import Settings, open_for_writing
from engine.errors import UserError
from figures import draw
from figures.bench_options import SWEEPS, BenchSettings
from figures.growth import growth
from figures.guesses import counted_hit_rate, fit_shape
from figures.rivals import ASSISTANTS, Generate
from figures.table import COLUMNS, print_table
from ideas import SPECULATORS
from run.assist import decode_as_asked
from run.decoder import Decoder, batches_of, make_plan, warm_up
from run.job import Job
from run.placement import cores_of, gather, threads_for
from run.stats import Stats, ratio, theorem_7
from sampling import Sampler, residual, saguaro_distribution

GREEDY = (16, 3)    # (prompts, samples of each) of the comparison at temperature 0,
SAMPLED = (16, 8)   # and above
FEW = (12, 2)       # to choose K
MANY = (16, 6)      # of figures that are not in TEXTS
UNPACED = (8, 1)    # of the comparison without a pace,
TURNS = 3           # each text so often
SCREENED = 48       # tokens of the texts on which all settings of a line are tried
TEXTS = {"timeline": (1, 1), "frontier": (16, 1), "lookahead": FEW}
UNPACED_LINES = ("AR", "SD", "SSD", "SD, block", "SSD, race", "everything together")
SLOWER = {1: 1, 2: 1, 4: 2, 8: 3, 16: 5}  # the pace that two cores can keep, by batch size
LOOKAHEADS = range(1, 11)  # among which each line of the comparison has its best
LARGEST = 64  # so many guesses tell the hits of every smaller cache
# SD drafts with the draft model, and AR not at all, whatever the options of SSD are
BASELINE = {"backup": "neural", "downweight": 1.0, "fan_out": "geometric", "budget": 0}
COMPARED = ("tokens/s", "standard error", "/ AR", "/ SD", "error of / SD", "/ SD, block",
            "by Theorem 7")
IN_TURNS = ("assistant", "threads", "tokens/s", "least", "most", "/ AR", "/ SD", "error of / SD")
Metrics = dict[str, Any]  # see `row_of`
Texts = list[list[int]]  # of token ids


class Point(NamedTuple):
    """Names one way of decoding: a row of a table, a point of a figure."""
    name: str                # of its line
    value: Any               # on the axis
    changes: dict[str, Any]  # of settings
    in_turns: bool = False   # SSD in one process, where nothing overlaps
    threads: int | None = None     # of one process on all cores; None: each rank on its own cores
    assistant: list | None = None  # of transformers' `generate`, see figures/rivals.py

    def but(self, **changes) -> "Point":
        """Return this point with other settings."""
        return self._replace(changes=self.changes | changes)


# ---- what is counted, what is predicted, what is measured ----

class Bench:
    """Counts, predicts and measures points, on rank 0, which holds the target and SD's draft. Rank
    1 holds SSD's draft, and only assists (run/assist.py)."""

    def __init__(self, settings: BenchSettings):
        self.settings = settings
        self.all_cores = cores_of(0, 1)
        # of a command of one process: one thread, or as many as it takes
        self.thread_counts = sorted({1, threads_for(len(self.all_cores), 1)})
        self.job = job = Job(settings)
        check_lengths(job)
        if job.placement.world_size != 2:
            raise UserError("bench.py measures one target rank and one draft rank: start two, or "
                            "compare runs of saguaro.py --prompts FILE with every --mode")
        self.leads = job.placement.rank == 0
        job.placement.assisted = self.leads
        draft_config = job.draft_config.get_text_config()
        # else `generate` refuses
        self.may_assist = draft_config.vocab_size == job.vocab_size
        self.models = job.load()
        draft = job.load_draft() if self.leads else self.models.draft
        self.sd_models = self.models._replace(placement=None, draft=draft)
        self.own_cores = cores_of(0, 1)  # fewer, now that this rank has joined
        self.own_threads = torch.get_num_threads()
        self.prompts = job.prompts
        largest = settings.to_settings(lookahead=max(LOOKAHEADS), budget=LARGEST)
        decoder = Decoder(largest, self.sd_models)  # makes buffers, with graphs, for all points
        if self.leads:
            decoder.target.model.allocate(max(SLOWER), job.max_length, largest.lookahead)
        decoder.draft.start(max(SLOWER) * [[0]], job.max_length)  # reads nothing
        self.stats = {}  # of what was decoded: by settings, by how, and by number of texts

    def texts(self, num_prompts: int, samples: int) -> Texts:
        """Return the first prompts `samples` times, each time 8 tokens shorter, so that texts
        differ. Short prompts are used up sooner."""
        texts = []
        for sample in range(1 if self.settings.quick else samples):
            longer = [prompt for prompt in self.prompts[:num_prompts] if len(prompt) > 8 * sample]
            texts += [prompt[:len(prompt) - 8 * sample] for prompt in longer]
        return texts

    def other_texts(self) -> Texts:
        """Return up to eight texts that the table without a pace does not measure."""
        return [prompt[:-8] or prompt for prompt in self.prompts[-8:]]

    def count(self, point: Point, texts: Texts) -> Metrics:
        """Count the hits and tokens of a point's rounds. They do not depend on times, so no pass is
        paced, and rows share passes."""
        settings = self.settings_of(point)
        point = point.but(pace=(0.0, 0.0), batch_size=8)
        points = [point]
        if largest_tells(settings):
            point = point.but(**BASELINE).but(mode="ssd", acceptance_rate=0.8, miss_exponent=1.0)
            budget = sum(make_plan(settings).fan_out[PRIMARY])  # SD's is 0
            # what round 0 guesses depends on the budget alone
            first = point.but(lookahead=1, budget=budget, max_new_tokens=2)
            points = [point.but(budget=LARGEST), first]
        return counts_of(settings, *self.decode(points, texts))

    def predict(self, point: Point, texts: Texts) -> Metrics:
        """Return the row of a point by theory, from what is counted and how long its pieces of work
        take."""
        settings = self.settings_of(point)
        verification, tree_pass, backup_pass = self.times(settings)
        K = 0 if settings.mode == "ar" else settings.lookahead
        parts = self.count(point, texts)
        parts |= {"T_v in ms": verification, "T_p": None, "T_b": 0.0}
        if settings.mode == "ssd":
            parts["T_p"] = (K + 1) * tree_pass / verification
        if settings.backup == "neural":
            parts["T_b"] = K * backup_pass / verification
        return row_of(point, settings, parts)

    def times(self, settings: Settings) -> tuple[float, float, float]:
        """Return the milliseconds of a verification, of one of the K + 1 passes of a
        pre-speculation, and of one of the backup's K passes. They are the pace's. Without a pace a
        few texts are decoded with this budget, and with none, so that every round misses, to
        measure them."""
        target, draft = self.settings.pace
        if target:
            return target, draft, draft
        K = self.settings.lookahead
        changes = {"batch_size": settings.batch_size, "temperature": settings.temperature,
                   "backup": "neural"}
        points = [Point("", 0, changes | {"budget": n}) for n in (max(1, settings.budget), 0)]
        with_cache, without = self.decode(points, self.texts(max(3, settings.batch_size), 1))
        ahead = median_ms(with_cache, "trunk", "tree")
        return median_ms(with_cache, "verify"), ahead / (K + 1), median_ms(without, "backup") / K

    def measure(self, points: list[Point], texts: Texts, turns: int = 1) -> list[Metrics]:
        """Return the rows of these points as measured, on the texts in so many turns."""
        texts = turns * texts
        prompts = [self.prompt_of(text) for text in texts]
        return [measured_row(point, self.settings_of(point), stats, prompts, turns)
                for point, stats in zip(points, self.decode(points, texts))]

    def prompt_of(self, text: list[int]) -> int:
        """Return the number of the prompt with which a text begins."""
        beginnings = [prompt[:len(text)] for prompt in self.prompts]
        return beginnings.index(text)

    def settings_of(self, point: Point) -> Settings:
        slower = SLOWER[point.changes.get("batch_size", 1)]
        pace = [slower * ms for ms in self.settings.pace]
        always = {"ignore_eos": True, "max_new_tokens": self.settings.max_new_tokens, "pace": pace}
        baseline = {} if point.changes.get("mode", "ssd") == "ssd" else BASELINE
        return self.settings.to_settings(**always | point.changes | baseline)

    def decode(self, points: list[Point], texts: Texts) -> list[Stats]:
        """Return the statistics of every point. No point is decoded twice."""
        keys = []
        for point in points:
            _, _, _, *how = point
            keys.append(str((self.settings_of(point), how, len(texts))))
        new = {key: point for key, point in zip(keys, points) if key not in self.stats}
        if new:
            self.stats |= zip(new, self.take_turns([*new.values()], texts))
        return [self.stats[key] for key in keys]

    def take_turns(self, points: list[Point], texts: Texts) -> list[Stats]:
        """Decode as all points say the first batch, then the next, so that what disturbs the
        machine disturbs all. Returns their statistics."""
        decoders = []
        batches = []
        for point in points:
            settings = self.settings_of(point)
            if point.assistant is None:
                decoders.append(self.decoder(settings, point.in_turns, texts))
            else:
                decoders.append(Generate(settings, self.sd_models, point.assistant))
            size = settings.batch_size
            # at a pace AR is as fast on any text
            few = max(4, size) if settings.mode == "ar" and point.threads is None else None
            batches.append(batches_of(texts[:few], size))
        for turn in tqdm([*zip_longest(*batches)], "decoding", leave=False, mininterval=5):
            for decoder, point, batch in zip(decoders, points, turn):
                if batch:
                    self.use_cores(point.threads)
                    decoder(batch)
        return [decoder.stats for decoder in decoders]

    def use_cores(self, threads: int | None) -> None:
        """Use all cores and so many threads, as a command of one process does: the other rank
        sleeps meanwhile. None: use this rank's own."""
        if hasattr(os, "sched_setaffinity"):
            with suppress(OSError):  # some sandboxes forbid it
                os.sched_setaffinity(0, self.all_cores if threads else self.own_cores)
        torch.set_num_threads(threads or self.own_threads)

    def decoder(self, settings: Settings, in_turns: bool, texts: Texts) -> Decoder:
        """Make a decoder: of both ranks, or of rank 0 alone. On GPUs it has warmed up."""
        overlaps = settings.mode == "ssd" and not in_turns
        decoder = Decoder(settings, self.models if overlaps else self.sd_models)
        if {*self.job.placement.devices} != {"cpu"}:
            warm_up(settings, decoder.models, texts)
        return decoder


def check_lengths(job: Job) -> None:
    """Raise `UserError` for a prompt that leaves no room for a whole text: all have one length."""
    longest = max(map(len, job.prompts))
    new = job.settings.max_new_tokens
    if longest + new > job.context:
        raise UserError(f"bench.py adds {new} tokens to each prompt. One has {longest}, so that is "
                        f"more than the target's context, {job.context}: lower --max-new-tokens")


def median_ms(stats: Stats, *works: str) -> float:
    """Return the milliseconds that these pieces of a round take together, by their medians."""
    seconds = [median(stats.seconds_of(work)) for work in works]
    return 1000 * sum(seconds)


def largest_tells(settings: Settings) -> bool:
    """Return whether what is drafted does not depend on the cache, nor the cache's shape on the
    round. If so, one run with the `LARGEST` budget tells the tokens of a round and, by its counts
    of guesses, the hits of every smaller cache."""
    return (settings.mode != "ar" and settings.backup == "neural" and settings.downweight == 1
            and settings.fan_out not in SPECULATORS)


def counts_of(settings: Settings, stats: Stats, first: Stats | None = None) -> Metrics:
    """Return the hits and tokens of these settings, from the `stats` of the run that counts them.
    Counts of guesses leave out round 0 of each text. If they tell the hits, these are theirs and
    those of `first`, texts of two tokens with a cache of this budget: of its outcome."""
    summary = stats.summary()
    names = ("tokens_per_round", "acceptance_rate", "hit_rate", "E_hit", "E_miss")
    counts = {name: summary[name] for name in names}
    counts["guess_counts"] = torch.tensor(stats.guess_counts)  # [2, K+1, n+1]
    if first:
        table = counts["guess_counts"].sum(0)
        later = int(table.sum())
        hits = later * counted_hit_rate(table, make_plan(settings).fan_out[PRIMARY])
        texts = sum(len(timed.rows) for timed in first.log if timed.number == 0)
        hits += texts * first.summary()["hit_rate"]
        counts["hit_rate"] = hits / (later + texts)
        counts["E_hit"] = counts["E_miss"] = summary["tokens_per_round"]
    return counts


def measured_row(point: Point, settings: Settings, stats: Stats, prompts: list[int],
                 turns: int) -> Metrics:
    """Return the row of a point as it was decoded, with texts of these `prompts` (their numbers).
    Where the pace is slower for a batch, times are shown as if it were not."""
    rows = settings.batch_size
    slower = SLOWER[rows] if any(settings.pace) else 1
    decoded = decoded_of(stats, rows)
    decoded[:, 1] /= slower
    totals = [turn.sum(0).tolist() for turn in decoded.chunk(turns)]
    speeds = [tokens / seconds for tokens, seconds in totals]
    speed = median(speeds)
    shares = shares_of(decoded, prompts[::rows])
    parts = stats.summary() | {
        "T_v in ms": ratio(stats.mean_seconds("verify"), slower / 1000),
        "threads": point.threads, "assistant": point.assistant,
        "by turn": speeds, "least": min(speeds), "most": max(speeds), "shares": shares,
        "standard error": standard_error(speed, shares)}
    return row_of(point, settings, parts, speed)


def decoded_of(stats: Stats, rows: int) -> torch.Tensor:
    """Return the tokens and seconds of each batch, `[batches, 2]`, in the rounds in which all
    `rows` of it are active. The last batch, which may never have so many, is left out."""
    decoded = []
    for timed in stats.log:
        if timed.number == 0:
            decoded.append([0, 0.0])
        elif len(timed.rows) == rows:
            decoded[-1][0] += sum(len(row.new_tokens) for row in timed.rows)
            decoded[-1][1] += timed.seconds
    return torch.tensor([batch for batch in decoded if any(batch)], dtype=torch.float64)


def shares_of(decoded: torch.Tensor, prompts: list[int]) -> list[float]:
    """Return by which share of the speed each prompt changes it: its tokens above those that this
    speed has in its time, of all tokens. `decoded` `[batches, 2]` begin with texts of `prompts`."""
    tokens, seconds = decoded.T
    speed = tokens.sum() / seconds.sum()
    shares = (tokens - speed * seconds) / tokens.sum()  # of each batch
    numbers = torch.tensor(prompts[:len(decoded)])
    _, place = numbers.unique(return_inverse=True)
    return place.bincount(shares).tolist()


def standard_error(value: float, shares: list[float]) -> float | None:
    """Return the standard error of a speed, or of a ratio of two, by the shares in which prompts
    change it. Prompts are the unit, since texts of one are alike. Of few it would be too small."""
    if len(shares) < 8:  # of 4 an interval of one standard error covers 0.59 instead of 0.68
        return None
    return value * stdev(shares) * len(shares) ** 0.5


def row_of(point: Point, settings: Settings, parts: Metrics, speed: float | None = None) -> Metrics:
    """Return a row of a table, by the names that figures use for axes. `parts` are the values that
    Theorem 7 takes, and others to show. `speed` is the measured tokens a second; if it is None, the
    row has the speed that Theorem 7, or in a batch Corollary 16, predicts."""
    rows = settings.batch_size
    hits = parts["hit_rate"]
    T_v = parts["T_v in ms"]  # None: `generate` is not looked into
    by_theorem_7 = ratio(1000 * rows * theorem_7(parts, rows), T_v)
    shown = by_theorem_7 if speed is None else speed
    metrics = parts | {
        "name": point.name, "value": point.value, "predicted": speed is None, "with": point.changes,
        "hit_rate": hits if settings.mode == "ssd" else None,  # None: no line
        "lookahead": 0 if settings.mode == "ar" else settings.lookahead, "C": settings.downweight,
        "top_p": settings.top_p if settings.top_p < 1 else None,
        "budget": settings.budget, "temperature": settings.temperature, "batch size": rows,
        "backup": settings.backup, f"hit rate, {settings.backup} backup": hits,
        "tokens/s": shown, "Theorem 7": by_theorem_7}
    if T_v:
        metrics["tokens a verification"] = shown / rows * T_v / 1000  # of one row
        metrics["measured / Theorem 7"] = ratio(speed, by_theorem_7)
    return metrics


# ---- the comparison ----

def comparison(bench: Bench, temperature: float) -> list[Metrics]:
    """Measure AR, SD and SSD: at a pace each with the K that is best by theory, without one beside
    transformers' `generate`, each with the settings that are fastest on other texts."""
    points = compared_points(bench, temperature)
    if any(bench.settings.pace):
        columns = COMPARED
        points = [at_best_lookahead(bench, point, bench.texts(*FEW)) for point in points]
        size = SAMPLED if temperature else GREEDY
        found = bench.measure(points, bench.texts(*size))
    else:
        columns = IN_TURNS
        points = [fastest_of(bench, candidates(bench, point)) for point in points]
        texts = bench.texts(*UNPACED)
        found = measured_beside_alone(bench, points, texts)
    by_name = {f["name"]: f for f in found}
    for f in found:
        f |= compared(f, by_name)
    print_table(f"temperature {temperature:g}", columns, found)
    print_table("T_b of SD is T_SD, the drafting that SSD hides", COLUMNS, found)
    fastest = max(found, key=lambda f: f["tokens/s"])
    print(f"  fastest: {command_of(bench, fastest)}")
    return found


def measured_beside_alone(bench: Bench, points: list[Point], texts: Texts) -> list[Metrics]:
    """Return the rows of these points, measured in `TURNS` turns. SSD's have the threads of both
    ranks and, measured in the same turns, how long a verification takes while the draft is idle.
    Beside a draft at work it takes longer, where two cores share what both need."""
    overlapping = [point for point in points if point.threads is None]
    alone = [point._replace(in_turns=True) for point in overlapping]
    measured = bench.measure(points + alone, texts, TURNS)
    found = measured[:len(points)]
    beside = [f for f in found if f["threads"] is None]
    for f, idle in zip(beside, measured[len(points):]):
        f["threads"] = 2 * [bench.own_threads]
        f["T_v alone"] = idle["T_v in ms"]
    return found


def compared(f: Metrics, by_name: dict[str, Metrics]) -> Metrics:
    """Return the speed of a row over that of others, the median of all turns."""
    def over(name: str) -> float:
        pairs = zip(f["by turn"], by_name[name]["by turn"])
        return median(own / other for own, other in pairs)

    sd = by_name["SD"]
    by_block = f["with"].get("verification", "token") != "token"
    shares = [own - other for own, other in zip(f["shares"], sd["shares"])]
    return {"/ AR": over("AR"), "/ SD": over("SD"),
            "error of / SD": standard_error(over("SD"), shares),
            "/ SD, block": over("SD, block") if by_block else None,
            "by Theorem 7": ratio(f["Theorem 7"], sd["Theorem 7"])}


def compared_points(bench: Bench, temperature: float) -> list[Point]:
    """Return the lines of the comparison, with the K of the settings."""
    together = {"budget": LARGEST, "fan_out": "confident", "backup": "lookup"}
    lines = {
        "AR": {"mode": "ar"},
        "SD": {"mode": "sd"},
        "SSD": {"budget": 24},
        f"SSD, budget {LARGEST}": {"budget": LARGEST},
        "SSD, look-up backup": {"budget": 24, "backup": "lookup"}}
    if temperature:
        lines |= {
            f"SSD, budget {LARGEST}, C = 0.75": {"budget": LARGEST, "downweight": 0.75},
            "SD, block": {"mode": "sd", "verification": "block"},
            f"SSD, budget {LARGEST}, block": {"budget": LARGEST, "verification": "block"},
            "SSD, race": {"budget": 24, "verification": "race"},
            f"SSD, budget {LARGEST}, race": {"budget": LARGEST, "verification": "race"}}
        together |= {"verification": "race"}
    lines["everything together"] = together
    common = {"temperature": temperature, "lookahead": bench.settings.lookahead}
    points = [Point(name, temperature, common | changes) for name, changes in lines.items()]
    if any(bench.settings.pace):
        return points
    ar, *others = [point for point in points if point.name in UNPACED_LINES]
    rivals = [ar._replace(name="generate", assistant=[])]
    if bench.may_assist:
        rivals.append(ar._replace(name="generate with assistant_model", assistant=ASSISTANTS[0]))
    return [*rivals, ar, *others]


def candidates(bench: Bench, point: Point) -> list[Point]:
    """Return the points to try for a line without a pace. Where one process does all, it has all
    cores. A quick run tries few."""
    quick = bench.settings.quick
    mode = point.changes.get("mode", "ssd")
    lookaheads = [point.changes["lookahead"]] if quick else (2, 3, 4, 5, 6, 8, 10)
    if mode == "ssd":
        budgets = [24] if quick else [8, 24, LARGEST]
        return [point.but(lookahead=K, budget=n) for K, n in product(lookaheads, budgets)]
    tried = [point]
    if mode == "sd":
        tried = [point.but(lookahead=K) for K in lookaheads]
    elif point.assistant:
        tried = [point._replace(assistant=one) for one in ASSISTANTS[:3 if quick else None]]
    return [one._replace(threads=n) for one, n in product(tried, bench.thread_counts)]


def fastest_of(bench: Bench, points: list[Point]) -> Point:
    """Return the point that is fastest on texts that are not measured afterwards: of the four that
    are fastest on four short ones, the one that is fastest on whole ones."""
    texts = bench.other_texts()
    length = bench.settings.max_new_tokens
    finalists = fastest(bench, points, texts[:4], min(SCREENED, length), 4)
    others = texts[4:] or texts  # somebody may have few prompts
    [point] = fastest(bench, finalists, others, length, 1)
    return point


def fastest(bench: Bench, points: list[Point], texts: Texts, length: int,
            count: int) -> list[Point]:
    """Return so many of these points, the fastest first, by texts of this length in tokens."""
    if len(points) <= count:
        return points
    found = bench.measure([point.but(max_new_tokens=length) for point in points], texts)
    ranked = sorted(zip(found, points), key=lambda pair: pair[0]["tokens/s"], reverse=True)
    return [point for _, point in ranked[:count]]


def say_how_long(bench: Bench, temperatures: Iterable[float]) -> None:
    """Print how long the comparison without a pace will take, from how long AR takes for a text.
    With a draft most texts take less, and with 64 guesses several times as long."""
    few = bench.other_texts()[:4]
    [stats] = bench.decode([Point("AR", 0, {"mode": "ar"}, threads=1)], few[:1])
    seconds = sum(timed.seconds for timed in stats.log)
    texts = 0
    for temperature in temperatures:
        for point in compared_points(bench, temperature):
            tried = len(few) * len(candidates(bench, point))
            texts += tried * SCREENED / bench.settings.max_new_tokens
            texts += TURNS * len(bench.texts(*UNPACED))
    print(f"  about {texts * seconds / 60:.0f} minutes", flush=True)
    if not bench.may_assist:
        print("  no generate with assistant_model: the models' vocab_size differs")


def command_of(bench: Bench, f: Metrics) -> str:
    """Return the command that decodes as a row does."""
    if f["assistant"] is not None:
        return f"{f['name']} {f['assistant']}, with {f['threads']} threads"
    settings = bench.settings.to_settings(**f["with"] | {"pace": (0.0, 0.0)})
    command = command_line(settings)
    if f["threads"] == 1 < bench.thread_counts[-1]:
        return f"OMP_NUM_THREADS=1 {command}"
    return command


def command_line(settings: Settings) -> str:
    """Return the command that decodes a text with these settings."""
    chosen = vars(settings).items() - vars(Settings()).items()
    command = "python saguaro.py"
    for name, value in sorted(chosen):
        command += f" --{name.replace('_', '-')}"
        if value is not True:
            command += f" {shlex.quote(str(value))}"
    return command


def at_best_lookahead(bench: Bench, point: Point, texts: Texts) -> Point:
    """Return this point with the K that is fastest by Theorem 7, or in a batch by Corollary 16. At
    a pace every launch finds the same K. A pre-speculation is taken to be a tenth longer than its
    passes. AR has no K, and a quick run keeps the point's."""
    def speed(K: int) -> float:
        f = bench.predict(point.but(lookahead=K), texts)
        later = 1.1 * (f["T_p"] or 0.0)
        return theorem_7(f | {"T_p": later}, f["batch size"])

    if bench.settings.quick or point.changes.get("mode") == "ar":
        return point
    return point.but(lookahead=max(LOOKAHEADS, key=speed))


# ---- sweeps: the figures ----

def sweep(bench: Bench, name: str) -> list[Metrics]:
    """Predict and measure the points of a figure, and add the lists that it shows."""
    texts = bench.texts(*TEXTS.get(name, MANY))
    sweeps = sweep_points(bench.settings, len(bench.prompts))
    to_predict, to_measure = sweeps[name]
    if name == "shape":
        heats, _ = sweeps["fan-out"]
        to_predict = with_best_shapes(bench, to_predict, heats, texts)
    if name == "frontier":  # each point at its best K
        to_predict = to_measure = [at_best_lookahead(bench, point, texts) for point in to_predict]
    found = [bench.predict(point, texts) for point in to_predict]
    texts = texts[:48]  # at most so many are measured
    measured = bench.measure(to_measure, texts)
    print_table(name, ("value", "predicted", *COLUMNS), found + measured)
    for f in found:
        tables = f.pop("guess_counts")
        if name == "fan-out":
            f["right_guesses"] = tables.sum(1).tolist()
            a, r = fit_shape(tables[PRIMARY]).values()
            print(f"  {f['value']:g}: --acceptance-rate {a:.2f} --miss-exponent {r:.2f}")
    if name == "timeline":
        for f, stats in zip(measured, bench.decode(to_measure, texts)):
            f["spans"] = [(span.work, span.start, span.end) for span in stats.spans]
    return found + measured


def with_best_shapes(bench: Bench, points: list[Point], heats: list[Point],
                     texts: Texts) -> list[Point]:
    """Return these points with the best shape at their temperature, by the a and r that are counted
    for the point of `heats` at that temperature."""
    shapes = {}
    for point in heats:
        counts = bench.count(point, texts)["guess_counts"]
        shapes[point.value] = fit_shape(counts[PRIMARY])
    return [point.but(**shapes[point.value]) for point in points]


def sweep_points(settings: BenchSettings, num_prompts: int) -> dict[str, list[list[Point]]]:
    """Return the points of every figure: those to predict, its lines, and those to measure."""
    warm = {"temperature": settings.temperature or 1.0}  # of figures at one temperature
    heats = (0.0, 0.3, 0.7, 1.0)
    sizes = [size for size in SLOWER if size <= num_prompts]
    backups = ("neural", "random")
    shapes = (*FAN_OUT_POLICIES, *SPECULATORS)
    sd = ("SD", {"mode": "sd"})
    ssd = ("SSD", {})
    by_backup = [(f"SSD, {backup} backup", {"backup": backup}) for backup in backups]
    by_shape = [(shape, {"fan_out": shape, "backup": backup})
                for shape, backup in product(shapes, backups)]
    by_lookahead = [(f"{backup} backup", warm | {"lookahead": K, "backup": backup})
                    for K, backup in product((3, 7), backups)]
    by_noise = [("private noise", {"verification": "block"})]
    by_noise += [(f"public noise, {shape}", {"verification": "race", "fan_out": shape})
                 for shape in shapes]
    filtered = [(name, changes | {"top_k": 20, "top_p": 0.9}) for name, changes in by_noise]
    return {
        "timeline": points("temperature", (), (0.0,), ("SD", {"mode": "sd", "lookahead": 5}), ssd),
        "fan-out": points("temperature", heats, (), ("random backup", {"backup": "random"})),
        "shape": points("temperature", heats, (), *by_shape),
        "noise": points("temperature", (*heats, 1.25, 1.5), (), *by_noise, *filtered),
        "downweight": points("downweight", (1.0, 0.75, 0.5, 0.25, 0.0), (1.0, 0.5), ("SSD", warm)),
        "batch": points("batch_size", sizes, sizes, *by_lookahead),
        "frontier": points("batch_size", sizes, sizes, ("AR", {"mode": "ar"}), sd, *by_backup),
        "lookahead": points("lookahead", range(1, 9), (3, 5, 7), ssd, sd)}


def points(axis: str, predicted: Iterable, measured: Iterable,
           *lines: tuple[str, dict]) -> list[list[Point]]:
    """Return the points of a figure. `predicted` and `measured` are values on the axis, `lines`
    (name, changed settings)."""
    engine = {"lookahead": 7, "budget": 24}  # as in the authors' README
    return [[Point(name, value, engine | changes | {axis: value})
             for (name, changes), value in product(lines, values)]
            for values in (predicted, measured)]


# ---- what decodes no text: one position; Corollary 16 against logs of GPUs ----

def one_position(bench: Bench) -> list[Metrics]:
    """Compute p, q and residual before and after C, at the position of the first prompt where C
    moves most of the residual to the draft's `guesses`."""
    guesses = 4
    C = 0.2
    sampler = Sampler(bench.settings.temperature or 1.0)
    prompt = torch.tensor(bench.prompts[:1])
    distributions = []
    for model in (bench.sd_models.target, bench.sd_models.draft):
        logits = model.causal(prompt.to(model.device), torch.tensor([0]))
        distributions.append(sampler.probabilities(logits)[0].cpu())
    p, q = distributions                   # [n, V]
    sigma = saguaro_distribution(q, guesses, C)
    moved = residual(p, sigma) - residual(p, q)
    likeliest = q.topk(6).indices          # [n, 6]
    place = moved.gather(1, likeliest[:, :guesses]).sum(1).argmax()
    shown = likeliest[place]
    tokens = [repr(bench.job.tokenizer.decode([token])) for token in shown]
    found = []
    for name, drafted in (("C = 1", q), (f"C = {C}", sigma)):
        found.append({"name": name, "guesses": guesses, "tokens": tokens,
                      "target's p": p[place, shown].tolist(),
                      "draft's q": drafted[place, shown].tolist(),
                      "residual": residual(p, drafted)[place, shown].tolist()})
    return found


UNDECODED = {"residual": one_position, "growth": growth}


def compare_with_logs() -> None:
    """Print how long the rounds of published logs take by Corollary 16, and as measured."""
    columns = ("T", "b", "K", "F", "p_hit", "E_hit", "E_miss", "verification", "round",
               "by Cor. 16", "difference", "tokens/s", "tokens/s by it")
    for log in draw.read_logs().values():
        for f in log["rounds"]:
            p = f["p_hit"]
            T_v = f["verification"]
            tokens = p * f["E_hit"] + (1 - p) * f["E_miss"]
            speed = throughput(p, f["E_hit"], f["E_miss"], f["pre-speculation"] / T_v,
                               f["backup"] / T_v, f["b"]) / T_v
            f["by Cor. 16"] = tokens / speed
            f["difference"] = f["round"] - f["by Cor. 16"]
            f["tokens/s by it"] = 1000 * f["b"] * speed
        print_table(f"{log['pair']}; times in ms", columns, log["rounds"])
        fit = draw.verification_fit(log)
        print(f"  a verification of n tokens: {fit.intercept:.2f} + {fit.slope:.3f} n ms")


def machine(bench: Bench) -> dict[str, Any]:
    """Return what was measured, on what and when."""
    job = bench.job
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    names = (bench.settings.target, bench.settings.draft)
    models = ["/".join(Path(name).parts[-2:]) for name in names]
    return {"date": str(date.today()), "machine": platform.platform(), "processor": processor(),
            "cores": len(bench.all_cores), "python": platform.python_version(),
            "torch": torch.__version__, "transformers": transformers.__version__,
            "gpus": gpus, "ranks": job.placement.devices, "dtype": str(job.dtype),
            "models": models}


def processor() -> str:
    """Return the processor's name."""
    with suppress(OSError), open("/proc/cpuinfo") as about:  # of Linux
        for line in about:
            if line.startswith("model name"):
                return line.partition(": ")[2].strip()
    return platform.processor()


def find(bench: Bench, name: str) -> list[Metrics]:
    """Return the rows of a figure, or of the comparison at two temperatures."""
    if name in UNDECODED:
        return UNDECODED[name](bench)
    if name != "comparison":
        return sweep(bench, name)
    warm = bench.settings.temperature or 1.0
    if not any(bench.settings.pace):
        say_how_long(bench, (0.0, warm))
    return comparison(bench, 0.0) + comparison(bench, warm)


def find_all(bench: Bench) -> None:
    """Measure the comparison, or all figures asked for; write what is found, and draw."""
    settings = bench.settings
    names = settings.sweep or ("comparison",)
    if "all" in names:
        names = ("comparison", *SWEEPS)
    whole = {"machine": machine(bench), "arguments": sys.argv[1:], "results": []}
    print(whole["machine"])
    for name in names:
        title = name if any(settings.pace) else name.replace("comparison", "unpaced")
        found = find(bench, name)
        whole["results"] += [{"sweep": title} | f for f in found]
        with open_for_writing("--out", settings.out) as file:  # now: what follows may fail
            json.dump(whole, file, indent=1)
        if name in SWEEPS:
            draw.figure(settings.figures, name, found)


def main(settings: BenchSettings) -> None:
    if settings.predict:
        return compare_with_logs()
    if is_rank_0():  # refuse at once what could not be written at the end
        open_for_writing("--out", settings.out, "a", prompts=settings.prompts).close()
    if settings.sweep:
        Path(settings.figures).mkdir(exist_ok=True)
    bench = Bench(settings)
    if not bench.leads:
        return decode_as_asked(bench.models)
    if settings.quick:
        bench.prompts = bench.prompts[:3]
    if settings.pace_is_default and "cpu" not in bench.job.placement.devices:
        bench.settings = replace(settings, pace=(0.0, 0.0))
    find_all(bench)
    gather(None)  # lets rank 1 go
