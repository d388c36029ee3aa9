"""How the figures of `bench.py --sweep` are drawn. Lines are predicted, by Theorem 7 from what was
counted; points are measured. `axes` are matplotlib's."""
from collections import defaultdict

import torch

from runtime.model import fit_vocabulary
from runtime.stats import counted_miss_rates, fit_power_law
from sampling import Sampler, residual, saguaro_distribution

SSD = "#12365c"  # one colour per method
SD = "#d1662b"
AR = "#8c8c8c"
OTHER = "#6f9a4a"
COLOURS = {"SD": SD, "AR": AR, "lookup backup": OTHER, "random backup": AR, "uniform": OTHER,
           "public noise": OTHER, "all accepted only": AR}
DASHED = ("sampled", "budget 64")
MIN_TOKENS = 50  # bonus tokens to which a power law is fitted
LAYOUTS = {"timeline": (2, 1, 8, 3.3), "downweight": (2, 2, 7, 5.8), "batch": (1, 1, 4.6, 2.9),
           "frontier": (1, 1, 4.6, 2.9)}  # rows, columns, width and height in inches
PANELS = {  # the figures on the axes of each panel, x and y; and what is written at each point
    "shape": [("temperature", "hit_rate", ""), ("temperature", "tokens/s", "")],
    "noise": [("temperature", "hit_rate", ""), ("temperature", "tokens/s", "")],
    "downweight": [("hit_rate", "acceptance_rate", "C"), ("C", "tokens/s", "")],
    "batch": [("batch size", "tokens/s", "")],
    "frontier": [("tokens/s of one row", "tokens/s", "batch size")],
    "lookahead": [("lookahead", "tokens/s", ""), ("lookahead", "T_p", "")],
    "budget": [("budget", "hit_rate", ""), ("budget", "tokens/s", "")]}


def figure(bench, name: str, found: list[dict]) -> None:
    import matplotlib  # here, because only sweeps need it
    matplotlib.use("Agg")
    from matplotlib import pyplot
    rows, columns, *inches = LAYOUTS.get(name, (1, 2, 7, 2.9))
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
             "legend.frameon": False, "legend.fontsize": 8, "svg.fonttype": "none",
             "font.sans-serif": ["DejaVu Sans"],
             "svg.hashsalt": name}  # a fixed salt: same figures, same file
    with pyplot.rc_context(style):
        drawn, axes = pyplot.subplots(rows, columns, squeeze=False, layout="constrained",
                                      figsize=inches)
        axes = axes.flatten()
        if name == "timeline":
            timeline(found, axes)
        if name == "fan-out":
            fan_out(found, axes)
        if name == "downweight":
            one_position(bench, axes[2:])
        for ax, panel in zip(axes, PANELS.get(name, ())):
            draw_panel(ax, found, *panel)
        if name in PANELS and found[0]["counted"]:
            theorem = "Corollary 16" if name in ("batch", "frontier") else "Theorem 7"
            drawn.suptitle(f"lines: counted, and speed by {theorem}; points: measured", fontsize=8)
        drawn.savefig(f"{bench.settings.figures}/{name}.svg", metadata={"Date": None})
        pyplot.close(drawn)


def draw_panel(ax, found: list[dict], x: str, y: str, note: str) -> None:
    """A line for each name, and the points that were measured."""
    lines = defaultdict(list)
    for f in found:
        lines[f["name"], f["counted"]].append(f)
    for (name, counted), line in lines.items():
        colour = COLOURS.get(name, SSD)
        dashed = name in DASHED
        predicted = counted or (name, True) not in lines  # or nothing is
        ax.plot([f[x] for f in line], [f[y] for f in line], color=colour, markersize=4.5,
                marker="" if counted else "o", markerfacecolor="white" if dashed else colour,
                linestyle=("--" if dashed else "-") if predicted else "",
                label=name if predicted else None)
        for f in line if predicted and note else ():
            ax.annotate(f"{f[note]:g}", (f[x], f[y]), xytext=(5, 3), fontsize=7, color=colour,
                        textcoords="offset points")
    if x == "batch size":
        ax.set_xscale("log", base=2)
        sizes = [f[x] for f in line]
        ax.set_xticks(sizes, map(str, sizes))
    if y == "T_p":
        ax.axhline(1, color=AR, linewidth=1)
    ax.set(xlabel=x.replace("_rate", " rate"), ylabel=y.replace("_rate", " rate"), ylim=(0, None))
    ax.margins(y=0.12)
    if note == "batch size":  # so that the labels of small ones do not collide
        ax.set(yscale="log", ylim=(10, None))
    ax.legend()


def fan_out(found: list[dict], axes) -> None:
    """The power law (Def. 11): how often F guesses miss the bonus token, and the fitted r."""
    for f in found:
        ax = axes[1 if f["name"] == "public noise" else 0]
        temperature = f["temperature"]
        colour = {0.0: SSD, 0.7: OTHER, 1.0: SD}[temperature]
        miss = torch.tensor(counted_miss_rates(f["ranks"]))
        F = torch.arange(1, len(miss) + 1)[miss > 0]
        miss = miss[miss > 0]
        number = int(f["ranks"].sum())
        note = f"T = {temperature:g} ({number} tokens)"
        if number >= MIN_TOKENS:
            r = fit_power_law(miss.tolist())
            scale = (miss.log() + r * F.log()).mean().exp()
            ax.plot(F, scale * F ** -r, color=colour, linewidth=0.8)
            note = f"T = {temperature:g}: r = {r:.2f} ({number} tokens)"
        ax.plot(F, miss, ".", color=colour, label=note)
        ax.set(xscale="log", yscale="log", ylim=(0.002, 1), title=f["name"], xlabel="fan-out F",
               ylabel="share of bonus tokens not guessed")
        ax.legend(loc="lower left")


def one_position(bench, axes) -> None:
    """p, q and residual before and after C, where in the first prompt C moves most of it."""
    F = 4
    C = 0.2
    sampler = Sampler(bench.settings.temperature or 1.0)
    distributions = []
    for model in (bench.sd_models.target, bench.sd_models.draft):
        with torch.inference_mode():
            logits = model.model(torch.tensor(bench.prompts[:1], device=model.device)).logits[0]
        logits = fit_vocabulary(logits, bench.job.vocab_size)
        distributions.append(sampler.probabilities(logits).cpu())
    p, q = distributions
    sigma = saguaro_distribution(q, F, C)
    likeliest = q.topk(6).indices
    before, after = [residual(p, drafted).gather(1, likeliest[:, :F]).sum(1)
                     for drafted in (q, sigma)]
    place = (after - before).argmax()
    shown = likeliest[place]
    for ax, C, drafted, share in zip(axes, (1, C), (q, sigma), (before, after)):
        bars = {"p": (p, SSD), "q": (drafted, SD), "residual": (residual(p, drafted), OTHER)}
        for i, (name, (heights, colour)) in enumerate(bars.items()):
            ax.bar(torch.arange(6) + 0.27 * (i - 1), heights[place, shown], 0.27, label=name,
                   color=colour)
        ax.axvspan(-0.5, F - 0.5, color="0.93", zorder=0)
        ax.set(title=f"C = {C:g}: {share[place]:.0%} of the residual is cached", ylim=(0, 1),
               ylabel="probability (grey: cached)")
        ax.set_xticks(range(6), [repr(bench.job.tokenizer.decode([token])) for token in shown])
    axes[0].legend()


def timeline(found: list[dict], axes) -> None:
    """Fig. 1: who works when, on the same devices, while the first text is written."""
    looks = ((1, ("verify",), None, ""), (0, ("trunk", "step"), "#9db8d6", ""),
             (0, ("backup",), "#f2c490", "////"))
    longest = 0.0
    for f, ax in zip(found, axes):
        begin = min(start for work, start, _ in f["spans"] if work in ("verify", "backup"))
        end = max(stop for work, _, stop in f["spans"] if work == "verify")
        longest = max(longest, end - begin)
        for lane, works, colour, hatch in looks:
            bars = [(start - begin, stop - start) for work, start, stop in f["spans"]
                    if work in works]
            ax.broken_barh(bars, (lane - 0.3, 0.6), facecolor=colour or COLOURS.get(f["name"], SSD),
                           hatch=hatch, edgecolor="white", linewidth=0.4)
        ax.annotate(f"  {f['tokens']} tokens", (end - begin, 1), va="center", weight="bold")
        ax.set(yticks=[0, 1], yticklabels=["draft", "target"], ylabel=f["name"])
    for ax in axes:
        ax.set_xlim(0, 1.1 * longest)
    axes[1].set(xlabel="seconds (light blue: ahead of the outcome; hatched: the target waits)")
