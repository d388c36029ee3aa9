"""How the figures of `bench.py --sweep` are drawn. Lines are predicted, by Theorem 7 from what was
counted; points are measured. `axes` are matplotlib's."""
from collections import defaultdict

import torch

from runtime.model import fit_vocabulary
from runtime.rank_counts import counted_miss_rates, fit_power_law
from sampling import Sampler, residual, saguaro_distribution

SSD = "#12365c"  # one colour per method
SD = "#d1662b"
AR = "#8c8c8c"
OTHER = "#6f9a4a"
COLOURS = {"SD": SD, "AR": AR, "lookup backup": OTHER, "random backup": AR, "uniform": OTHER,
           "public noise": OTHER, "all accepted only": AR}
DASHED = ("sampled", "budget 64")
MIN_TOKENS = 50  # bonus tokens to which a power law is fitted
PANELS = {  # the figures on the axes of each panel, x and y; and what is written at each point
    "shape": [("temperature", "hit_rate", ""), ("temperature", "tokens/s", "")],
    "noise": [("temperature", "hit_rate", ""), ("temperature", "tokens/s", "")],
    "downweight": [("hit_rate", "acceptance_rate", "C"), ("C", "tokens/s", "")],
    "batch": [("batch size", "tokens/s", "")],
    "frontier": [("tokens/s of one row", "tokens/s", "batch size")],
    "lookahead": [("lookahead", "tokens/s", ""), ("lookahead", "T_p", "")],
    "budget": [("budget", "hit_rate", ""), ("budget", "tokens/s", "")]}


def words(key: str) -> str:
    if key.startswith(("T_", "E_")):
        return key
    return "utilisation" if key == "verifier_utilisation" else key.replace("_", " ")


def figure(bench, name: str, shown: list[tuple]) -> None:
    import matplotlib  # here, because only sweeps need it
    matplotlib.use("Agg")
    from matplotlib import pyplot
    rows = 2 if name in ("timeline", "downweight") else 1
    columns = {"timeline": 1, "fan-out": 3}.get(name) or len(PANELS[name])
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
             "legend.frameon": False, "legend.fontsize": 8, "svg.fonttype": "none",
             "font.sans-serif": ["DejaVu Sans"],
             "svg.hashsalt": name}  # a fixed salt: same figures, same file
    with pyplot.rc_context(style):
        drawn, axes = pyplot.subplots(rows, columns, squeeze=False, layout="constrained",
                                      figsize=(max(4.6, 3.5 * columns), 2.9 * rows))
        axes = axes.flatten()
        if name == "timeline":
            timeline({point.name: f for point, f in shown}, axes)
        if name == "fan-out":
            fan_out(shown, axes)
        if name == "downweight":
            one_position(bench, axes[2:])
        for ax, panel in zip(axes, PANELS.get(name, ())):
            draw_panel(ax, shown, *panel)
        if name in PANELS and shown[0][0].counted:
            theorem = "Corollary 16" if name in ("batch", "frontier") else "Theorem 7"
            drawn.suptitle(f"lines: counted, and speed by {theorem}; points: measured", fontsize=8)
        drawn.savefig(f"{bench.settings.figures}/{name}.svg", metadata={"Date": None})
        pyplot.close(drawn)


def draw_panel(ax, shown: list[tuple], x: str, y: str, note: str) -> None:
    """A line for each name, and the points that were measured."""
    lines = defaultdict(list)
    for point, f in shown:
        lines[point.name, point.counted].append(f)
    for (name, counted), found in lines.items():
        colour = COLOURS.get(name, SSD)
        dashed = name in DASHED
        predicted = counted or (name, True) not in lines  # or nothing is
        ax.plot([f[x] for f in found], [f[y] for f in found], color=colour, markersize=4.5,
                marker="" if counted else "o", markerfacecolor="white" if dashed else colour,
                linestyle=("--" if dashed else "-") if predicted else "",
                label=name if predicted else None)
        for f in found if predicted and note else ():
            ax.annotate(f"{f[note]:g}", (f[x], f[y]), xytext=(5, 3), fontsize=7, color=colour,
                        textcoords="offset points")
    if x == "batch size":
        ax.set_xscale("log", base=2)
        sizes = [f[x] for f in found]
        ax.set_xticks(sizes, map(str, sizes))
    if y == "T_p":
        ax.axhline(1, color=AR, linewidth=1)
    ax.set(xlabel=words(x), ylabel=words(y), ylim=(0, None))
    ax.margins(y=0.12)
    ax.legend()


def fan_out(shown: list[tuple], axes) -> None:
    """The power law (Def. 11): how often F guesses miss the bonus token, and the fitted r."""
    panels = (("paper", "bonus_ranks", "after the primary"),
              ("paper", "bonus_ranks_after_backup", "after a neural backup"),
              ("public noise", "bonus_ranks", "after the primary, public noise"))
    for ax, (name, table, title) in zip(axes, panels):
        for point, f in shown:
            if point.name != name:
                continue
            ranks = torch.tensor(f[table])
            number = int(ranks.sum())
            miss = torch.tensor(counted_miss_rates(ranks))
            F = torch.arange(1, len(miss) + 1)[miss > 0]
            miss = miss[miss > 0]
            note = f"T = {point.value:g} ({number} tokens)"
            colour = {0.0: SSD, 0.7: OTHER, 1.0: SD}[point.value]
            if number >= MIN_TOKENS:
                r = fit_power_law(miss.tolist())
                scale = (miss.log() + r * F.log()).mean().exp()
                ax.plot(F, scale * F ** -r, color=colour, linewidth=0.8)
                note = f"T = {point.value:g}: r = {r:.2f} ({number} tokens)"
            ax.plot(F, miss, ".", color=colour, label=note)
        ax.set(xscale="log", yscale="log", ylim=(0.005, 1), title=title, xlabel="fan-out F",
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
    labels = [repr(bench.job.tokenizer.decode([token])) for token in shown.tolist()]
    places = torch.arange(6)
    for ax, C, drafted, share in zip(axes, (1, C), (q, sigma), (before, after)):
        bars = {"p": p, "q": drafted, "residual": residual(p, drafted)}
        for i, (name, heights) in enumerate(bars.items()):
            ax.bar(places + 0.27 * (i - 1), heights[place, shown], 0.27, label=name,
                   color=(SSD, SD, OTHER)[i])
        ax.axvspan(-0.5, F - 0.5, color="0.93", zorder=0)
        ax.set(title=f"C = {C:g}: {share[place]:.0%} of the residual is cached", ylim=(0, 1),
               ylabel="probability (grey: cached)")
        ax.set_xticks(places, labels)
    axes[0].legend()


def timeline(found: dict, axes) -> None:
    """Fig. 1: who works when, on the same devices, in the time of eight rounds of SSD. Shown is
    where the number of new tokens is nearest to its mean for so long a time."""
    ends = [end for end, *_ in found["SSD"]["rounds"]]
    length = min(8, len(ends) - 1) * (ends[-1] - ends[0]) / len(ends)
    looks = ((1, ("verify",), "", ""), (0, ("trunk", "step"), "#9db8d6", ""),
             (0, ("backup",), "#f2c490", "////"))
    for name, ax in zip(("SD", "SSD"), axes):
        rounds = found[name]["rounds"]
        begin = typical_start(rounds, length)
        for lane, works, colour, hatch in looks:
            bars = [(1000 * (start - begin), 1000 * (min(stop, begin + length) - start))
                    for work, start, stop in found[name]["spans"]
                    if work in works and begin <= start < begin + length]
            ax.broken_barh(bars, (lane - 0.3, 0.6), facecolor=colour or COLOURS.get(name, SSD),
                           hatch=hatch, edgecolor="white", linewidth=0.4)
        for end, _, hit in rounds if name == "SSD" else ():
            if begin < end <= begin + length:
                ax.annotate("hit" if hit else "miss", (1000 * (end - begin), 1.36), ha="right",
                            fontsize=8)
        ax.annotate(f" {tokens_within(rounds, begin, length)} tokens", (1000 * length, 1),
                    va="center", weight="bold", annotation_clip=False)
        ax.set(yticks=[0, 1], yticklabels=["draft", "target"], ylim=(-0.4, 1.7),
               xlim=(0, 1000 * length), ylabel=name)
    axes[1].set(xlabel="time in ms (blue draft: ahead of the outcome; hatched: the target waits)")
    axes[0].figure.set_size_inches(8, 3.3)


def typical_start(rounds: list[tuple], length: float) -> float:
    ends = [end for end, *_ in rounds]
    mean = length * sum(count for _, count, _ in rounds[1:]) / (ends[-1] - ends[0])
    starts = [end for end in ends if end + length <= ends[-1]] or ends[:1]
    return min(starts, key=lambda start: abs(tokens_within(rounds, start, length) - mean))


def tokens_within(rounds: list[tuple], begin: float, length: float) -> int:
    return sum(count for end, count, _ in rounds if begin < end <= begin + length)
