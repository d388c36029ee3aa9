"""The race: one text, written by AR, SD and SSD at the times of a page's trace, as an animated SVG.

CSS alone moves it, so it plays inside <img>; without motion it is the finished picture. The file,
docs/race.svg, is the template, too: its styles and its legend stay.
"""
import re
from html import escape
from itertools import groupby

from cache import BACKUP, PRIMARY
from cli.settings import ROOT
from engine.errors import printable

SLOWER, PAUSE = 2, 3000  # it plays so many times slower, and pauses before it begins again
LEFT, RIGHT = 86, 776    # where time begins and ends
COLUMNS = 66             # of text; a longer line goes on in the next
TITLES = {"AR": "the target alone", "SD": "draft and target take turns",
          "SSD": "the draft works ahead"}
LANES = {"target": ("verify",), "draft": ("trunk", "tree", "backup")}
SOURCES = {PRIMARY: "cache", BACKUP: "backup"}  # the styles of what each drafted


def since_first(run: dict, time: float) -> int:
    """Return the milliseconds between a run's first token and `time` (seconds); 0 before it."""
    first = run["rounds"][0]["time"]
    return max(0, round(1000 * (time - first)))


def appearing(style: str, ms: int, text: str) -> str:
    """Return a span of text with the keyframes that show it from this millisecond on."""
    return f'<tspan class="{style}" style="animation-name: t{ms}">{escape(text)}</tspan>'


def motion(drawn: str, end: int) -> str:
    """Return the keyframes of `drawn`: t897 shows at 897 ms; curtains open until `end`; then a
    pause."""
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
    """Return what a device did, as bars under a curtain that opens as time goes on."""
    width = RIGHT - LEFT
    box = f'x="{LEFT}" y="{y}" width="{width}" height="16"'
    bars = ""
    for kind, start, stop in run["spans"]:
        if kind in LANES[device]:
            left = LEFT + width * since_first(run, start) / end
            right = LEFT + width * since_first(run, stop) / end
            bars += f'<path class="{kind}" d="M{left:.1f} {y + 1}H{right:.1f}v14H{left:.1f}z"/>'
    return (f'<text x="24" y="{y + 13}" class="soft">{device}</text><rect class="lane" {box}/>'
            f'{bars}<rect class="lane curtain" {box}/>')


def rows(run: dict, prompt: str) -> list[str]:
    """Return the text: rows of spans, each in its colour and at its time."""
    drafts = run["launch"]["lookahead"] > 0
    found = [[("soft", 0, letter) for letter in printable(prompt)[-COLUMNS:]]]
    for number, decoded in enumerate(run["rounds"]):
        ms = since_first(run, decoded["time"])
        source = SOURCES[decoded["source"]] if drafts and number else "own"
        for place, piece in enumerate(decoded["text"]):
            bonus = " bonus" if drafts and place == decoded["outcome"][0] else ""
            for letter in printable(piece):
                if letter == "\n" or len(found[-1]) == COLUMNS:
                    found.append([])
                if letter != "\n":
                    style = source if letter == " " else source + bonus
                    found[-1].append((style, ms, letter))
    return [spans(row) for row in found]


def spans(row: list[tuple[str, int, str]]) -> str:
    """Return letters with their styles and times as spans, one for neighbours that are alike."""
    drawn = ""
    for (style, ms), group in groupby(row, key=lambda part: part[:2]):
        letters = [letter for _, _, letter in group]
        drawn += appearing(style, ms, "".join(letters))
    return drawn


def race(trace: dict) -> str:
    """Return the SVG of the trace's greedy texts."""
    runs = {run["launch"]["name"]: run for run in trace["runs"] if not run["launch"]["temperature"]}
    ends = {name: since_first(run, run["rounds"][-1]["time"]) for name, run in runs.items()}
    end = max(ends.values())
    last_line = trace["prompt"].split("\n")[-1]
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
        for row in rows(run, last_line):
            y += 24
            drawn += f'<text x="24" y="{y}" class="text" xml:space="preserve">{row}</text>\n'
    template = (ROOT / "docs/race.svg").read_text("utf-8")
    begin, _ = template.split('id="race">')
    begin = re.sub(r"(?<=viewBox=.0 0 800 )\d+", str(y + 26), begin)
    return f'{begin}id="race">\n{motion(drawn, end)}\n{drawn}</g>\n</svg>\n'
