"""How figures are drawn, from the rows that bench.py has measured. `axes` are matplotlib's.

    python -m figures.draw results.json     draws them again, from what --out has written
"""
if __name__ == "__main__":  # before the imports below, which take seconds
    from cli.launch import exit_status
    from figures.bench_options import draw_again
    raise SystemExit(exit_status(draw_again))

import json
import os
from pathlib import Path
from statistics import LinearRegression, linear_regression

os.environ["MPLBACKEND"] = "agg"  # figures are files, also where a notebook's shell names another

import torch
from matplotlib import pyplot

from cache import critical_batch_size, throughput
from cli.settings import ROOT
from figures.guesses import counted_miss_rates, fit_power_law

SSD = "#12365c"  # one colour per method
SD = "#d1662b"
GREY = "#8c8c8c"
OTHER = "#6f9a4a"
LIGHT = "#9db8d6"
PASSES = {"target, {0}": SSD, "target, {0}, linear": LIGHT, "draft, {1}": SD,
          "draft, {1}, linear": GREY, "sampling": OTHER}  # over {0} tokens and {1} guesses
COLOURS = {"AR": GREY, "private noise": GREY, "SD": SD} | dict.fromkeys(
    ("random backup", "uniform", "public noise, uniform", "SSD, random backup"), OTHER
) | dict.fromkeys(("confident", "public noise, confident"), LIGHT)
LAYOUTS = {"timeline": (2, 1, 8, 3.3), "downweight": (1, 3, 8, 3), "batch": (1, 2, 8, 3.3),
           "noise": (1, 2, 8, 3.3), "frontier": (1, 2, 8, 4), "growth": (1, 3, 8, 3)}
TITLES = {
    "timeline": "In SSD (K = 7) the draft works while the target verifies; in SD (K = 5) one waits",
    "fan-out": "The more bonus tokens are guessed, the fewer are missed: a power law",
    "shape": "Where little is accepted geometric beats uniform; confident (ours) beats both",
    "noise": "With public noise the draft foresees more bonus tokens",
    "downweight": "Saguaro sampling: a smaller C buys cache hits, and pays with accepted tokens",
    "residual": "Saguaro sampling at one position: the target draws what the cache holds",
    "batch": "One miss makes the batch wait: above b* random tokens are the better backup",
    "frontier": "One miss makes a batch wait: with a backup that takes no time, SSD stays ahead "
                "per device, too",
    "lookahead": "A longer lookahead pays until the draft takes longer than the target",
    "growth": "What passes cost as texts, batches and vocabularies grow, and their linear layers"}
PANELS = {  # x and y
    "shape": (("temperature", "hit rate, neural backup"),
              ("temperature", "hit rate, random backup")),
    "downweight": (("C", "hit_rate"), ("C", "acceptance_rate"), ("C", "tokens/s")),
    "lookahead": (("lookahead", "tokens/s"), ("lookahead", "T_p"))}


def figure(folder: str, name: str, found: list[dict]) -> None:
    """Draw the rows of a figure as folder/name.svg."""
    rows, columns, *inches = LAYOUTS.get(name, (1, 2, 7, 3.2))
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
             "legend.frameon": False, "legend.fontsize": 8, "svg.fonttype": "none",
             "font.sans-serif": ["DejaVu Sans"], "figure.titlesize": 10, "axes.titlesize": 9,
             "svg.hashsalt": name}  # a fixed salt: same metrics, same file
    with pyplot.rc_context(style):
        drawn, axes = pyplot.subplots(rows, columns, squeeze=False, layout="constrained",
                                      figsize=inches)
        axes = axes.flatten()
        drawn.suptitle(TITLES[name])
        for ax, panel in zip(axes, PANELS.get(name, ())):
            draw_lines(ax, found, *panel)
        if name in SPECIAL:
            SPECIAL[name](found, axes)
        if len({f.get("predicted") for f in found}) == 2:
            lines = "rates counted, speed predicted" if name == "downweight" else "predicted"
            drawn.supxlabel(f"lines: {lines}; points: measured", fontsize=7, color=GREY)
        drawn.savefig(f"{folder}/{name}.svg", metadata={"Date": None})
        pyplot.close(drawn)


def draw_lines(ax, found: list[dict], x: str, y: str) -> None:
    """A line for each name, of what was predicted, and the points that were measured."""
    found = [f for f in found if f.get(y) is not None]
    names = dict.fromkeys(f["name"] for f in found)
    for name in names:
        colour = COLOURS.get(name, SSD)
        rows = [f for f in found if f["name"] == name]
        line = [f for f in rows if f["predicted"]]
        points = [f for f in rows if not f["predicted"]]
        ax.plot(*columns(line, x, y), color=colour, label=name)
        ax.plot(*columns(points, x, y), "o", color=colour)
    ax.margins(y=0.12)
    highest = 1.05 if "rate" in y else None
    ax.set(xlabel=x, ylabel=y.replace("_rate", " rate"), ylim=(0, highest))
    if x == "C":
        ax.invert_xaxis()  # to the right C falls
    if len(names) > 1:
        ax.legend()
    if y == "T_p":
        ax.axhline(1, color=GREY, linewidth=1)
        ax.annotate("T_p = 1: above, the target waits", (1, 1.02), color=GREY)


def columns(rows: list[dict], x: str, y: str) -> list[list]:
    """The values of two metrics, in all rows."""
    return [[f[metric] for f in rows] for metric in (x, y)]


# ---- what only one figure has ----

WORK = ((1, ("verify",), SSD, ""), (0, ("trunk", "tree"), LIGHT, ""),
        (0, ("backup",), "#f2c490", "////"))  # lane, works, colour and hatch


def timeline(found: list[dict], axes) -> None:
    """Fig. 1: who works when, on the same devices, while the first text is written."""
    ends = []
    for f, ax in zip(found, axes):
        spans = f["spans"]
        begin = min(start for work, start, _ in spans if work in ("verify", "backup"))
        end = max(stop for work, _, stop in spans if work == "verify")
        ends.append(end - begin)
        draw_work(ax, spans, begin)
        ax.set(yticks=[0, 1], yticklabels=["draft", "target"], ylabel=f["name"])
        ax.set_xlim(0, 1.2 * ends[0])
        result = f"{f['tokens']} tokens"
        if len(ends) == 2:
            result += f",\n{ends[0] / ends[1]:.2f} x as fast"
        ax.annotate(result, (ends[-1] + 0.02, 1), va="center",
                    weight="bold")  # by name: before 3.11 matplotlib knows no 700
    axes[1].set(xlabel="seconds (light blue: ahead of the outcome; hatched: the target waits)")


def draw_work(ax, spans: list[tuple], begin: float) -> None:
    """A bar for each (work, start, stop), in seconds after `begin`."""
    for lane, works, colour, hatch in WORK:
        bars = [(start - begin, stop - start) for work, start, stop in spans if work in works]
        ax.broken_barh(bars, (lane - 0.3, 0.6), facecolor=colour, hatch=hatch, edgecolor="white",
                       linewidth=0.4)


def fan_out(found: list[dict], axes) -> None:
    """Fig. 3: how often F guesses miss the bonus token."""
    sources = ("after a speculation of the draft", "after random tokens")
    for source, (ax, title) in enumerate(zip(axes, sources)):
        for f, colour in zip(found, (SSD, LIGHT, OTHER, SD)):
            table = torch.tensor(f["right_guesses"][source])[None]  # [1, n+1]
            if table[:, 1:].sum() >= 100:  # missed first guesses: else too few for a line
                draw_power_law(ax, table, f["temperature"], colour)
        ax.set(xscale="log", yscale="log", ylim=(0.001, 1), xlabel="guesses F", ylabel="miss rate",
               title=title)
        ax.legend(loc="lower left")


def draw_power_law(ax, table: torch.Tensor, temperature: float, colour: str) -> None:
    """The miss rates of a table of right guesses, and the r (Def. 11) fitted, and a factor."""
    rates = counted_miss_rates(table)
    miss = torch.tensor([rate for rate in rates if rate > 0])
    F = torch.arange(1, len(miss) + 1)  # more guesses miss less: only the last rates are 0
    r = fit_power_law(miss.tolist())
    log_factors = miss.log() + r * F.log()
    factor = log_factors.mean().exp()
    law = factor * F ** -r
    outcomes = int(table.sum())
    label = f"T = {temperature:g}: {factor:.2f} F^-{r:.2f} ({outcomes} outcomes)"
    ax.plot(F, law, color=colour, linewidth=0.8)
    ax.plot(F, miss, ".", color=colour, label=label)


BARS = (("target's p", SSD, -0.27), ("draft's q", SD, 0.0), ("residual", OTHER, 0.27))


def one_position(found: list[dict], axes) -> None:
    """Fig. 5, right: p, q and residual of the likeliest tokens, before and after C."""
    for ax, f in zip(axes, found):
        names = [*f["tokens"], "others"]
        for metric, colour, shift in BARS:
            heights = [*f[metric], 1 - sum(f[metric])]
            places = [place + shift for place in range(len(names))]
            ax.bar(places, heights, 0.27, label=metric, color=colour)
        guesses = f["guesses"]
        share = sum(f["residual"][:guesses])
        ax.axvspan(-0.5, guesses - 0.5, color="0.93", zorder=0)
        ax.set(title=f"{f['name']}: {share:.0%} of the residual is on grey", ylim=(0, 1),
               ylabel="probability",
               xlabel=f"next token (grey: the {guesses} likeliest of the draft)")
        ax.set_xticks(range(len(names)), names)
    axes[0].legend()


def noise(found: list[dict], axes) -> None:
    """Hits with private and with public noise: of all tokens, and of what top-k and top-p leave."""
    for ax, top_p in zip(axes, (None, 0.9)):
        rows = [f for f in found if f["top_p"] == top_p]
        draw_lines(ax, rows, "temperature", "hit_rate")
    axes[0].set(title="all tokens")
    axes[1].set(title="top-k 20, top-p 0.9")
    axes[1].get_legend().remove()


def batch(found: list[dict], axes) -> None:
    """Fig. 6, at two lookaheads, with b* of Theorem 17."""
    for ax, K in zip(axes, (3, 7)):
        rows = [f for f in found if f["lookahead"] == K]
        draw_lines(ax, rows, "batch size", "tokens a verification")
        b = critical_batch(rows)
        if 0.5 < b < 64:
            ax.axvline(b, color=GREY, linestyle=":")
            ax.annotate(f"b* = {b:.1f}", (1.04 * b, 0.1), color=GREY)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set(title=f"K = {K}")


def critical_batch(found: list[dict]) -> float:
    """b* by what was counted with each backup. The theorem has one p_hit, and random tokens raise
    it: that counts here as more tokens after a backup."""
    neural = next(f for f in found if f["backup"] == "neural")
    random = next(f for f in found if f["backup"] == "random")
    p = neural["hit_rate"] or 0.0
    E_hit = neural["E_hit"] or 0.0
    E_neural = neural["E_miss"] or 0.0
    after_backup = random["tokens_per_round"] - p * E_hit
    E_fast = after_backup / max(1 - p, 1e-9)
    late = max(0.0, neural["T_p"] - 1)  # see `cache.throughput`
    return critical_batch_size(p, E_hit, E_neural, E_fast, neural["T_p"],
                               T_neural=late + neural["T_b"], T_fast=late)


DEVICES = {"AR": 4, "SD": 4, "SSD, neural backup": 5, "SSD, random backup": 5}  # the paper's
USER = "tokens/s of one text"
OWNER = "tokens/s of all texts, per device"


def frontier(found: list[dict], axes) -> None:
    """Fig. 7: speed for a user and speed per device at batch 1 to 16. Left: this pair, each point
    at the K that is best at its size; here a pass takes as long for 16 rows as for one. Right: the
    pair of the log."""
    logged = h100_rows(read_logs()["h100"])
    for ax, rows in zip(axes, (found, logged)):
        for f in rows:
            f[USER] = f["tokens/s"] / f["batch size"]
            f[OWNER] = f["tokens/s"] / DEVICES[f["name"]]
        draw_lines(ax, rows, USER, OWNER)
        join_batches(ax, [f for f in rows if f["predicted"]])
        users, owners = columns(rows, USER, OWNER)
        ax.set(xlim=(-0.06 * max(users), None), ylim=(min(owners) / 1.5, max(owners) * 4))
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter("{x:g}")
    paced = any(f.get("pace_kept") for f in found)
    axes[0].set(title="this pair, at the pace" if paced else "this pair")
    axes[1].set(title="Llama 70B and 1B on H100s: a log (green: assumed)", ylabel=None)
    axes[1].get_legend().remove()
    for label in axes[0].legend(loc="upper left").get_texts():
        name = label.get_text()
        label.set_text(f"{name} ({DEVICES[name]} devices)")


def join_batches(ax, rows: list[dict]) -> None:
    """A dotted line through the points of each batch size."""
    sizes = dict.fromkeys(f["batch size"] for f in rows)
    for b in sizes:
        same = [f for f in rows if f["batch size"] == b]
        users, owners = columns(same, USER, OWNER)
        first = (users[0], owners[0])
        ax.plot(users, owners, ":", color=GREY, linewidth=0.8, zorder=0)
        ax.annotate(f"batch {b}", first, (-7, 0), textcoords="offset points",
                    ha="right", va="center", color=GREY)


def read_logs() -> dict[str, dict]:
    """The logs of rounds on GPUs, as published, by name."""
    return json.loads((ROOT / "figures/logs.json").read_text("utf-8"))


def verification_fit(log: dict) -> LinearRegression:
    """How many ms a verification of n tokens takes, `intercept` + `slope` n, fitted to the rounds
    of a log that have the temperature of its last."""
    last = log["rounds"][-1]
    rounds = [f for f in log["rounds"] if f["T"] == last["T"]]
    tokens = [f["b"] * (f["K"] + 1) for f in rounds]
    times = [f["verification"] for f in rounds]
    return linear_regression(tokens, times)


def h100_rows(log: dict) -> list[dict]:
    """Rows of the log over batch sizes, greedy. Measured are SSD, and AR and SD (K = 6) at batch 1.
    Predicted are all, by Corollary 16 with the log's hits and tokens, and with verifications as
    fitted. The log has no random tokens as backup: we assume that a miss then yields one token."""
    fit = verification_fit(log)
    rows = [("AR", 1, 66.7, False), ("SD", 1, 181.7, False)]
    for f in log["rounds"][-5:]:
        b = f["b"]
        ahead = f["pre-speculation"]
        backup = f["backup"]
        hits = (f["p_hit"], f["E_hit"])
        lines = {  # tokens verified; p_hit, E_hit, E_miss; ms of a pre-speculation and of a backup
            "AR": (1, 0, 0, 1, 0, 0),
            "SD": (7, 0, 0, 5.03, 0, backup),
            "SSD, neural backup": (8, *hits, f["E_miss"], ahead, backup),
            "SSD, random backup": (8, *hits, 1, ahead, 0)}
        for name, (tokens, *counts, T_p, T_b) in lines.items():
            T_v = fit.intercept + fit.slope * b * tokens
            speed = throughput(*counts, T_p / T_v, T_b / T_v, b) / T_v
            rows.append((name, b, 1000 * b * speed, True))
        rows.append(("SSD, neural backup", b, f["tokens/s"], False))
    names = ("name", "batch size", "tokens/s", "predicted")
    return [dict(zip(names, row)) for row in rows]


def growth(found: list[dict], axes) -> None:
    """The passes of a round while one size grows."""
    first = found[0]
    lowest = first["sampling"] / 60  # leaves room for a legend
    for ax, axis in zip(axes, ("context", "batch size", "vocabulary")):
        rows = [f for f in found if f["name"] == axis]
        for name, colour in PASSES.items():
            name = name.format(first["lookahead"] + 1, first["budget"])
            ax.loglog(*columns(rows, axis, name), ".-", color=colour, label=name)
        ax.set(xlabel=axis, ylabel="ms", ylim=(lowest, None))
    axes[0].legend(loc="lower left")


SPECIAL = {"timeline": timeline, "fan-out": fan_out, "noise": noise, "residual": one_position,
           "batch": batch, "frontier": frontier, "growth": growth}


def figures_of(path: str, folder: str) -> None:
    """Draw all figures that a file of results has rows of."""
    rows = json.loads(Path(path).read_text("utf-8"))["results"]
    for name in TITLES:
        found = [row for row in rows if row["sweep"] == name]
        if found:
            figure(folder, name, found)
