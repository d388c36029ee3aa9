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
from html import unescape

import pytest

import cache
import course.race
from bench import Bench
from cli.settings import ROOT
from course import page
from course.options import PageSettings
from course.race import race
from engine.errors import UserError
from run.job import Job
from testing.shared import in_ranks

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


@pytest.mark.parametrize("name", RUNS)
def test_the_text_at_the_end_is_the_programs(name):
    run = RUNS[name]
    mode, temperature = name.split()
    context = browser(f"#T={temperature}&mode={mode}")
    context.eval("seek(1e9)")
    text = text_of(ask(context, f"made['text-{mode}'].html"))
    assert text == "".join(piece for told in run["rounds"] for piece in told["text"])
    seconds = run["rounds"][-1]["time"] - run["rounds"][0]["time"]
    title = text_of(ask(context, f"made['title-{mode}'].html"))
    assert title.endswith(f"tokens: 40 in {seconds:.2f} s")
    context.eval("seek(0)")
    assert text_of(ask(context, f"made['text-{mode}'].html")) == run["rounds"][0]["text"][0]


# ---- theory ----

def python_says(c, a, r, K, budget, b, backup, **_):
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


def test_presets_have_the_hits_and_tokens_that_were_measured():
    presets = ask(browser(), "PRESETS")
    logs = {log["source"].split(";")[0] for log in TRACE["logs"].values()}
    assert {preset["source"] for preset in presets} == logs | {"figures/results.json"}
    for preset in presets:
        expected = python_says(**preset)
        assert expected["hits"] == pytest.approx(preset["hits"], abs=0.01), preset
        assert expected["E"] == pytest.approx(preset["tokens"], rel=1e-6), preset


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


# ---- the race ----

RACE = (ROOT / "docs/race.svg").read_text("utf-8")


def test_the_race_is_not_older_than_the_page():
    assert RACE == race(TRACE), REDRAW


def test_the_race_plays_inside_an_image():
    """Small, no script, and nothing from elsewhere."""
    assert len(RACE.encode()) < 32_000 and RACE.count("http://www.w3.org/2000/svg") == 1
    assert not re.search(r"<script|\bon\w+=|href|url\(|@import|https?:(?!//www\.w3)", RACE)


# ---- the page ----

def test_it_is_one_file_of_short_lines():
    template = PAGE.replace(SCRIPTS["trace"], "")
    assert not re.search(r"""\b(src|href)\s*=|https?:|@import|url\(|Math\.random""", template)
    assert max(map(len, template.splitlines())) <= 100


@pytest.fixture(scope="module")
def bench():
    """As much of `Bench` as looks inside."""
    settings = PageSettings(device="cpu", prompt=(TRACE["prompt"],))
    vars(settings)["mode"] = "sd"  # one process
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


def test_a_late_machine_makes_no_page():
    for kept in (0.98, None):
        page.check_pace(kept)
    with pytest.raises(UserError, match="97% of the passes kept --pace"):
        page.check_pace(0.97)


def test_page_and_race_may_be_written_over_their_templates(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(course.race, "ROOT", tmp_path)
    page.write_page(TRACE, tmp_path / "docs/index.html")
    for name in ("index.html", "race.svg"):
        assert (tmp_path / "docs" / name).read_bytes() == (ROOT / "docs" / name).read_bytes()


@pytest.mark.slow
def test_two_ranks_write_it(tmp_path):
    prompt = "x = '<\u00fc>'"
    out = tmp_path / "page.html"
    in_ranks(2, page.main, PageSettings(device="cpu", pace=(0, 0), max_new_tokens=6,
                                        prompt=(prompt,), out=str(out)))
    found = re.search(r'application/json">(.*?)</script>', out.read_text("utf-8"))
    trace = json.loads(found[1])
    assert trace["prompt"] == prompt
    assert len(trace["runs"]) == 6
    for run in trace["runs"]:
        assert sum(len(told["new"]) for told in run["rounds"]) == 6
    assert (tmp_path / "race.svg").read_text("utf-8") == race(trace)
