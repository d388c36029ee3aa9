"""Slow motion: rounds are shown whole, and in which words."""
import io
import re
import shlex
import sys

import pytest
import torch

from cli.settings import parse
from course import explain
from course.handout import ROOT
from course.options import ExplainSettings
from run.job import Job
from saguaro import Sequences
from sampling import inverse_cdf, saguaro_distribution


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
    explain.slow_motion(Job(settings), models)
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
        explain.slow_motion(Job(settings), models)
        return capsys.readouterr().out

    plain = slow_motion()
    assert plain.index("def f(x):") < plain.index("round 0")
    for part in ("F_k", "P(k)", "a = 0.80", "r = 1.00", "accepted | bonus t*"):
        assert part in plain
    assert "\033[" not in plain and "\033[" in slow_motion("--color")
    confident = slow_motion("--fan-out", "confident")
    shapes = [re.findall(r" k=(\d)", shown.split("round 1")[1]) for shown in (plain, confident)]
    assert shapes[0] != shapes[1], "what is guessed shows the round's own shape"
    drawn = slow_motion("--temperature", "1")
    assert "p / sent" not in plain and "q   sent      u" in drawn and "by token id" in drawn
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert slow_motion("--pause").count("Enter") == 1
    rounds = slow_motion("--prompt", "x = 1\n" * 124, "--rounds", "200").count("\nround ")
    assert 2 < rounds < 20  # until the context of 512 tokens is full


def rounds_at_temperature_1(models) -> tuple[explain.Narrator, list[explain.Round]]:
    """Rounds with C = 1/2, and who prints them."""
    settings = ExplainSettings(prompt=("def f(x):",), temperature=1.0, downweight=0.5, seed=3)
    job = Job(settings)
    sequences = Sequences(job.prompts, 16, models.context, models.target.eos_tokens)
    narrator = explain.Narrator(settings, models, sequences, job.tokenizer)
    return narrator, [rows[0] for rows in narrator.decode()]


def test_what_is_shown_has_decided(capsys, one_thread, models):
    """The outcome follows from the p, q, sent and u that are printed, token by token."""
    narrator, rounds = rounds_at_temperature_1(models)
    kinds = set()
    for seen in rounds:
        k, bonus = seen.outcome
        kinds.add((seen.source, k < len(seen.drafted)))
        narrator.print_draws(seen)
        for i, line in enumerate(capsys.readouterr().out.splitlines()[1:-1]):
            token = seen.drafted[i]
            F = narrator.draft.plan.fan_out[seen.source][i]
            sigma = saguaro_distribution(seen.q[i], F, 0.5)
            torch.testing.assert_close(seen.sent[i], sigma, rtol=1e-4, atol=1e-6)
            p = seen.p[i, token]
            u = seen.uniforms[i]
            shown = (p, seen.q[i, token], sigma[token], u, p / sigma[token])
            assert "  ".join(f"{number:.3f}" for number in shown) in line
            assert (u < p / sigma[token]) == (i < k) == ("accepted" in line)
        assert bonus == inverse_cdf(seen.bonus_distribution(), seen.uniforms[-1])
    assert len(kinds) == 4  # from the cache and from a backup, with and without a rejection


def test_guesses_are_shown_with_the_drafts_q(capsys, one_thread, models):
    narrator, rounds = rounds_at_temperature_1(models)
    for seen in rounds:
        narrator.print_guesses(seen, "")
        lines = capsys.readouterr().out.splitlines()[1:]
        for line, (k, token) in zip(lines, seen.prepared):
            assert f" {seen.q[k, token]:.3f} " in line and f" k={k} " in line


@pytest.mark.slow
def test_the_sheet_shows_what_slow_motion_prints(capsys, one_thread, models):
    """Its example, to the character but for the digits of q, which are rounded."""
    sheet = (ROOT / "course/SHEET.md").read_text("utf-8")
    example = re.search(r"```\n(round 0.*?)```", sheet, re.DOTALL)[1]
    command = re.search(r"    python -m course.explain (.*)", sheet)[1]
    explain.slow_motion(Job(parse(ExplainSettings, shlex.split(command))), models)
    shown, example = [re.sub(r"0\.\d{3}", "q", text)
                      for text in (capsys.readouterr().out, example)]
    assert f"\n\n{example}\ntext\n" in shown
