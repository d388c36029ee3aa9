"""How the figures of `bench.py --sweep` are drawn. `lines` are its points by name, as pairs of a
value on the axis and the figures found; `axes` are matplotlib's."""
from collections import defaultdict
from functools import partial

import torch

from cache import PRIMARY, counted_miss_rates, critical_batch_size, fit_power_law
from runtime.model import fit_vocabulary
from runtime.settings import write_json
from sampling import Sampler, residual, saguaro_distribution

SSD = "#12365c"  # one colour per method
SD = "#d1662b"
AR = "#8c8c8c"
OTHER = "#6f9a4a"
COLOURS = {"SD": SD, "AR": AR, "lookup backup": OTHER, "random backup": AR, "uniform": OTHER,
           "public noise": OTHER, "budget 64": OTHER, "all accepted only": AR}
MIN_TOKENS = 50  # bonus tokens to which a power law is fitted
DRAWN = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)  # fan-outs with a marker


def words(key: str) -> str:
    if key.startswith(("T_", "E_")):
        return key
    return "utilisation" if key == "verifier_utilisation" else key.replace("_", " ")


def figure(bench, name: str, points: list, found: list[dict]) -> None:
    import matplotlib  # here, because only sweeps need it
    matplotlib.use("Agg")
    from matplotlib import pyplot
    lines = defaultdict(list)
    for point, figures in zip(points, found):
        lines[point.name].append((point.value, figures))
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
             "legend.frameon": False, "legend.fontsize": 8, "svg.fonttype": "none",
             "font.sans-serif": ["DejaVu Sans"],
             "svg.hashsalt": name}  # a fixed salt: same figures, same file
    draw, rows, columns = FIGURES[name]
    with pyplot.rc_context(style):
        drawn, axes = pyplot.subplots(rows, columns, squeeze=False, layout="constrained",
                                      figsize=(max(4.6, 3.5 * columns), 2.9 * rows))
        draw(bench, lines, axes.flatten())
        drawn.savefig(f"{bench.settings.figures}/{name}.svg", metadata={"Date": None})
        pyplot.close(drawn)


def plot(ax, name: str, pairs: list, y: str, x: str | None = None, **style) -> None:
    """A line over the values on the axis or, given `x`, over that figure, with the values as
    numbers. Markers: measured, or counted; Theorem 7's lines have none."""
    across = [figures[x] if x else value for value, figures in pairs]
    up = [figures[y] for _, figures in pairs]
    look = dict(label=name, color=COLOURS.get(name, SSD), marker="o", markersize=4.5)
    ax.plot(across, up, **look | style)
    for (value, _), *place in zip(pairs if x else (), across, up):
        ax.annotate(f"{value:g}", place, xytext=(5, 3), textcoords="offset points", fontsize=7,
                    color=look["color"])


def simple(panels: tuple, bench, lines: dict, axes) -> None:
    """Every line in every panel: y, x or None, label of the y axis, and of the x axis."""
    for ax, (y, x, y_label, x_label) in zip(axes, panels):
        for name, pairs in lines.items():
            plot(ax, name, pairs, y, x)
            if y == "tokens/s" and pairs[0][1]["measured"] and not x:
                plot(ax, None, pairs, "Theorem 7", marker="", linewidth=0.8,
                     color=COLOURS.get(name, SSD))
        label(ax, x_label, y_label)
    axes[0].legend()


def label(ax, x: str, y: str) -> None:
    ax.set(xlabel=x, ylabel=y, ylim=(0, None))
    ax.margins(y=0.12)


def fan_out(bench, lines: dict, axes) -> None:
    """The power law (Def. 11): how often F guesses miss the bonus token, and the fitted r."""
    panels = (("paper", "bonus_ranks", "after the primary"),
              ("paper", "bonus_ranks_after_backup", "after a neural backup"),
              ("public noise", "bonus_ranks", "after the primary, public noise"))
    for ax, (name, table, title) in zip(axes, panels):
        for (heat, figures), marker in zip(lines[name], "os^"):
            ranks = torch.tensor(figures[table])
            miss = torch.tensor(counted_miss_rates(ranks))
            F = torch.arange(1, len(miss) + 1)
            shown = (miss > 0) & torch.isin(F, torch.tensor(DRAWN))
            number = int(ranks.sum())
            note = f"T = {heat:g} ({number} tokens)"
            colour = {0.0: SSD, 0.7: OTHER, 1.0: SD}[heat]
            if number >= MIN_TOKENS:
                r = fit_power_law(miss.tolist())
                some = miss > 0
                scale = (miss[some].log() + r * F[some].log()).mean().exp()
                ax.plot(F, scale * F ** -r, color=colour, linewidth=0.8)
                note = f"T = {heat:g}: r = {r:.2f} ({number} tokens)"
            ax.plot(F[shown], miss[shown], marker, color=colour, markersize=4.5, label=note)
        ticks = (1, 2, 4, 8, 16, 32, 64)
        rates = (0.01, 0.03, 0.1, 0.3, 1)
        ax.set(xscale="log", yscale="log", ylim=(0.005, 1), title=title, xlabel="fan-out F",
               ylabel="share of bonus tokens not guessed")
        ax.set_xticks(ticks, map(str, ticks))
        ax.set_yticks(rates, map(str, rates))
        ax.minorticks_off()
        ax.legend(loc="lower left")


def shape(bench, lines: dict, axes) -> None:
    """Hits of three shapes on the very same outcomes; speed by Theorem 7, and some measured."""
    K = lines["counted"][0][1]["lookahead"]
    last = ",".join(["0"] * K + ["24"])
    for name, policy in (("geometric", "geometric"), ("uniform", "uniform"),
                         ("all accepted only", last)):
        pairs = [(heat, bench.of_any_cache(figures, policy, 24))
                 for heat, figures in lines["counted"]]
        plot(axes[0], name, pairs, "hit_rate")
        plot(axes[1], name, pairs, "tokens/s", marker="")
    plot(axes[1], "SD", lines["SD"], "tokens/s", marker="")
    plot(axes[1], "geometric, measured", lines["geometric"], "tokens/s", linestyle="")
    label(axes[0], "temperature", "hit rate")
    label(axes[1], "temperature", "tokens/s (lines: Theorem 7)")
    axes[1].legend()


def budget(bench, lines: dict, axes) -> None:
    """Hits and speed over the budget, from one run of the largest."""
    sizes = (0, 6, 12, 18, 24, 36, 48, 64)
    for ax, y in zip(axes, ("hit_rate", "tokens/s")):
        for (heat, figures), dashes in zip(lines["counted"], ("-", "--")):
            pairs = [(size, bench.of_any_cache(figures, "geometric", size)) for size in sizes]
            plot(ax, f"temperature {heat:g}", pairs, y, marker="", linestyle=dashes)
        plot(ax, f"temperature {heat:g}, measured", lines["measured"], y, linestyle="")
    label(axes[0], "budget", "hit rate")
    label(axes[1], "budget", "tokens/s (lines: Theorem 7)")
    axes[0].legend()


def lookahead(bench, lines: dict, axes) -> None:
    simple((("tokens/s", None, "tokens/s (thin: Theorem 7)", "lookahead K"),), bench, lines, axes)
    plot(axes[1], "SSD", lines["SSD"], "T_p")
    axes[1].axhline(1, color=AR, linewidth=1)
    label(axes[1], "lookahead K", "T_p (above 1 the verifier waits)")


def batch(bench, lines: dict, axes) -> None:
    """b* (Thm. 17) of each cheap backup, from what was measured at batch size 1."""
    simple((("tokens/s", None, "tokens/s (thin: Corollary 16)", "batch size"),), bench, lines, axes)
    axes[0].set_xscale("log", base=2)
    axes[0].set_xticks((1, 2, 4, 8, 16), ("1", "2", "4", "8", "16"))
    names = ("hit_rate", "E_hit", "E_miss", "T_p", "T_b")
    neural = [lines["neural backup"][0][1][key] or 0.0 for key in names]
    for name in ("lookup backup", "random backup"):
        cheap = lines[name][0][1]
        b = critical_batch_size(*neural[:3], cheap["E_miss"] or 0.0, *neural[3:],
                                cheap["T_b"] or 0.0)
        print(f"  neural against {name}: b* = {b:.1f} (Thm. 17)")


def downweight(bench, lines: dict, axes) -> None:
    """Acceptance against hits as C falls, speed, and one position before and after."""
    simple((("acceptance_rate", "hit_rate", "acceptance rate (numbers: C)", "hit rate"),
            ("tokens/s", None, "tokens/s by Theorem 7", "C")), bench, lines, axes)
    one_position(bench, axes[2:])


def one_position(bench, axes) -> None:
    """p, q and residual before and after C, where in the first prompt C moves most of it."""
    job = bench.job
    s = bench.settings
    C = 0.2
    F = 4
    tokens = torch.tensor(job.prompts[:1])
    distributions = []
    for model in (bench.sd_models.target, bench.sd_models.draft):
        with torch.inference_mode():
            logits = model.model(tokens.to(model.device)).logits[0].cpu()
        sampler = Sampler(s.temperature or 1.0, s.top_k, s.top_p)
        distributions.append(sampler.probabilities(fit_vocabulary(logits, job.vocab_size)))
    p, q = distributions
    sigma = saguaro_distribution(q, F, C)
    likeliest = q.topk(6).indices
    cached = likeliest[:, :F]
    shares = [residual(p, each).gather(1, cached).sum(1) for each in (q, sigma)]
    place = (shares[1] - shares[0]).argmax()
    labels = [repr(job.tokenizer.decode([token])) for token in likeliest[place].tolist()]
    places = torch.arange(6)
    for ax, C, drafted, share in zip(axes, (1, C), (q, sigma), shares):
        for i, (name, heights) in enumerate((
                ("p", p), ("q", drafted), ("residual", residual(p, drafted)))):
            ax.bar(places + 0.27 * (i - 1), heights[place, likeliest[place]], 0.27, label=name,
                   color=(SSD, SD, OTHER)[i])
        ax.axvspan(-0.5, F - 0.5, color="0.93", zorder=0)
        ax.set(title=f"C = {C:g}: {share[place]:.0%} of the residual is cached", ylim=(0, 1),
               ylabel="probability (grey: cached)")
        ax.set_xticks(places, labels)
    axes[0].legend()


def timeline(bench, lines: dict, axes) -> None:
    """Fig. 1: who works when, in a typical second of SD and of SSD on the same devices; and all of
    it as a trace, for chrome://tracing or ui.perfetto.dev."""
    trace = []
    rounds = 8
    looks = ((1, ("verify",), None, ""), (0, ("trunk", "step"), "#9db8d6", ""),
             (0, ("backup",), "#f2c490", "////"))
    window = None
    for name, ax in (("SSD", axes[1]), ("SD", axes[0])):  # SSD first: it sets the scale
        (_, figures), = lines[name]
        spans = figures["spans"]
        new_tokens = figures["new_tokens"]
        times = [time for time, _, _ in new_tokens]
        hits = torch.tensor([float(source == PRIMARY) for *_, source in new_tokens])
        windows = hits[1:].unfold(0, rounds, 1).mean(1)
        first = 1 + int((windows - hits[1:].mean()).abs().argmin())
        begin = times[first - 1]
        window = window or times[first + rounds - 1] - begin
        end = begin + window
        for lane, works, colour, hatch in looks:
            bars = [(1000 * (start - begin), 1000 * (min(stop, end) - start))
                    for work, start, stop in spans if work in works and begin <= start < end]
            ax.broken_barh(bars, (lane - 0.3, 0.6), facecolor=colour or COLOURS.get(name, SSD),
                           hatch=hatch, edgecolor="white", linewidth=0.4)
        for time, _, source in new_tokens[1:]:
            if name == "SSD" and begin < time <= end:
                ax.annotate("hit" if source == PRIMARY else "miss", (1000 * (time - begin), 1.36),
                            ha="right", fontsize=8)
        count = sum(count for time, count, _ in new_tokens if begin < time <= end)
        ax.annotate(f" {count} tokens", (1000 * window, 1), va="center", weight="bold",
                    annotation_clip=False)
        ax.set(yticks=[0, 1], yticklabels=["draft", "target"], ylim=(-0.4, 1.7),
               xlim=(0, 1000 * window), ylabel=name)
        trace += [{"name": f"{name}: {work}", "ph": "X", "pid": name, "tid": work,
                   "ts": 1e6 * start, "dur": 1e6 * (stop - start)} for work, start, stop in spans]
    axes[1].set(xlabel="time in ms (blue draft: ahead of the outcome; hatched: the target waits)")
    axes[0].figure.set_size_inches(8, 3.3)
    write_json("--figures", f"{bench.settings.figures}/timeline.json", {"traceEvents": trace})


NOISE = (("hit_rate", None, "hit rate", "temperature"),
         ("tokens/s", None, "tokens/s by Theorem 7", "temperature"))
FRONTIER = (("tokens/s", "tokens/s of one row", "tokens/s of all (numbers: batch size)",
             "tokens/s of one row"),)
FIGURES = {  # how it is drawn, and its rows and columns of panels
    "timeline": (timeline, 2, 1), "fan-out": (fan_out, 1, 3), "shape": (shape, 1, 2),
    "downweight": (downweight, 2, 2), "noise": (partial(simple, NOISE), 1, 2),
    "batch": (batch, 1, 1), "frontier": (partial(simple, FRONTIER), 1, 1),
    "lookahead": (lookahead, 1, 2), "budget": (budget, 1, 2)}
