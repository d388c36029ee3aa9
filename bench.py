"""The paper's evaluation section in small, measured on the machine in front of you.

    torchrun --nproc-per-node 2 bench.py       AR, SD, SSD and transformers' own, greedy and sampled
    python bench.py --quick                    the same, shorter; bench.py starts both ranks itself
    python bench.py --sweep timeline shape     figures of the paper; "all" draws every one
    python bench.py --predict                  no measurement: Theorem 7 at the paper's scale

All variants live in one launch and take turns, batch by batch, in rotating order, so that a machine
that drifts drifts for all; ratios are paired by batch. Speed is that of decoding: prefill, and the
tokens it yields, are apart. All generate as many tokens, and the same greedy text. Whoever has
settings of its own tries several and goes on with the fastest: SD with K, SSD also the budget; who
decodes alone with one thread or with every core that SSD uses. In units of one verification, of T_v
seconds, Theorem 7 (in a batch Corollary 16) says

    speed = (p_hit E_hit + (1-p_hit) E_miss) / (p_hit max(1, T_p) + (1-p_hit) (1 + T_b)) / T_v;

plain SD is its case p_hit = 0 with T_b = T_SD; a verifier that never waits would give E_hit / T_v.
"""
import bisect
import itertools
import math
import platform
import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Callable, NamedTuple

from runtime.settings import (TINY, Settings, UserError, begin, check_writable, option,
                              read_prompts, write_json)

SWEEPS = ("timeline", "fan-out", "shape", "downweight", "noise", "batch", "frontier", "lookahead",
          "budget")
FIRST_ROUND = 21  # most tokens that transformers' assisted decoding may yield at once, by default


@dataclass
class BenchSettings(Settings):
    """What speculative speculative decoding buys on this machine, and why."""
    GROUPS = Settings.GROUPS | {"quick": "bench"}
    LACKS = ("prompt", "batch_size", "ignore_eos", "json", "mode", "fan_out", "backup", "drafters")

    prompts: str = option(str(TINY / "prompts.jsonl"), "JSON Lines, each with a field prompt, "
                          "question or text")
    max_new_tokens: int = option(48, "tokens to generate for each prompt, exactly", least=1)
    temperature: float = option(0.0, "of sweeps that name none; compared are 0, and T or 1",
                                least=0, most=1e9)
    quick: bool = option(False, "3 prompts, 24 tokens")
    sweep: tuple[str, ...] = option((), f"draw figures: all, {', '.join(SWEEPS)}", nargs="+",
                                    choices=("all", *SWEEPS), metavar="NAME")
    figures: str = option("figures", "folder for them")
    out: str | None = option(None, "write all results to this file (JSON)")
    predict: bool = option(False, "no measurement: Theorem 7 at the paper's scale")

    def check(self) -> None:
        self.max_new_tokens = 24 if self.quick else self.max_new_tokens
        self.ignore_eos = True  # all generate as many tokens
        self.mode = "ar" if self.predict else "ssd"  # a prediction needs one process only
        super().check()
        least = max(FIRST_ROUND, self.lookahead + 1) + 1
        if self.max_new_tokens < least:
            raise UserError(f"--max-new-tokens is {self.max_new_tokens}; it must be at least "
                            f"{least}: a first round, part of prefill, may yield {least - 1}")
        if self.out is not None:
            check_writable("--out", self.out)
        if self.sweep:
            check_writable("--figures", f"{self.figures}/{self.sweep[0]}.svg")


SETTINGS = begin(BenchSettings) if __name__ == "__main__" else None  # before torch: that is slow

import psutil
import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm
from transformers import GenerationConfig

from cache import expected_tokens, speedup_over_sd_bounds, throughput
from figures import draw
from runtime.command import Run, Stats, run
from saguaro import Decoder

WARM_UP, LEAST, LOOKUP_TOKENS = 8, 3, 10  # tokens; turns; as in transformers' examples
SLOWER = {0: 2.0, 1: 1.2, 2: 1.1, 5: 1.0}  # before this turn, who is so many times slower is out
COLUMNS = ("tokens_per_round", "acceptance_rate", "hit_rate", "E_hit", "E_miss", "T_v in ms", "T_p",
           "T_b", "utilisation", "Theorem 7", "share of it", "E_hit / T_v", "share of that")


# ---- what is measured: rows of data ----

class Sweep(NamedTuple):
    axis: str       # the setting that varies
    values: tuple
    lines: dict[str, dict[str, Any]]  # other changes of settings; of a tuple every value is tried
    panels: tuple = ()                # what is drawn over the axis; (y, x): over x
    by_hand: Callable | None = None   # draws what is no line over an axis
    grid: tuple[int, int] = (1, 2)    # rows and columns of panels


def comparison(s: BenchSettings, temperature: float) -> Sweep:
    """Everybody against everybody, each with the settings among which it has its best."""
    tried = {"lookahead": (3, 4), "budget": (s.budget, 2 * s.budget)}
    return Sweep("temperature", (temperature,), {
        "AR": {"mode": "ar"},
        "SD": {"mode": "sd", "lookahead": (3, 4, 6)},
        "SD, look-up": {"mode": "sd", "lookahead": (5, LOOKUP_TOKENS), "backup": "fast"},
        "SSD, budget 0": tried | {"budget": 0},
        "SSD": tried,
        "SSD, look-up": tried | {"backup": "fast"},
        "generate": {"mode": "generate"},
        "assisted": {"mode": "assisted", "lookahead": (0, s.lookahead)},
        "prompt look-up": {"mode": "lookup", "lookahead": LOOKUP_TOKENS}})


def sweeps(s: BenchSettings) -> dict[str, Sweep]:
    plain, sd, speed = {"no_public_noise": True}, {"mode": "sd"}, "tokens/s"
    heat, warm, sizes = (0.0, 0.3, 0.7, 1.0), s.temperature or 1.0, (1, 2, 4, 8, 16)
    last = {"fan_out": ",".join(["0"] * s.lookahead + [str(s.budget)])}
    return {
        "greedy": comparison(s, 0.0),
        "sampled": comparison(s, warm),
        "timeline": Sweep("mode", ("sd", "ssd"), {"": {}}, (), draw.timeline, (2, 1)),
        "fan-out": Sweep("temperature", (0.0, 0.7, 1.0), {
            "plain": plain | {"budget": 32}, "public noise": {"budget": 32}}, (),
            draw.fan_out, (1, 3)),
        "shape": Sweep("temperature", heat, {
            "geometric": plain, "uniform": plain | {"fan_out": "uniform"},
            "all accepted only": plain | last, "SD": sd}, ("hit_rate", speed)),
        "downweight": Sweep("downweight", (1.0, 0.7, 0.4, 0.2, 0.1, 0.0), {
            "SSD": plain | {"temperature": warm}}, (("acceptance_rate", "hit_rate"), speed),
            draw.bars, (2, 2)),
        "noise": Sweep("temperature", heat[1:], {
            "public noise": {}, "public noise, C = 0.4": {"downweight": 0.4},
            "plain": plain, "plain, C = 0.4": plain | {"downweight": 0.4}}, ("hit_rate", speed)),
        "batch": Sweep("batch_size", sizes, {
            f"{kind} backup": {"backup": kind} for kind in ("neural", "fast", "random")}, (speed,),
            draw.critical_sizes, (1, 1)),
        "frontier": Sweep("batch_size", sizes, {
            "AR": {"mode": "ar"}, "SD": sd, "SSD": {"backup": ("neural", "fast")}},
            ((speed, "tokens/s of one row"),), None, (1, 1)),
        "lookahead": Sweep("lookahead", (1, 2, 3, 4, 5, 6, 8), {
            "SSD": {}, "SSD, no early outcome": {"no_early_outcome": True}, "SD": sd},
            (speed, "T_p")),
        "budget": Sweep("budget", (0, *(D * s.budget for D in (1, 2, 4, 8))), {
            f"temperature {t:g}": {"temperature": t} for t in (0.0, warm)},
            ("hit_rate", "T_p", speed), draw.drafters, (2, 2))}


# ---- measuring: competitors that take turns ----

class Competitor:
    """A way of decoding, at work on both ranks. Those of one name and value (on the axis of a
    sweep) are settings of one variant: the fastest is shown. Figures and texts are rank 0's."""

    def __init__(self, job: Run, name: str, value: Any, changes: dict[str, Any], threads: int):
        self.job, self.name, self.value, self.threads = job, name, value, threads
        self.settings = s = replace(job.settings, **changes)
        self.decode, self.stats, self.speeds, self.texts, self.workers = None, Stats(), [], {}, []
        if s.mode == "ssd" or job.leads and s.mode in ("ar", "sd"):
            models = job.target, job.drafts if s.mode == "ssd" else job.draft
            self.decode = Decoder(s, job.context, *models, job.ranks if s.mode == "ssd" else None)
            self.stats, workers = self.decode.stats, (self.decode.target, self.decode.speculator)
            self.workers = [worker for worker in workers if hasattr(worker, "watch")]
        elif job.leads:
            self.decode = lambda prompts: generate(job, s, prompts, self.stats)
        self.turns = max(LEAST, math.ceil(len(job.prompts) / s.batch_size))

    def __str__(self) -> str:
        s, plural = self.settings, "s" * (self.threads > 1)
        drafts = f", K {s.lookahead}" * (s.mode not in ("ar", "generate"))
        prepares = f", budget {s.budget}" * (s.mode == "ssd")
        return f"{self.threads} thread{plural}{drafts}{prepares}"

    def take_turn(self, turn: int) -> None:
        """Turn -1, a warm-up, does not count for the speed."""
        all_prompts, size, stats = self.job.prompts, self.settings.batch_size, self.stats
        prompts = [all_prompts[(turn * size + i) % len(all_prompts)] for i in range(size)]
        tokens, seconds = stats.tokens - stats.prefill_tokens, stats.seconds
        self.settings.max_new_tokens = self.job.settings.max_new_tokens if turn >= 0 else WARM_UP
        for worker in self.workers:
            worker.watch.spans = []
        if self.job.leads:
            torch.set_num_threads(self.threads)
        texts = self.decode(prompts) if self.decode else []
        dist.barrier()  # nobody begins while a rank is still at work
        if self.job.leads and turn >= 0:
            tokens = stats.tokens - stats.prefill_tokens - tokens
            self.speeds.append(tokens / (stats.seconds - seconds))
            self.texts |= zip(((size, *prompt) for prompt in prompts), texts)

    def figures(self) -> dict[str, Any]:
        """`Stats.summary` of all turns, their median speed, and Theorem 7 with these parts."""
        stats, found, speed = self.stats, self.stats.summary(), statistics.median(self.speeds)
        mean = found["tokens_per_second"]
        found |= {"tokens/s": speed, "tokens/s of one row": speed / self.settings.batch_size,
                  "utilisation": found["verifier_utilisation"]}
        if stats.rounds:
            rows, T_v = stats.row_rounds / stats.rounds, stats.mean_seconds("verify")
            parts = [found[key] or 0.0 for key in ("hit_rate", "E_hit", "E_miss", "T_p", "T_b")]
            predicted, ceiling = rows * throughput(*parts, rows) / T_v, rows * parts[1] / T_v
            found |= {"T_v in ms": 1000 * T_v, "Theorem 7": predicted,
                      "share of it": mean / predicted}
            if ceiling:
                found |= {"E_hit / T_v": ceiling, "share of that": mean / ceiling}
        return found | ({"hit_rate": None} if self.settings.mode == "sd" else {})


def settings_to_try(row: Sweep) -> list[tuple[str, Any, dict[str, Any]]]:
    """Name, value on the axis, and changes of the settings."""
    tried = []
    for value, (name, changes) in itertools.product(row.values, row.lines.items()):
        choices = [given if isinstance(given, tuple) else (given,) for given in changes.values()]
        for chosen in itertools.product(*choices):
            tried.append((name, value, dict(zip(changes, chosen)) | {row.axis: value}))
    return tried


def measure(job: Run, row: Sweep) -> list[Competitor]:
    """All decode all prompts, taking turns. Of each name and value the fastest is returned, with
    what the workers of both ranks have `seen`: spans of work, and estimates by source."""
    competitors = [Competitor(job, *tried, threads) for tried in settings_to_try(row) for threads in
                   sorted({1, job.threads + (tried[-1].get("mode", "ssd") != "ssd")})]
    turns = range(-1, max(c.turns for c in competitors))
    for turn in tqdm(turns, unit="turn", leave=False, disable=not job.leads):
        if turn in SLOWER:
            competitors = still_in(competitors, SLOWER[turn])
        first = turn % len(competitors)
        for c in competitors[first:] + competitors[:first]:
            if turn < c.turns:
                c.take_turn(turn)
    competitors = still_in(competitors, 1.0)
    both = [None, None]
    dist.all_gather_object(both, [[
        (worker.watch.spans, dict(worker.fan_out.estimates) if hasattr(worker, "fan_out") else {})
        for worker in c.workers] for c in competitors])
    for c, *seen in zip(competitors, *both):
        c.seen = sum(seen, [])
    if job.leads:
        check_texts(competitors, exact=torch.finfo(job.target.dtype).bits >= 32)
    return competitors


def still_in(competitors: list[Competitor], slower: float) -> list[Competitor]:
    """Those not so many times slower than the fastest of their name and value."""
    taken = [((c.name, c.value), c.stats.prefill_seconds + c.stats.seconds) for c in competitors]
    fastest = dict(sorted(taken, key=lambda pair: -pair[1]))
    stay = [[seconds <= slower * fastest[variant] for variant, seconds in taken]]
    dist.broadcast_object_list(stay, 0)
    return list(itertools.compress(competitors, *stay))


def check_texts(competitors: list[Competitor], exact: bool) -> None:
    """Nobody wins by cheating: the agreed number of tokens, and one greedy text for all."""
    expected = {}
    for c in competitors:
        if any(len(text) != c.settings.max_new_tokens for text in c.texts.values()):
            raise UserError(f"{c.name} ({c}) did not write --max-new-tokens for every prompt")
        differing = 0 if c.settings.temperature else sum(
            expected.setdefault(prompt, text) != text for prompt, text in c.texts.items())
        said = f"{c.name} ({c}) wrote other greedy text for {differing} of {len(c.texts)} prompts"
        if differing and exact:
            raise UserError(said)
        if differing:
            print(f"{said}: rounding can decide between tokens that are nearly as likely")


def generate(job: Run, s: BenchSettings, prompts: list[list[int]], stats: Stats) -> list[list[int]]:
    """transformers' `generate` on the same weights; what its first round yields is of prefill."""
    network, device = job.target.network, job.target.device
    longest, rounds = max(map(len, prompts)), []  # of every round: when it ended, tokens so far
    network.generation_config = GenerationConfig(pad_token_id=0)  # no end of sequence, no penalties
    options = {"do_sample": s.temperature > 0, "max_new_tokens": s.max_new_tokens}
    if s.temperature:
        options |= {"temperature": float(s.temperature), "top_k": s.top_k, "top_p": s.top_p}
    if s.mode == "lookup":
        options["prompt_lookup_num_tokens"] = s.lookahead
    if s.mode == "assisted":  # K = 0: with its own schedule
        constant = {"num_assistant_tokens": s.lookahead, "assistant_confidence_threshold": 0.0,
                    "num_assistant_tokens_schedule": "constant"} if s.lookahead else {}
        job.draft.network.generation_config = GenerationConfig(pad_token_id=0, **constant)
        options["assistant_model"] = job.draft.network

    def clock(tokens: torch.Tensor, *_, **__) -> torch.Tensor:  # a criterion that stops nothing
        rounds.append((time.perf_counter(), tokens.shape[1] - longest))
        return torch.zeros(len(tokens), dtype=torch.bool, device=device)

    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.arange(longest) >= longest - torch.tensor([[len(prompt)] for prompt in prompts])
    torch.manual_seed(s.seed)
    started = time.perf_counter()
    with torch.inference_mode():
        texts = network.generate(padded.to(device), attention_mask=mask.long().to(device),
                                 stopping_criteria=[clock], **options)
    (first, first_tokens), (last, last_tokens) = rounds[0], rounds[-1]
    stats.tokens += len(prompts) * last_tokens
    stats.prefill_tokens += len(prompts) * first_tokens
    stats.prefill_seconds += first - started
    stats.seconds += last - first
    stats.row_rounds += len(prompts) * (len(rounds) - 1)
    return texts[:, longest:].tolist()


# ---- tables ----

def print_table(title: str, *lines: list) -> None:
    """Header and rows. Columns as wide as they must be; the first is flush left."""
    cells = [["" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell)
              for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells)]
    print(f"\n{title}")
    for first, *others in cells:
        print("  ".join(["", first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip())


def against(ours: Competitor, theirs: Competitor | None) -> str | None:
    """Median of the speed ratios by batch; its 95% interval, from medians of resampled batches."""
    if theirs in (ours, None):
        return None
    ratios, coins = torch.tensor(ours.speeds) / torch.tensor(theirs.speeds), torch.Generator()
    draws = torch.randint(len(ratios), (2000, len(ratios)), generator=coins.manual_seed(0))
    low, high = ratios[draws].quantile(0.5, 1).quantile(torch.tensor([0.025, 0.975])).tolist()
    return f"{ratios.quantile(0.5):.2f} ({low:.2f}-{high:.2f})"


def bounds(c: Competitor, sd: Competitor | None) -> str | None:
    """Corollary 9: between what the speed over SD lies (the lower one: with the neural backup)."""
    ours, theirs = c.figures(), sd.figures() if sd else {}
    if not theirs or not ours["E_hit"]:
        return None
    low, high = speedup_over_sd_bounds(ours["hit_rate"], ours["E_hit"], theirs["tokens_per_round"],
                                       theirs["T_b"] or 0.0)
    return f"{low:.2f}-{high:.2f}" if c.settings.backup == "neural" else f"-{high:.2f}"


def show(job: Run, name: str) -> list[dict[str, Any]]:
    """Measure a row of data, print it, draw it; the results, for --out."""
    row = sweeps(job.settings)[name]
    shown = measure(job, row)
    if not job.leads:
        return []
    named, table = {(c.name, c.value): c for c in shown}, []
    for c in shown:
        ar, sd = (named.get((other, c.value)) for other in ("AR", "SD"))
        quartiles = "-".join(f"{q:.1f}" for q in statistics.quantiles(c.speeds)[::2])
        table.append([c.name, c.value, c, statistics.median(c.speeds), quartiles, against(c, ar),
                      against(c, sd), bounds(c, sd)])
    print_table(f"{name}: {len(job.prompts)} prompts, {job.settings.max_new_tokens} tokens each", [
        "", row.axis, "best with", "tokens/s", "quartiles", "/ AR", "/ SD", "Cor. 9 at one T_v"],
        *table)
    print_table("T_b of SD is T_SD, the drafting that SSD hides", [
        "", row.axis, *map(draw.words, COLUMNS)],
        *([c.name, c.value, *map(c.figures().get, COLUMNS)] for c in shown))
    if row.panels or row.by_hand:
        draw.figure(job, name, row, shown)
    return [{"sweep": name, "name": c.name, row.axis: c.value, "with": str(c), "speeds": c.speeds,
             "figures": c.figures()} for c in shown]


# ---- at the paper's scale, without measuring ----

PASS, P_HIT, K_SD = 0.00254, 0.9, 6
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
            E, T_p = expected_tokens(a, K), (K + 1) * PASS / T_v
            speed = throughput(P_HIT, E, E, T_p, T_p) / T_v
            rows.append([name, K, a, T_p, sd, speed, ssd, f"{100 * (speed / ssd - 1):+.0f}%",
                         speed / sd, ssd / sd])
    print_table("Theorem 7, tokens/s", *rows)


def work(s: BenchSettings) -> None:
    if s.predict:
        return predict()
    job = Run(s, read_prompts(s)[:3 if s.quick else None])
    if job.ranks.world != 2:
        raise UserError("bench.py measures one target rank and one draft rank: start two")
    job.join_and_load()
    job.leads, job.drafts = job.ranks.rank == 0, job.draft
    if job.leads:  # for SD
        job.draft = job.load_draft()
    threads = [job.ranks.threads]
    dist.broadcast_object_list(threads, 0)  # both ranks try the same
    job.threads, = threads
    transformers.logging.set_verbosity_error()
    process, own = psutil.Process(), [None, None]
    process.cpu_percent(), psutil.cpu_percent()  # since now
    names = SWEEPS if "all" in s.sweep else s.sweep or ("greedy", "sampled")
    results = [result for name in names for result in show(job, name)]
    dist.all_gather_object(own, process.cpu_percent() / psutil.cpu_count())
    machine = {"machine": platform.platform(), "torch": torch.__version__,
               "transformers": transformers.__version__,
               "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
               "cores used by others": f"{max(0, psutil.cpu_percent() - sum(own)):.0f}%"}
    if job.leads:
        print(f"\n{machine}\nOthers on the cores slow SSD most: it needs two at once.")
        if s.out is not None:
            result = {"machine": machine, "settings": asdict(s), "results": results}
            write_json("--out", s.out, result)


if __name__ == "__main__":
    run(SETTINGS, work)
