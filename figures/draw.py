"""How the figures of `bench.py --sweep` are drawn. `shown` are its competitors, one for every line
and every value on the axis of a row of its table; `axes` are matplotlib's."""
import itertools
import math

import torch

from cache import critical_batch_size, fit_power_law, throughput
from runtime.model import fit_vocabulary
from runtime.settings import write_json
from sampling import Warping, residual, saguaro_distribution

INK = ("#12365c", "#d1662b", "#8aa36b", "#a9a9a9")  # from dark to light: different in grey too
STYLES = [{"color": colour, "marker": marker, "linestyle": dashes, "markersize": 4.5}
          for colour, marker, dashes in zip(INK, "os^D", ("-", "--", ":", "-."))]
THIN = {"marker": "", "linewidth": 0.8}
DRAWN = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)  # fan-outs with a marker


def words(key: str) -> str:
    return key if key.startswith(("T_", "E_")) else key.replace("_", " ").replace("downweight", "C")


def figure(job, name: str, row, shown: list) -> None:
    import matplotlib  # here, because only sweeps need it
    matplotlib.use("Agg")
    from matplotlib import pyplot
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
             "legend.frameon": False, "legend.fontsize": 8,
             "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"],
             "svg.hashsalt": name}  # a fixed salt: same figures, same file
    with pyplot.rc_context(style):
        rows, columns = row.grid
        drawn, axes = pyplot.subplots(rows, columns, squeeze=False, layout="constrained",
                                      figsize=(max(4.6, 3.5 * columns), 2.9 * rows))
        for panel, ax in zip(row.panels, axes.flat):
            lines(ax, row, shown, *(panel if isinstance(panel, tuple) else (panel, None)))
            axes[0, 0].legend()
        if row.by_hand:
            row.by_hand(job, shown, axes.flatten())
        drawn.savefig(f"{job.settings.figures}/{name}.svg", metadata={"Date": None})
        pyplot.close(drawn)


def lines(ax, row, shown: list, y: str, x: str | None) -> None:
    """Every line of a sweep: y over its axis, beside speeds Theorem 7, thin; or y over x."""
    theory = y == "tokens/s" and not x
    for name, style in zip(row.lines, STYLES):
        points = [(c.value, c.figures()) for c in shown if c.name == name]
        points = [(value, found) for value, found in points if found[y] is not None]
        across = [found[x] if x else value for value, found in points]
        ax.plot(across, [found[y] for _, found in points], label=name, **style)
        if theory:
            ax.plot(across, [found["Theorem 7"] for _, found in points], **style | THIN)
        for value, found in points if x else ():
            ax.annotate(f"{value:g}", (found[x], found[y]), xytext=(4, 4),
                        textcoords="offset points", fontsize=7)
    if not x and row.values[-1] > 10:
        ax.set_xscale("symlog", base=2, linthresh=row.values[1])
    if x:
        ax.set_title(f"numbers: {words(row.axis)}")
    else:
        ax.set_xticks(row.values, map(str, row.values))
    if y == "T_p":
        ax.axhline(1, color="grey", linewidth=1)
    ax.margins(y=0.12)
    notes = {"T_p": " (above 1 the verifier waits)", "tokens/s": " (thin: Theorem 7)" * theory}
    ax.set(xlabel=words(x or row.axis), ylim=(0, None), ylabel=words(y) + notes.get(y, ""))


def critical_sizes(job, shown: list, axes) -> None:
    """b* (Thm. 17) of each cheap backup, from what was measured at batch size 1."""
    neural, *cheap = (c.figures() for c in shown if c.value == 1)
    parts = [neural[key] or 0.0 for key in ("hit_rate", "E_hit", "E_miss", "T_p", "T_b")]
    for other, name in zip(cheap, ("fast", "random")):
        b = critical_batch_size(*parts[:3], other["E_miss"] or 0.0, *parts[3:], other["T_b"] or 0.0)
        print(f"  neural against {name} backup: b* = {b:.1f} (Thm. 17)")
        if 1 <= b <= shown[-1].value:
            axes[0].axvline(b, color="grey", linewidth=1)
            axes[0].annotate(f" b*, {name}", (b, 0), fontsize=8, va="bottom")


def fan_out(job, shown: list, axes) -> None:
    """The power law (Def. 11): how often F guesses miss the bonus token, and the fitted r."""
    ticks, rates = (1, 2, 4, 8, 16, 32), (0.01, 0.03, 0.1, 0.3, 1)
    for ax, name, source, title in zip(axes, ("plain", "plain", "public noise"), (
            "primary", "neural", "primary"), ("primary", "neural backup", "primary, public noise")):
        for c, style in zip((c for c in shown if c.name == name), STYLES):
            ranks, = (known[source].ranks.double() for _, known in c.seen if known)
            miss, F = 1 - ranks.cumsum(0)[:-1] / ranks.sum(), torch.arange(1, len(ranks))
            some, r = miss > 0, fit_power_law(miss.tolist())
            scale = (miss[some].log() + r * F[some].log()).mean().exp()
            drawn = some & (F[:, None] == torch.tensor(DRAWN)).any(1)
            ax.plot(F[drawn], miss[drawn], **style | {"linestyle": ""},
                    label=f"T = {c.value:g}: r = {r:.2f} ({int(ranks.sum())} tokens)")
            ax.plot(F, scale * F ** -r, **style | THIN)
        ax.set(xscale="log", yscale="log", ylim=(0.005, 1), title=f"after the {title}",
               xlabel="fan-out F", ylabel="share of bonus tokens not guessed")
        ax.set_xticks(ticks, map(str, ticks))
        ax.set_yticks(rates, map(str, rates))
        ax.minorticks_off()
        ax.legend(loc="lower left")


def bars(job, shown: list, axes) -> None:
    """p, q and residual before and after C, where in the first prompt C moves most of it."""
    s, C = shown[0].settings, 0.2
    tokens, F = torch.tensor(job.prompts[:1]), math.ceil(s.budget / (s.lookahead + 1))
    with torch.inference_mode():
        logits = [model.network(tokens.to(model.device)).logits[0].cpu() for model in
                  (job.target, job.draft)]
    p, q = (Warping(s.temperature, s.top_k, s.top_p).probabilities(
        fit_vocabulary(each, job.vocab_size)) for each in logits)
    sigma, likeliest = saguaro_distribution(q, F, C), q.topk(max(F, 6)).indices
    moved = (residual(p, sigma) - residual(p, q)).gather(1, likeliest[:, :F]).sum(1)
    place, places = moved.argmax(), torch.arange(likeliest.shape[1])
    labels = [repr(job.tokenizer.decode([token])) for token in likeliest[place].tolist()]
    for ax, C, q in zip(axes[2:], (1, C), (q, sigma)):
        for i, (label, bars) in enumerate((("p", p), ("q", q), ("residual", residual(p, q)))):
            heights = bars[place, likeliest[place]]
            ax.bar(places + 0.27 * (i - 1), heights, 0.27, label=label, color=INK[i])
        ax.axvspan(-0.5, F - 0.5, color="0.93", zorder=0)
        ax.set(title=f"C = {C:g}; grey: cached", ylim=(0, 1), ylabel="probability")
        ax.set_xticks(places, labels)
    axes[2].legend()


def drafters(job, shown: list, axes) -> None:
    """Theorem 7's prediction for D drafters with a first budget each: the hits of D budgets, and
    the T_p of one."""
    budget = min(c.value for c in shown if c.value)
    for name, style in zip(dict.fromkeys(c.name for c in shown), STYLES):
        found = {c.value / budget: c.figures() for c in shown if c.name == name}
        numbers, one = [D for D in found if D >= 1], found[1]
        speeds = [throughput(found[D]["hit_rate"], found[D]["E_hit"], found[D]["E_miss"] or 0.0,
                             one["T_p"], one["T_b"] or 0.0) for D in numbers]
        axes[3].plot(numbers, [speed / speeds[0] for speed in speeds], label=name, **style)
    axes[3].set(xscale="log", xlabel=f"drafters, each with budget {budget}", ylim=(0, 1.5),
                ylabel="predicted speed over one drafter's")
    axes[3].set_xticks(numbers, map("{:g}".format, numbers))
    axes[3].minorticks_off()


def timeline(job, shown: list, axes) -> None:
    """Fig. 1, measured: who works when, in SD, and in rounds of SSD with about two misses; and all
    of the last text as a trace, for chrome://tracing or ui.perfetto.dev."""
    events, rounds, seconds = [], 7, None
    looks = (("verify", 1, ("verify",), INK[0], ""),
             ("draft ahead", 0, ("trunk", "step"), "#f2c490", ""),
             ("draft, the target waits", 0, ("backup",), INK[1], "////"))
    for c, ax in zip(shown[::-1], axes[::-1]):  # SSD first: it sets the scale
        spans = sorted((span for own, _ in c.seen for span in own), key=lambda span: span[1])
        verified = [span for span in spans if span[0] == "verify"][1:]  # without round 0
        missed = [any(work == "backup" and end <= start < begin for work, start, _ in spans)
                  for (*_, end), (_, begin, _) in itertools.pairwise(verified)]
        windows = range(max(1, len(missed) - rounds))
        first = min(windows, key=lambda i: abs(sum(missed[i:i + rounds]) - 2))
        begin = verified[first][1]
        seconds = seconds or verified[min(first + rounds, len(missed))][1] - begin
        for label, lane, works, colour, hatch in looks:
            bars = [(1000 * (start - begin), 1000 * (end - start)) for work, start, end in spans
                    if work in works and begin <= start < begin + seconds]
            ax.broken_barh(bars, (lane - 0.3, 0.6), label=label, facecolor=colour, hatch=hatch,
                           edgecolor="white", linewidth=0.4)
            events += [{"name": f"{c.value}: {work}", "ph": "X", "pid": int(c.value == "ssd"),
                        "tid": lane, "ts": 1e6 * start, "dur": 1e6 * (end - start)}
                       for work, start, end in spans if work in works]
        for (*_, arrives), miss in zip(verified, missed):
            if begin < arrives < begin + seconds and c.value == "ssd":
                ax.annotate("miss" if miss else "hit", (1000 * (arrives - begin), 1.36),
                            ha="center", weight="bold" if miss else None)
        ax.set(yticks=[0, 1], yticklabels=["draft", "target"], ylim=(-0.4, 1.6),
               xlim=(0, 1000 * seconds), ylabel=c.value.upper())
    axes[1].set(xlabel="time in ms")
    axes[0].legend(*axes[1].get_legend_handles_labels(), ncols=3, loc="lower center",
                   bbox_to_anchor=(0.5, 1))
    axes[0].figure.set_size_inches(8, 3.3)
    write_json("--figures", f"{job.settings.figures}/timeline.json", {"traceEvents": events})
