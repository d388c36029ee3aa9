"""How figures are drawn, from the rows that bench.py has measured. `axes` are matplotlib's.

    python -m figures.draw results.json     draws them again, from what --out has written
"""
import json
import os
from pathlib import Path
from statistics import LinearRegression, linear_regression

os.environ["MPLBACKEND"] = "agg"  # figures are files, also where a notebook's shell names another

import torch
from matplotlib import pyplot

from cache import critical_batch_size, throughput
from cli.launch import exit_status
from cli.settings import ROOT, Parser
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
    for name in dict.fromkeys(f["name"] for f in found):
        rows = [f for f in found if f["name"] == name]
        line = [f for f in rows if f["predicted"]]
        points = [f for f in rows if not f["predicted"]]
        colour = COLOURS.get(name, SSD)
        ax.plot([f[x] for f in line], [f[y] for f in line], color=colour, label=name)
        ax.plot([f[x] for f in points], [f[y] for f in points], "o", color=colour)
    ax.margins(y=0.12)
    ax.set(xlabel=x, ylabel=y.replace("_rate", " rate"), ylim=(0, 1.05 if "rate" in y else None))
    if x == "C":
        ax.invert_xaxis()  # to the right C falls
    if len({f["name"] for f in found}) > 1:
        ax.legend()
    if y == "T_p":
        ax.axhline(1, color=GREY, linewidth=1)
        ax.annotate("T_p = 1: above, the target waits", (1, 1.02), color=GREY)


# ---- what only one figure has ----

def timeline(found: list[dict], axes) -> None:
    """Fig. 1: who works when, on the same devices, while the first text is written."""
    looks = ((1, ("verify",), SSD, ""), (0, ("trunk", "tree"), LIGHT, ""),
             (0, ("backup",), "#f2c490", "////"))
    ends = []
    for f, ax in zip(found, axes):
        begin = min(start for work, start, _ in f["spans"] if work in ("verify", "backup"))
        ends.append(max(stop for work, _, stop in f["spans"] if work == "verify") - begin)
        for lane, works, colour, hatch in looks:
            bars = [(start - begin, stop - start) for work, start, stop in f["spans"]
                    if work in works]
            ax.broken_barh(bars, (lane - 0.3, 0.6), facecolor=colour, hatch=hatch,
                           edgecolor="white", linewidth=0.4)
        ax.set(yticks=[0, 1], yticklabels=["draft", "target"], ylabel=f["name"])
        ax.set_xlim(0, 1.2 * ends[0])
        faster = f",\n{ends[0] / ends[-1]:.2f} x as fast" if len(ends) == 2 else ""
        ax.annotate(f"{f['tokens']} tokens{faster}", (ends[-1] + 0.02, 1), va="center",
                    weight="bold")  # by name: before 3.11 matplotlib knows no 700
    axes[1].set(xlabel="seconds (light blue: ahead of the outcome; hatched: the target waits)")


def fan_out(found: list[dict], axes) -> None:
    """Fig. 3: how often F guesses miss the bonus token; the r (Def. 11) fitted, and a factor."""
    for source, ax in enumerate(axes):
        for f, colour in zip(found, (SSD, LIGHT, OTHER, SD)):
            table = torch.tensor(f["right_guesses"][source])[None]  # [1, n+1]
            if table[:, 1:].sum() < 100:  # missed first guesses: too few for a line
                continue
            miss = torch.tensor([rate for rate in counted_miss_rates(table) if rate > 0])
            F = torch.arange(1, len(miss) + 1)  # more guesses miss less: only the last rates are 0
            r = fit_power_law(miss.tolist())
            factor = (miss.log() + r * F.log()).mean().exp()
            ax.plot(F, factor * F ** -r, color=colour, linewidth=0.8)
            ax.plot(F, miss, ".", color=colour, label=f"T = {f['temperature']:g}: {factor:.2f} "
                    f"F^-{r:.2f} ({int(table.sum())} outcomes)")
        ax.set(xscale="log", yscale="log", ylim=(0.001, 1), xlabel="guesses F", ylabel="miss rate",
               title=("after a speculation of the draft", "after random tokens")[source])
        ax.legend(loc="lower left")


def one_position(found: list[dict], axes) -> None:
    """Fig. 5, right: p, q and residual of the likeliest tokens, before and after C."""
    for ax, f in zip(axes, found):
        for i, (name, colour) in enumerate(zip(("target's p", "draft's q", "residual"),
                                               (SSD, SD, OTHER))):
            heights = [*f[name], 1 - sum(f[name])]
            ax.bar([place + 0.27 * (i - 1) for place in range(len(heights))], heights, 0.27,
                   label=name, color=colour)
        ax.axvspan(-0.5, f["guesses"] - 0.5, color="0.93", zorder=0)
        share = sum(f["residual"][:f["guesses"]])
        ax.set(title=f"{f['name']}: {share:.0%} of the residual is on grey", ylim=(0, 1),
               ylabel="probability",
               xlabel=f"next token (grey: the {f['guesses']} likeliest of the draft)")
        ax.set_xticks(range(len(heights)), [*f["tokens"], "others"])
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
    E_fast = (random["tokens_per_round"] - p * E_hit) / max(1 - p, 1e-9)
    late = max(0.0, neural["T_p"] - 1)  # see `cache.throughput`
    return critical_batch_size(p, E_hit, neural["E_miss"] or 0.0, E_fast, neural["T_p"],
                               T_neural=late + neural["T_b"], T_fast=late)


DEVICES = {"AR": 4, "SD": 4, "SSD, neural backup": 5, "SSD, random backup": 5}  # the paper's
USER = "tokens/s of one text"
OWNER = "tokens/s of all texts, per device"


def frontier(found: list[dict], axes) -> None:
    """Fig. 7: speed for a user and speed per device at batch 1 to 16; dotted lines join the
    same batch size. Left: this pair, each point at the K that is best at its size; here a pass
    takes as long for 16 rows as for one. Right: the pair of the log."""
    logged = h100_rows(json.loads((ROOT / "figures/logs.json").read_text("utf-8"))["h100"])
    for ax, rows in zip(axes, (found, logged)):
        for f in rows:
            f |= {USER: f["tokens/s"] / f["batch size"], OWNER: f["tokens/s"] / DEVICES[f["name"]]}
        draw_lines(ax, rows, USER, OWNER)
        lines = [f for f in rows if f["predicted"]]
        for b in dict.fromkeys(f["batch size"] for f in lines):
            x, y = zip(*[(f[USER], f[OWNER]) for f in lines if f["batch size"] == b])
            ax.plot(x, y, ":", color=GREY, linewidth=0.8, zorder=0)
            ax.annotate(f"batch {b}", (x[0], y[0]), (-7, 0), textcoords="offset points",
                        ha="right", va="center", color=GREY)
        lowest, *_, highest = sorted(f[OWNER] for f in rows)
        ax.set(xlim=(-0.06 * max(f[USER] for f in rows), None), ylim=(lowest / 1.5, highest * 4))
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter("{x:g}")
    paced = any(f.get("pace_kept") for f in found)
    axes[0].set(title="this pair, at the pace" if paced else "this pair")
    axes[1].set(title="Llama 70B and 1B on H100s: a log (green: assumed)", ylabel=None)
    axes[1].get_legend().remove()
    for label in axes[0].legend(loc="upper left").get_texts():
        label.set_text(f"{label.get_text()} ({DEVICES[label.get_text()]} devices)")


def verification_fit(log: dict) -> LinearRegression:
    """How many ms a verification of n tokens takes, `intercept` + `slope` n, fitted to the rounds
    of a log that have the temperature of its last."""
    rounds = [f for f in log["rounds"] if f["T"] == log["rounds"][-1]["T"]]
    return linear_regression([f["b"] * (f["K"] + 1) for f in rounds],
                             [f["verification"] for f in rounds])


def h100_rows(log: dict) -> list[dict]:
    """Rows of the log over batch sizes, greedy. Measured are SSD, and AR and SD (K = 6) at batch 1.
    Predicted are all, by Corollary 16 with the log's hits and tokens, and with verifications as
    fitted. The log has no random tokens as backup: we assume that a miss then yields one token."""
    fit = verification_fit(log)
    rows = [("AR", 1, 66.7, False), ("SD", 1, 181.7, False)]
    for f in log["rounds"][-5:]:
        b = f["b"]
        ahead = f["pre-speculation"]
        lines = {  # tokens verified; p_hit, E_hit, E_miss; ms of a pre-speculation and of a backup
            "AR": (1, 0, 0, 1, 0, 0),
            "SD": (7, 0, 0, 5.03, 0, f["backup"]),
            "SSD, neural backup": (8, f["p_hit"], f["E_hit"], f["E_miss"], ahead, f["backup"]),
            "SSD, random backup": (8, f["p_hit"], f["E_hit"], 1, ahead, 0)}
        for name, (tokens, *counts, T_p, T_b) in lines.items():
            T_v = fit.intercept + fit.slope * b * tokens
            speed = throughput(*counts, T_p / T_v, T_b / T_v, b) / T_v
            rows.append((name, b, 1000 * b * speed, True))
        rows.append(("SSD, neural backup", b, f["tokens/s"], False))
    return [dict(zip(("name", "batch size", "tokens/s", "predicted"), row)) for row in rows]


def growth(found: list[dict], axes) -> None:
    """The passes of a round while one size grows."""
    passes = [name.format(found[0]["lookahead"] + 1, found[0]["budget"]) for name in PASSES]
    for ax, axis in zip(axes, ("context", "batch size", "vocabulary")):
        rows = [f for f in found if f["name"] == axis]
        for name, colour in zip(passes, PASSES.values()):
            ax.loglog([f[axis] for f in rows], [f[name] for f in rows], ".-", color=colour)
        ax.set(xlabel=axis, ylabel="ms", ylim=(found[0]["sampling"] / 60, None))  # for a legend
    axes[0].legend(passes, loc="lower left")


SPECIAL = {"timeline": timeline, "fan-out": fan_out, "noise": noise, "residual": one_position,
           "batch": batch, "frontier": frontier, "growth": growth}


def main() -> None:
    parser = Parser(description="Draw figures again, from what bench.py --sweep --out has written.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="results of --out (JSON)")
    parser.add_argument("--figures", default="figures", help="folder for the figures")
    args = parser.parse_args()
    for path in args.files:
        rows = json.loads(Path(path).read_text("utf-8"))["results"]
        for name in TITLES.keys() & {f["sweep"] for f in rows}:
            figure(args.figures, name, [f for f in rows if f["sweep"] == name])


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
