"""The race: one text, written by AR, SD and SSD at the times of a page's trace, as an animated SVG.

CSS alone moves it, so it plays inside <img>; without motion it is the finished picture. The file,
docs/race.svg, is the template, too: its styles and its legend stay.
"""
import re
from html import escape
from itertools import groupby

from cli.settings import ROOT
from engine.errors import printable

SLOWER, PAUSE = 2, 3000  # it plays so many times slower, and pauses before it begins again
LEFT, RIGHT = 86, 776    # where time begins and ends
COLUMNS = 66             # of text; a longer line goes on in the next
TITLES = {"AR": "the target alone", "SD": "draft and target take turns",
          "SSD": "the draft works ahead"}
LANES = {"target": ("verify",), "draft": ("trunk", "tree", "backup")}


def since_first(run: dict, time: float) -> int:
    """The milliseconds between a run's first token and `time` (seconds); 0 before it."""
    return max(0, round(1000 * (time - run["rounds"][0]["time"])))


def appearing(style: str, ms: int, text: str) -> str:
    """A span of text with the keyframes that show it from this millisecond on."""
    return f'<tspan class="{style}" style="animation-name: t{ms}">{escape(text)}</tspan>'


def motion(drawn: str, end: int) -> str:
    """The keyframes of `drawn`: t897 shows at 897 ms; curtains open until `end`; then a pause."""
    total = SLOWER * end + PAUSE
    frames = [f"* {{ animation: {total}ms step-end infinite }}",
              f".curtain {{ animation: curtain {total}ms linear infinite }}",
              "@keyframes curtain { 0% { transform: none } "
              f"{100 * SLOWER * end / total:.2f}% {{ transform: scaleX(0) }} }}"]
    for ms in sorted({int(ms) for ms in re.findall(r"animation-name: t(\d+)", drawn)}):
        frames.append(f"@keyframes t{ms} {{ 0% {{ visibility: hidden }} "
                      f"{100 * SLOWER * ms / total:.2f}% {{ visibility: visible }} }}")
    return "\n".join(["<style>", *frames, "</style>"])


def lane(run: dict, device: str, y: int, end: int) -> str:
    """What a device did, as bars under a curtain that opens as time goes on."""
    box = f'x="{LEFT}" y="{y}" width="{RIGHT - LEFT}" height="16"'
    bars = ""
    for kind, *span in run["spans"]:
        start, stop = (LEFT + (RIGHT - LEFT) * since_first(run, time) / end for time in span)
        if kind in LANES[device]:
            bars += f'<path class="{kind}" d="M{start:.1f} {y + 1}H{stop:.1f}v14H{start:.1f}z"/>'
    return (f'<text x="24" y="{y + 13}" class="soft">{device}</text><rect class="lane" {box}/>'
            f'{bars}<rect class="lane curtain" {box}/>')


def rows(run: dict, prompt: str) -> list[str]:
    """The text: rows of spans, each in its colour and at its time."""
    drafts = run["launch"]["lookahead"] > 0
    found = [[("soft", 0, letter) for letter in printable(prompt)[-COLUMNS:]]]
    for number, told in enumerate(run["rounds"]):
        source = ("cache", "backup")[told["source"]] if drafts and number else "own"
        for place, piece in enumerate(told["text"]):
            bonus = " bonus" if drafts and place == told["outcome"][0] else ""
            for letter in printable(piece):
                if letter == "\n" or len(found[-1]) == COLUMNS:
                    found.append([])
                if letter != "\n":
                    style = source if letter == " " else source + bonus
                    found[-1].append((style, since_first(run, told["time"]), letter))
    return ["".join(appearing(*key, "".join(letter for *_, letter in group))
                    for key, group in groupby(row, key=lambda part: part[:2])) for row in found]


def race(trace: dict) -> str:
    """The SVG of the trace's greedy texts."""
    runs = {run["launch"]["name"]: run for run in trace["runs"] if not run["launch"]["temperature"]}
    ends = {name: since_first(run, run["rounds"][-1]["time"]) for name, run in runs.items()}
    end = max(ends.values())
    drawn = ""
    y = 100
    for name, run in runs.items():
        ratio = f"{ends[name] / 1000:.2f} s, {ends['AR'] / ends[name]:.2f} x AR"
        y += 48
        drawn += (f'<text x="24" y="{y}" class="soft"><tspan class="name">{name}</tspan> '
                  f'{TITLES[name]}</text>\n<text x="{RIGHT}" y="{y}" class="end">'
                  f'{appearing("name", ends[name], ratio)}</text>\n')
        y += 11
        for device in ("target", "draft") if run["launch"]["lookahead"] else ("target",):
            drawn += lane(run, device, y, end) + "\n"
            y += 21
        for row in rows(run, trace["prompt"].split("\n")[-1]):
            y += 24
            drawn += f'<text x="24" y="{y}" class="text" xml:space="preserve">{row}</text>\n'
    template = (ROOT / "docs/race.svg").read_text("utf-8")
    begin = re.sub(r"(?<=viewBox=.0 0 800 )\d+", str(y + 26), template.split('id="race">')[0])
    return f'{begin}id="race">\n{motion(drawn, end)}\n{drawn}</g>\n</svg>\n'
