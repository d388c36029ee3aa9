"""The page: its scripts draw what the program has written, and compute what cache.py computes. The
race: it shows the same text at the same times.

The scripts of docs/index.html run in quickjs, a JavaScript engine without a browser, with as much
of a document as they use.
"""
import copy
import json
import math
import random
import re
import shutil
import subprocess
import sys
from html import unescape
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

import cache
import course.race
from bench import Bench
from cli.settings import ROOT
from course import page
from course.options import PageSettings
from course.race import COLUMNS, LEFT, PAUSE, RIGHT, SLOWER, race
from engine.errors import UserError
from run.job import Job

REFRESH = "python -m course.page --out docs/index.html"
REDRAW = """python -c 'from course.test_page import *
page.write_page(TRACE, ROOT / "docs/index.html")'"""  # the race of the run that was recorded
PAGE = (ROOT / "docs/index.html").read_text("utf-8")
SCRIPTS = dict(re.findall(r'<script id="(\w+)"[^>]*>(.*?)</script>', PAGE, re.DOTALL))
TRACE = json.loads(SCRIPTS["trace"])
RUNS = {f"{run['launch']['name']} {run['launch']['temperature']:g}": run for run in TRACE["runs"]}

STUB = """
const made = {}, handlers = {};
const checked = text => {
  if (/\\b(NaN|undefined|Infinity)\\b/.test(text)) throw Error(text.slice(0, 2000));
  return text;
};
const element = () => ({
  clientWidth: 600, value: "", style: {},
  set innerHTML(html) { this.html = checked(html); },
  set textContent(text) { this.html = checked(String(text)); },
  get textContent() { return this.html; },
  setAttribute(name, value) { checked(value); },
  getBoundingClientRect: () => ({bottom: 1})
});
const addEventListener = (kind, act) => handlers[kind] = handlers[kind] || act;
const document = {addEventListener, getElementById: id => made[id] = made[id] || element()};
const location = {hash: ""}, frames = [];
const history = {replaceState(state, title, hash) { location.hash = hash; }};
let timer = () => {};
const setTimeout = act => timer = act, clearTimeout = () => timer = () => {};
const requestAnimationFrame = act => frames.push(act);
"""


def browser(hash: str = ""):
    """The scripts of the page, run from top to bottom."""
    quickjs = pytest.importorskip("quickjs", reason="the page's scripts: pip install quickjs")
    context = quickjs.Context()
    context.eval(STUB)
    context.eval(f"location.hash = {json.dumps(hash)};")
    context.eval(f"document.getElementById('trace').html = {json.dumps(SCRIPTS['trace'])};")
    for name in ("theory", "watch", "ask", "begin"):
        context.eval(SCRIPTS[name])
    return context


def ask(context, call: str):
    """What a call returns, by way of JSON."""
    context.eval("timer()")
    return json.loads(context.eval(f"JSON.stringify({call})"))


def text_of(html: str) -> str:
    """What is not hidden, without tags."""
    html = re.sub(r'<(\w+) class="[^"]*later[^"]*"[^>]*>.*?</\1>', "", html, flags=re.DOTALL)
    return unescape(re.sub(r"<[^>]*>", "", html))


# ---- what is drawn ----

@pytest.mark.parametrize("name", RUNS)
def test_every_round_is_drawn_as_it_was(name):
    run = RUNS[name]
    mode, temperature = name.split()
    context = browser(f"#T={temperature}&mode={mode}&t=0")
    for i, told in enumerate(run["rounds"]):
        context.eval(f"goTo('{mode}', {i})")
        assert ask(context, "location.hash") == f"#T={temperature}&mode={mode}&round={i}"
        html = ask(context, "made.round.html")
        cut = mode != "AR" and len(told["new"]) <= told["outcome"][0]
        assert ("cut at the length" in html) == cut
        assert f"round {i} of {len(run['rounds']) - 1}" in html
        if mode == "AR":
            continue
        k, bonus = told["outcome"]
        assert html.count('class="branch hit"') == told["hit"]
        assert html.count('class="branch miss"') == (not told["hit"])
        assert "up to this token" in html  # what the columns are
        assert html.count('class="node way"') == k + 1
        assert html.count('class="branch ') == len(told["prepared"]) + (not told["hit"])
        for verdict, when in (("A hit", told["hit"]), ("A miss", not told["hit"])):
            said = mode == "SSD" and when and i + 1 < len(run["rounds"])
            assert (verdict in text_of(html)) == said
        if temperature == "1":
            assert html.count("✓") == k and html.count("✗") == (k < len(told["drafted"]))
        sent = run["rounds"][i + 1]["drafted"] if i + 1 < len(run["rounds"]) else []
        shown = re.search(r'class="branch (?:hit|miss)".*?class="then">(.*?)</span></div>', html,
                          re.DOTALL)
        if sent:
            kind = "cache" if told["hit"] else "backup"
            expected = ask(context, f"{json.dumps(sent)}.map(spelt)")
            assert re.findall(f'<i class="{kind}">(.*?)</i>', shown[1]) == expected


@pytest.mark.parametrize("name", [name for name in RUNS if not name.startswith("AR")])
def test_no_outcome_is_seen_before_it_is_there(name):
    mode, temperature = name.split()
    context = browser(f"#T={temperature}&mode={mode}")
    for i in range(1, len(RUNS[name]["rounds"])):
        context.eval(f"var run = runOf({temperature}, '{mode}'), v = run.verify[{i}]")
        seen = []
        for part in (0.01, 0.3, 0.6, 0.98):
            context.eval(f"seek(v.start + {part} * (v.end - v.start))")
            html = ask(context, "made.round.html")
            assert ask(context, f"made['lanes-{mode}'].html").count(">+") == i - 1
            assert not re.search("branch hit|branch miss|node way|✓|✗|A hit|A miss", html)
            seen.append(len(text_of(html)))
        assert mode == "SD" or seen[0] < seen[1] < seen[2] <= seen[3]  # the cache fills


@pytest.mark.parametrize("name", RUNS)
def test_the_text_at_the_end_is_the_programs(name):
    run = RUNS[name]
    mode, temperature = name.split()
    context = browser(f"#T={temperature}&mode={mode}")
    context.eval("seek(1e9)")
    text = text_of(ask(context, f"made['text-{mode}'].html"))
    assert text == "".join(piece for told in run["rounds"] for piece in told["text"])
    context.eval("seek(0)")
    assert text_of(ask(context, f"made['text-{mode}'].html")) == run["rounds"][0]["text"][0]


def test_it_plays_and_obeys_keys_and_clicks():
    context = browser("#T=0&mode=SSD&t=0")
    context.eval("$('speed').value = '0.2'; play()")
    for now in (1000, 1100, 1600):
        context.eval(f"frames.shift()({now})")
    assert ask(context, "state") == {"T": 0, "mode": "SSD", "t": 120, "playing": True}
    context.eval("seek(0); made.speed.value = 'round'; play()")
    for now in (0, 1e6):
        context.eval(f"frames.pop()({now})")
    assert ask(context, "[state.playing, location.hash]") == [False, "#T=0&mode=SSD&round=1"]
    keys = ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowUp", "ArrowUp", "ArrowUp", "x")
    hashes = []
    for key in keys:
        context.eval(f"handlers.keydown({{key: '{key}', target: {{tagName: 'BODY'}}, "
                     "preventDefault() {}})")
        hashes.append(ask(context, "location.hash").removeprefix("#T=0&mode="))
    assert hashes[:3] == ["SSD&round=2", "SSD&round=3", "SSD&round=2"]
    assert [hash[:2] for hash in hashes[3:]] == ["SD", "AR", "AR", "AR"]
    context.eval("""handlers.click({target: {closest: part => part === "[data-at]"
                 ? {dataset: {at: "SSD,4"}} : null}})""")
    assert ask(context, "location.hash") == "#T=0&mode=SSD&round=4"


def test_whose_text_it_is_comes_first():
    """Greedy: one text. At a temperature: draws, which differ. Said before anything is played."""
    assert PAGE.index('id="exact"') < PAGE.index('id="play"')
    for T, said in (("0", "Three times the same text: what the target alone would write"),
                    ("1", "Three draws from one distribution, the target's")):
        texts = {str([told["new"] for told in RUNS[f"{mode} {T}"]["rounds"]]).replace("], [", ", ")
                 for mode in ("AR", "SD", "SSD")}
        assert len(texts) == (1 if T == "0" else 3)
        assert text_of(ask(browser(f"#T={T}"), "made.exact.html")).startswith(said)
    context = browser("#T=0")
    context.eval("runOf(0, 'SD').rounds[3].new[0]++; draw()")
    assert ask(context, "made.exact.html").startswith("<b>But for rounding")


def test_the_address_is_written_once_after_many_moves():
    """Browsers refuse more than some 200 in half a minute."""
    context = browser()
    context.eval("""let written = [];
                 history.replaceState = (state, title, hash) => written.push(hash);
                 for (let move = 0; move < 300; move++) seek(move);""")
    assert ask(context, "written") == ["#T=0&mode=SSD&t=299"]


def test_a_wrong_fragment_does_no_harm():
    for hash in ("#round=-3&mode=XX&T=7", "#mode=SSD&round=99", "#t=x&round=y", "#&&=", "#t=1e99"):
        assert "round" in ask(browser(hash), "made.round.html")


# ---- theory ----

def python_says(c, a, r, K, budget, b, backup):
    shape = cache.geometric_fan_out(budget, K, a, r)
    hits = cache.power_law_hit_rate(shape, a, r)
    E = cache.expected_tokens(a, K)
    E_miss = E if backup == "neural" else cache.expected_tokens(0.1, K)
    T_p = (K + 1) * c
    T_b = max(0.0, T_p - 1) + (K * c if backup == "neural" else 0.0)
    return {"shape": shape, "hits": hits, "E": E, "T_p": T_p, "T_b": T_b, "T_sd": K * c,
            "ssd": cache.throughput(hits, E, E_miss, T_p, T_b, b),
            "sd": cache.throughput(0, 0, E, 1, K * c),
            "b_star": cache.choose_backup(b, shape, a, 0.1, r, c)[1]}


def test_theory_is_that_of_the_program():
    draw = random.Random(0)
    settings = [dict(c=draw.uniform(0.01, 1), a=draw.uniform(0.05, 0.99), r=draw.uniform(0.1, 3),
                     K=draw.randint(1, 16), budget=draw.randint(0, 96), b=draw.randint(1, 64),
                     backup=draw.choice(["neural", "random"])) for _ in range(200)]
    settings += [dict(c=0.1, a=0.55, r=1.0, K=K, budget=budget, b=1, backup="neural")
                 for K in (1, 2, 3, 7) for budget in range(12)]
    context = browser()
    for given in settings:
        found = ask(context, f"predict({json.dumps(given)})")
        expected = python_says(**given)
        for name, value in expected.items():
            if found[name] is None:  # JSON has no infinity
                found[name] = math.inf
            assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-12), (name, given)


def test_the_frontier_is_that_of_the_program():
    """Corollary 16 for each batch size; SSD has a device more."""
    at = dict(c=0.12, a=0.85, r=0.9, K=7, budget=24, b=3, backup="neural", gpus=4)
    context = browser()
    found = ask(context, f"frontier({json.dumps(at)}, 2.5)")
    sizes = ask(context, "BS")
    assert sizes[0] == 1 and sizes[-1] == 64
    given = {name: value for name, value in at.items() if name not in ("gpus", "b", "backup")}
    for i, b in enumerate(sizes):
        assert found["AR"][i] == [1, b / 4] and found["SD"][i] == [2.5, b * 2.5 / 4]
        for backup in ("neural", "random"):
            speed = python_says(**given, b=b, backup=backup)["ssd"]
            assert found[backup][i] == pytest.approx([speed, b * speed / 5], rel=1e-9)


def test_no_text_is_faster_in_a_larger_batch():
    """Also where T_p > 1 + T_b, where Corollary 16 as printed says that it is."""
    context = browser()
    for backup in ("neural", "random"):
        for c in (0.05, 0.12, 0.5, 1):
            at = dict(c=c, a=0.891, r=0.9, K=12, budget=24, b=1, backup=backup, gpus=4)
            speeds = [speed for speed, _ in ask(context, f"frontier({json.dumps(at)}, 1)")[backup]]
            assert all(x >= y - 1e-9 for x, y in zip(speeds, speeds[1:])), (c, speeds)
    context.eval("choose(PRESETS[0]); choose(null, {K: 12, b: 8, backup: 'random'})")
    said = text_of(ask(context, "made.verdict.html"))
    assert "SSD would be 1.24 x as fast as SD" in said and "3.78 x as fast as the target" in said


@pytest.mark.parametrize("changes", ({"b": 8}, {"b": 64, "backup": "random", "gpus": 1}))
def test_the_chosen_batch_is_a_point_of_the_frontier(changes):
    context = browser()
    context.eval(f"choose(null, {json.dumps(changes)})")
    html = ask(context, "made['over-both'].html")
    lines = dict(re.findall(r'stroke:var\(--(\w+)\)" d="M([^"]*)"', html))
    dots = re.findall(r'cx="([^"]*)" cy="([^"]*)" r="5" style="fill:var\(--(\w+)\)"', html)
    colours = {"soft": "soft", "backup": "backup",
               "ink": "random" if "backup" in changes else "target"}
    assert [colour for *_, colour in dots] == list(colours)
    i = ask(context, "BS").index(changes["b"])
    for x, y, colour in dots:
        where = [float(number) for number in lines[colours[colour]].split("L")[i].split()]
        assert [float(x), float(y)] == pytest.approx(where)


def test_user_and_owner_have_a_verdict_each():
    context = browser()
    for change, user, owner in (("b: 1", "yes", "yes"), ("b: 16", "hardly", "no"),
                                ("b: 16, backup: 'random'", "yes", "yes"),
                                ("b: 1, gpus: 1", "yes", "no")):
        context.eval(f"choose(PRESETS[0]); choose(null, {{{change}}})")
        said = text_of(ask(context, "made.verdict.html"))
        assert f"For the user: {user}." in said and f"For the owner: {owner}." in said, said
        at = ask(context, "ask")
        over_sd = re.search(r"SSD would be ([\d.]+) x as fast as SD", said)[1]
        per_gpu = re.search(r"per\s+GPU it would write ([\d.]+) x", said)[1]
        gpus = at["gpus"]
        assert float(per_gpu) == pytest.approx(float(over_sd) * gpus / (gpus + 1), abs=0.01)
        assert f"SSD takes {gpus + 1} GPUs where SD takes {gpus}:" in said
        assert f"{per_gpu} x SD per GPU" in text_of(ask(context, "made.numbers.html"))


def test_presets_have_the_gpus_of_their_pair():
    for preset in ask(browser(), "PRESETS"):
        assert preset["gpus"] == (4 if "70B" in preset["title"] else 1), preset


def test_presets_have_the_hits_and_tokens_that_were_measured():
    presets = ask(browser(), "PRESETS")
    logs = {log["source"].split(";")[0] for log in TRACE["logs"].values()}
    assert {preset["source"] for preset in presets} == logs | {"figures/results.json"}
    for preset in presets:
        shape = cache.geometric_fan_out(preset["budget"], preset["K"], preset["a"], preset["r"])
        hits = cache.power_law_hit_rate(shape, preset["a"], preset["r"])
        assert hits == pytest.approx(preset["hits"], abs=0.01), preset
        tokens = cache.expected_tokens(preset["a"], preset["K"])
        assert tokens == pytest.approx(preset["tokens"], rel=1e-6), preset


def test_every_slider_has_an_answer_at_both_ends():
    context = browser()
    for preset in range(len(ask(context, "PRESETS"))):
        for key in ask(context, "Object.keys(KNOBS)"):
            for end in (1, 2):
                for backup in ("neural", "random"):
                    context.eval(f"choose(PRESETS[{preset}]); choose(null, {{backup: '{backup}', "
                                 f"{key}: KNOBS['{key}'][{end}]}})")  # the stub refuses NaN
                    said = text_of(ask(context, "made.verdict.html"))
                    assert re.match("For the user: (yes|no|hardly). SSD would be", said)
    context.eval("choose(PRESETS[0]); choose(null, {K: 12})")
    assert "T_p is above 1" in ask(context, "made.verdict.html")
    context.eval("choose(PRESETS[0])")
    assert "T_p is above 1" not in ask(context, "made.verdict.html")


# ---- the trace ----

@pytest.mark.parametrize("name", [name for name in RUNS if not name.startswith("AR")])
def test_the_trace_keeps_the_rules(name):
    rounds = RUNS[name]["rounds"]
    verify = [span for span in RUNS[name]["spans"] if span[0] == "verify"]
    assert len(verify) == len(rounds) - 1 == len([told for told in rounds if told["drafted"]])
    for i, told in enumerate(rounds):
        k, bonus = told["outcome"]
        if name.endswith(" 1"):
            below = [u < p / q for u, p, q in zip(told["uniforms"], told["p"], told["sent"])]
            assert below[:k] == [True] * k and (k == len(below) or not below[k])
        guessed = {(guess[0], guess[1]): guess[3] for guess in told["prepared"]}
        assert told["hit"] == ((k, bonus) in guessed)
        assert [*told["drafted"][:k], bonus][:len(told["new"])] == told["new"]
        if i + 1 < len(rounds):
            assert (rounds[i + 1]["source"] == cache.PRIMARY) == told["hit"]
            if told["hit"]:
                assert rounds[i + 1]["drafted"] == guessed[k, bonus]


# ---- the race ----

RACE = (ROOT / "docs/race.svg").read_text("utf-8")
SVG = "{http://www.w3.org/2000/svg}"


def drawn(svg: str) -> dict[str, dict]:
    """By method: its texts of class `text`, each a list of (text, style, milliseconds); its bars,
    each (kind, start, end) in seconds; what stands at its end."""
    longest = max(run["rounds"][-1]["time"] - run["rounds"][0]["time"] for run in TRACE["runs"][:3])
    found = {}
    method = {}
    for element in ElementTree.fromstring(svg).find(f"{SVG}g"):
        spans = [(span.text, span.get("class"), int((span.get("style") or "t0").split("t")[-1]))
                 for span in element.iter(f"{SVG}tspan")]
        if element.get("class") == "text":
            method["rows"].append(spans)
        elif element.tag == f"{SVG}path":
            start, end = re.match(r"M([\d.]+) \d+H([\d.]+)v", element.get("d")).groups()
            method["bars"].append((element.get("class"), *[
                (float(x) - LEFT) / (RIGHT - LEFT) * longest for x in (start, end)]))
        elif spans and spans[0][0] in ("AR", "SD", "SSD"):
            method = found[spans[0][0]] = {"rows": [], "bars": []}
        elif element.get("class") == "end":
            method["end"] = spans[0]
    return found


def test_the_race_is_not_older_than_the_page():
    assert RACE == race(TRACE), REDRAW


@pytest.mark.parametrize("mode", ("AR", "SD", "SSD"))
def test_the_race_ends_with_the_programs_text(mode):
    rows = drawn(RACE)[mode]["rows"]
    expected = TRACE["prompt"].split("\n")[-1]
    expected += "".join(piece for told in RUNS[f"{mode} 0"]["rounds"] for piece in told["text"])
    assert "\n".join("".join(text for text, _, _ in row) for row in rows) == expected
    still = re.sub(r"@keyframes \w+ \{( [\d.]+% \{[^}]*\})* \}", "", RACE)
    assert "@keyframes" not in still and "hidden" not in still  # without motion all is there
    assert ".curtain { transform: scaleX(0);" in still


@pytest.mark.parametrize("mode", ("AR", "SD", "SSD"))
def test_the_times_of_the_race_are_those_of_the_trace(mode):
    run, found = RUNS[f"{mode} 0"], drawn(RACE)[mode]
    first = run["rounds"][0]["time"]
    letters = [(letter, "bonus" in style and letter != " ", style.split()[0], ms)
               for row in found["rows"] for text, style, ms in row for letter in text]
    expected = [(letter, False, "soft", 0) for letter in TRACE["prompt"].split("\n")[-1]]
    for told in run["rounds"]:
        source = "cache" if told["source"] == cache.PRIMARY else "backup"
        if mode == "AR" or told is run["rounds"][0]:
            source = "own"
        for place, piece in enumerate(told["text"]):
            is_bonus = mode != "AR" and place == told["outcome"][0]
            expected += [(letter, is_bonus and letter != " ", source,
                          round(1000 * (told["time"] - first)))
                         for letter in piece if letter != "\n"]
    assert letters == expected
    seconds = run["rounds"][-1]["time"] - first
    spans = [(kind, max(0, start - first), max(0, end - first))
             for kind, start, end in run["spans"] if mode != "AR" or kind == "verify"]
    assert len(found["bars"]) == len(spans)
    for bar, span in zip(sorted(found["bars"]), sorted(spans)):
        assert bar[0] == span[0] and bar[1:] == pytest.approx(span[1:], abs=0.002)
    ar = RUNS["AR 0"]["rounds"][-1]["time"] - RUNS["AR 0"]["rounds"][0]["time"]
    assert found["end"][2] == round(1000 * seconds)
    assert found["end"][0] == f"{seconds:.2f} s, {ar / seconds:.2f} x AR"


def test_the_race_is_played_at_half_the_recorded_speed():
    total = int(re.search(r"\* \{ animation: (\d+)ms", RACE)[1])
    frames = re.findall(r"@keyframes t(\d+) \{ 0% \{ visibility: hidden \} ([\d.]+)%", RACE)
    assert {ms for ms, _ in frames} == set(re.findall(r"animation-name: t(\d+)", RACE))
    for ms, percent in frames:
        assert float(percent) / 100 * total / SLOWER == pytest.approx(int(ms), abs=1)
    end = max(int(ms) for ms, _ in frames)
    curtain = re.search(r"none \} ([\d.]+)% \{ transform: scaleX\(0\)", RACE)[1]
    assert float(curtain) / 100 * total / SLOWER == pytest.approx(end, abs=1)
    assert total == SLOWER * end + PAUSE and SLOWER == 2 and "at half speed" in RACE


def test_the_race_plays_inside_an_image():
    """Small, no script, and nothing from elsewhere."""
    assert len(RACE.encode()) < 32_000 and RACE.count("http://www.w3.org/2000/svg") == 1
    assert not re.search(r"<script|\bon\w+=|href|url\(|@import|https?:(?!//www\.w3)", RACE)


def test_a_race_of_any_text_is_xml_and_no_row_is_too_long():
    trace = copy.deepcopy(TRACE)
    trace["prompt"] = "x\n\x1b\ud800"
    for run in trace["runs"]:
        for told in run["rounds"]:
            told["text"] = ["<&\"'\f\u00fc\uffff"] * len(told["text"])
    for method in drawn(race(trace)).values():
        rows = ["".join(text for text, _, _ in row) for row in method["rows"]]
        assert "".join(rows) == "\\x1b\\ud800" + "<&\"'\\x0c\u00fc\\uffff" * 40
        assert set(map(len, rows[:-1])) == {COLUMNS}


# ---- the page ----

def test_it_is_one_file_of_short_lines():
    template = PAGE.replace(SCRIPTS["trace"], "")
    assert not re.search(r"""\b(src|href)\s*=|https?:|@import|url\(|Math\.random""", template)
    assert max(map(len, template.splitlines())) <= 100


def test_it_names_the_paper_and_its_figures_and_needs_javascript():
    text = " ".join(text_of(PAGE).split())
    for part in ("Tanishq Kumar, Tri Dao and Avner May", "arXiv:2603.03251", "allow JavaScript",
                 "Fk: how many t* are guessed", "b*, from which on random tokens are better"):
        assert part in text, part
    captions = re.findall(r'<figcaption class="soft" id="([\w-]+)">', PAGE)
    labels = re.findall(r'<svg id="[\w-]+" role="img" aria-labelledby="([\w-]+)"', PAGE)
    assert captions == labels and len(labels) == PAGE.count("<svg") == 3


def luminance(colour: str) -> float:
    """Relative luminance, of WCAG 2."""
    digits = colour if len(colour) == 6 else "".join(2 * digit for digit in colour)
    red, green, blue = (int(digits[i:i + 2], 16) / 255 for i in (0, 2, 4))
    r, g, b = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4
               for x in (red, green, blue))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_text_has_a_contrast_of_four_and_a_half_and_print_has_light_bars():
    light, dark = (dict(re.findall(r"--(\w+): #(\w+)", part))
                   for part in re.findall(r":root \{[^}]*--ink[^}]*\}", PAGE))
    for colours in (light, dark):
        for text in ("ink", "soft", "cache", "backup", "random"):
            for ground in ("page", "card", "hit", "miss"):
                low, high = sorted(luminance(colours[name]) for name in (text, ground))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)
    style = PAGE.split("</style>")[0]
    assert "opacity" not in style and "@media screen and (prefers-color-scheme: dark)" in style
    printed = style.split("@media print")[1].split("}")[0]
    assert "color-scheme: light;" in printed and " print-color-adjust: exact" in printed


@pytest.fixture(scope="module")
def bench():
    """As much of `Bench` as looks inside."""
    settings = PageSettings(device="cpu", prompt=(TRACE["prompt"],))
    settings.mode = "sd"  # one process
    job = Job(settings)
    bench = object.__new__(Bench)
    vars(bench).update(settings=settings, job=job, prompts=job.prompts, sd_models=job.load())
    return bench


@pytest.mark.parametrize("name", [name for name in RUNS if not name.startswith("AR")])
def test_it_is_not_older_than_the_program(bench, monkeypatch, name):
    """The default prompt, the comparison, the logs, the text and what was guessed."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    results = json.loads((ROOT / "figures/results.json").read_text("utf-8"))["results"]
    assert TRACE["prompt"] == (ROOT / "tiny/prompt.txt").read_text("utf-8"), f"older: {REFRESH}"
    assert RUNS[name]["launch"] in results, f"older than figures/results.json: {REFRESH}"
    assert TRACE["logs"] == json.loads((ROOT / "figures/logs.json").read_text("utf-8")), REFRESH
    now = copy.deepcopy(RUNS[name])
    try:
        page.look_inside(bench, now)
    except UserError:
        pytest.fail(f"docs/index.html has another text than the program: {REFRESH}")
    for told, then in zip(now["rounds"], RUNS[name]["rounds"]):
        for part in ("drafted", "hit"):
            assert told[part] == then[part], REFRESH
        assert told["p"] == pytest.approx(then["p"], abs=1e-3), REFRESH


def test_two_texts_make_no_page(bench):
    run = copy.deepcopy(RUNS["SD 0"])
    run["rounds"][1]["new"][0] += 1
    with pytest.raises(UserError, match="two texts, so no page"):
        page.look_inside(bench, run)


@pytest.mark.parametrize("kept", (0.97, 0.99))
def test_a_late_machine_makes_no_page(monkeypatch, kept):
    monkeypatch.setattr(page, "warm_up", lambda *_: None)
    stats = SimpleNamespace(spans=[], summary=lambda: {"pace_kept": kept})

    class Decoder(SimpleNamespace):
        def __call__(self, texts, on_tokens):
            on_tokens(0, [7], 1)

    decoder = Decoder(stats=stats, settings=SimpleNamespace(mode="sd"), models=None)
    bench = SimpleNamespace(prompts=[[1]], leads=True, settings_of=lambda point: None,
                            decoder=lambda *_: decoder)
    if kept < 0.98:
        with pytest.raises(UserError, match="97% of the passes kept --pace"):
            page.timed(bench, {"with": {}})
    else:
        assert page.timed(bench, {"with": {}})["rounds"][0]["new"] == [7]


def test_page_and_race_may_be_written_over_their_templates(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(course.race, "ROOT", tmp_path)
    page.write_page(TRACE, tmp_path / "docs/index.html")
    for name in ("index.html", "race.svg"):
        assert (tmp_path / "docs" / name).read_bytes() == (ROOT / "docs" / name).read_bytes()


@pytest.mark.slow
def test_one_command_writes_it(tmp_path):
    command = [sys.executable, "-m", "course.page", "--pace", "0", "0", "--max-new-tokens", "6",
               "--prompt", "x = '<\u00fc>'", "--out", str(tmp_path / "page.html")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    written = (tmp_path / "page.html").read_text("utf-8")
    trace = json.loads(re.search(r'application/json">(.*?)</script>', written)[1])
    assert trace["prompt"] == "x = '<\u00fc>'" and len(trace["runs"]) == 6
    assert all(sum(len(told["new"]) for told in run["rounds"]) == 6 for run in trace["runs"])
    assert (tmp_path / "race.svg").read_text("utf-8") == race(trace)
