"""Slow motion: rounds are shown whole, and in which words."""
import io
import os
import subprocess
import sys

import pytest

from cli.job import Job
from cli.settings import parse
from course import explain
from course.handout import ROOT
from course.options import ExplainSettings


@pytest.fixture(scope="module")
def models():
    return Job(ExplainSettings(device="cpu")).load()


@pytest.fixture
def one_thread(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)


TWO = ("def f(x):", "import os\nimport sys\n\n\ndef main(")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    dict(rounds=1), dict(rounds=2, temperature=1.0, downweight=0.5, budget=7),
    dict(rounds=2, temperature=0.7, prompt=TWO, backup="lookup", seed=3)])
def test_slow_motion_shows_a_hit_or_a_miss_of_every_row_in_every_round(
        capsys, one_thread, models, flags):
    settings = ExplainSettings(**dict(prompt=("def f(x):",)) | flags)
    explain.Narrator(Job(settings), models).tell_all()
    shown = capsys.readouterr().out
    rows = len(settings.prompt) * (settings.rounds + 1)
    assert shown.count("HIT") + shown.count("MISS") == rows == shown.count("-->")
    assert shown.count("not guessed") == shown.count("MISS")
    assert max(map(len, shown.splitlines())) <= 100
    assert ("with u = " in shown) == (settings.temperature > 0)


@pytest.mark.slow
def test_what_slow_motion_tells(capsys, monkeypatch, one_thread, models):
    def slow_motion(*flags: str) -> str:
        settings = parse(ExplainSettings, ["--prompt", "def f(x):", "--rounds", "1", *flags])
        explain.Narrator(Job(settings), models).tell_all()
        return capsys.readouterr().out

    plain = slow_motion()
    assert plain.index("def f(x):") < plain.index("round 0")
    for part in ("F_k", "P(k)", "a = 0.80", "r = 1.00", "accepted | bonus t*"):
        assert part in plain
    assert "\033[" not in plain and "\033[" in slow_motion("--color")
    assert "p / sent" not in plain and "q   sent      u" in slow_motion("--temperature", "1")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert slow_motion("--pause").count("Enter") == 1
    rounds = slow_motion("--prompt", "x = 1\n" * 124, "--rounds", "200").count("\nround ")
    assert 2 < rounds < 20  # until the context of 512 tokens is full


def test_help_is_there_at_once(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('this would take seconds')")
    run = subprocess.run([sys.executable, "-m", "course.explain", "--help"], cwd=ROOT, text=True,
                         capture_output=True, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert run.returncode == 0 and "--pause" in run.stdout and "--color" in run.stdout
