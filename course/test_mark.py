"""Marking: right answers in unusual files get all points; cheats get none."""
import csv
import functools
import io
import json
import os
import re
import site
import socket
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from course import grading, mark
from course.handout import EXERCISES, ROOT, missing, replaced
from engine.errors import UserError

LECTURER = (ROOT / "course/LECTURER.md").read_text("utf-8")
RIGHT = (ROOT / "cache.py").read_text("utf-8")
ANSWER = "    return sum(acceptance_rate"  # the first of exercise 6
pytestmark = pytest.mark.slow


def with_bodies(body: str, before: str = "") -> str:
    """cache.py with this body in all functions of exercise 6, and with lines before them. NAME is
    the function's."""
    source = RIGHT
    for function in EXERCISES["6"]["functions"]:
        source = replaced(source, function, body.replace("NAME", function))
    return source.replace("import math\n", f"import math\n{before}\n", 1)


@pytest.fixture(scope="module")
def marker(tmp_path_factory):
    return mark.Marker(["5", "6"], 1, 60, tmp_path_factory.mktemp("13:45 x"))


@pytest.fixture
def marks(marker, tmp_path):
    """The points of exercise 6, and the remark, for a file cache.py."""
    def grade(source: str | bytes) -> tuple[int, str]:
        data = source if isinstance(source, bytes) else source.encode()
        (tmp_path / "cache.py").write_bytes(data)
        return marker.grade(tmp_path, "6")
    return grade


HELPED = re.sub(f"({re.escape(ANSWER)}.*)", rf"    # {missing('6')}\n\1\n    {missing('6')}", RIGHT)
UNUSUAL = f"""{HELPED.replace("return sum(acc", "return solution(acc")}
import os, subprocess, threading, time
print('noise')
os.write(1, b'more')
threading.Thread(target=time.sleep, args=[99]).start()
subprocess.Popen(['sleep', '99'])

def solution(terms):
    return sum(terms)

def timed(function):
    return lambda *given: function(*given)

expected_tokens = timed(expected_tokens)
throughput = __import__('functools').partial(throughput)
del SpeculationCache
"""  # the stub stands as a comment, and below the answer; what others need is missing


CHEATING = {  # by function
    "expected_tokens": "import pytest\npytest.skip('1 passed')",
    "throughput": """
import sys
given = locals()
frame = sys._getframe(1)
while frame and 'expected' not in frame.f_locals:
    frame = frame.f_back
import solution
return frame.f_locals['expected'] if frame else solution.throughput(**given)""",
    "critical_batch_size": "return 1.0"}
CHEATS = {  # and what the remark says
    "skips, looks what is expected, asks the solution, and lets everything be equal": (
        functools.reduce(lambda source, cheat: replaced(source, *cheat), CHEATING.items(), RIGHT)
        + "\nimport torch.testing\ntorch.testing.assert_close = lambda *a, **k: None",
        " and 7 others; first: "),
    "writes that it passed, and ends": (with_bodies(
        "return 1.0", "import os\nfor fd in range(9):\n    try: os.write(fd, b'9 passed')\n"
        "    except OSError: pass\nos._exit(0)"), "no values: JSONDecodeError"),
    "ends at once": (with_bodies("return 1.0", "import os\nos._exit(0)"),
                     "; first: the process ended")}


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_get_no_points(marks, name):
    source, said = CHEATS[name]
    points, remark = marks(source)
    assert points == 0 and said in remark


def test_a_box_has_nothing_but_the_answer_and_the_program(
        marks, marker, tmp_path, monkeypatch):
    """Not the solution, other submissions, the marker or a network; nothing is written there that
    stays, nor much."""
    if not marker.box:
        pytest.skip("bubblewrap is missing or may not run")
    (tmp_path / "other/share").mkdir(parents=True)
    (tmp_path / "other/share/token").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(site, "USER_BASE", str(tmp_path / "other"))
        monkeypatch.setattr(site, "USER_SITE", str(tmp_path / "other/lib"))
        points, remark = marks(with_bodies("return 1.0", f"""
import glob, os, socket
def write(file, size=1):
    with open(file, "wb") as opened:
        opened.write(bytes(size))
tries = dict(
    solution=lambda: open({str(ROOT / "cache.py")!r}),
    other=lambda: open({str(tmp_path / "other/share/token")!r}),
    others=lambda: open({str(marker.folder / "matches/cache.py")!r}),
    marker=lambda: os.kill({os.getpid()}, 0),
    network=lambda: socket.create_connection({server.getsockname()!r}, 1),
    own=lambda: write("x"), much=lambda: [write(f"/tmp/{{n}}", 2**25) for n in range(4)],
    shared=lambda: [write(f"/dev/shm/{{n}}", 2**25) for n in range(4)],
    device=lambda: write("/dev/x"))
done = []
for name, attempt in tries.items():
    try:
        attempt()
        done.append(name)
    except OSError:
        pass
raise RuntimeError(f"done: {{done}}")"""))
    assert (points, remark) == (0, "RuntimeError: done: []")


def test_an_attack_on_the_marker_gets_no_points_and_the_next_answer_its_own(marks, marker):
    if not marker.box:
        pytest.skip("bubblewrap is missing or may not run")
    for attack in ("os.kill(os.getppid(), 9)", "for fd in range(3, 9):\n    try: os.write(fd, b'['"
                   " * 100_000)\n    except OSError: pass\nos._exit(0)"):
        assert marks(with_bodies("return 1.0", f"import os\n{attack}"))[0] == 0
    assert marks(RIGHT) == (11, "")


def test_a_full_disk_is_no_fault_of_the_answer(marks, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(mark, "run_answer", full)
    with pytest.raises(OSError, match="No space left"):
        marks(RIGHT)


def test_no_answer_can_be_learned_by_heart_from_what_was_handed_out(marker):
    """With another seed than the hand-out's other things are asked: see test_course.py."""
    assert marker.seed != grading.SEED
    for part in marker.parts["6"].values():
        for name, said in part.items():
            mine = grading.exam_of(name, marker.seed, solved=True)
            assert [each.value for each in said] == [each.value for each in mine], name


def test_part_of_the_points(marks, marker, tmp_path, monkeypatch):
    wrong = RIGHT.replace(ANSWER, f"    return 1j\n{ANSWER}")
    points, remark = marks(wrong)
    assert points == 10 and "complex is not JSON" in remark
    wrong = RIGHT.replace("if hit_rate == 0 or at_zero", "if at_zero")  # fails with p_hit = 0
    points, remark = marks(("# coding: latin-1\n# \xe9\n" + wrong).encode("latin-1"))
    assert points == 10 and "p_hit of 0" in remark
    monkeypatch.delitem(marker.parts["5"], ("likely_outcomes",))  # takes seconds
    wrong_matches = RIGHT.replace("same_k & same_bonus", "same_k | same_bonus")
    (tmp_path / "cache.py").write_text(wrong_matches)  # which the solution of `look_up` calls
    assert marker.grade(tmp_path, "5")[0] == 8


def test_what_is_no_small_file_is_not_read(marker, tmp_path):
    os.mkfifo(tmp_path / "cache.py")
    assert marker.grade(tmp_path, "6") == (
        0, "OSError: cache.py is no regular file of at most 64 KB")
    os.remove(tmp_path / "cache.py")
    (tmp_path / "cache.py").write_bytes(bytes(65_537))
    assert "no regular file of at most 64 KB" in marker.grade(tmp_path, "6")[1]
    os.remove(tmp_path / "cache.py")
    (tmp_path / "cache.py").symlink_to("/dev/zero")
    assert "no regular file" in marker.grade(tmp_path, "6")[1]


def test_an_answer_has_limits_and_no_environment(marks, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    remark = marks(with_bodies("return 1.0", f"""
import os
assert 'HF_TOKEN' not in os.environ, 'seen'
x = bytearray({mark.MEMORY})"""))[1]
    assert "emory" in remark and "seen" not in remark
    for body, said in (("while lookahead > 1: pass", "it was not done in time"),
                       ("f = lambda: f()\n    lookahead > 1 and f()", "RecursionError")):
        points, remark = marks(RIGHT.replace(ANSWER, f"    {body}\n{ANSWER}").replace(
            "import math\n", "import math, sys\nsys.setrecursionlimit(10**9)\n"))
        assert points == 10 and remark.startswith("lost: any K 1; first: ")
        assert said in remark and "; expected " in remark


def test_an_except_that_takes_the_alarm_costs_only_its_own_test(marks, monkeypatch, marker):
    """Even if it would go on for ever."""
    monkeypatch.setattr(marker, "timeout", 40)
    points, remark = marks(RIGHT.replace(ANSWER, f"""
    while lookahead > 1:
        try:
            while True:
                lookahead += 0
        except:
            pass
{ANSWER}"""))
    assert points == 10 and remark.startswith("lost: any K 1; first: ")
    assert "it was not done in time" in remark


def test_an_endless_answer_ends_soon_if_marking_was_killed(marker):
    """At once in a box; else it may use as many seconds of a processor as twice the limit."""
    program = f"""from pathlib import Path
from course.mark import run_answer
folder = Path({str(marker.folder)!r})
run_answer(b"while True: pass", "6", (), (folder, folder), [], 0, 2, {marker.box})"""
    marking = psutil.Popen([sys.executable, "-c", program], cwd=ROOT)
    while not marking.children():
        time.sleep(0.1)
    answers = marking.children(recursive=True)
    marking.kill()
    marking.wait()
    _, alive = psutil.wait_procs(answers, 200)  # beside busy programs
    assert not alive


@pytest.mark.parametrize("seconds", ("inf", "nan", "0", "-1"))
def test_a_limit_with_which_no_answer_runs_is_refused(seconds, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mark.py", ".", "--timeout", seconds])
    monkeypatch.setattr(mark, "Marker", lambda *_: pytest.fail("it would mark"))
    with pytest.raises(UserError, match="--timeout is"):
        mark.main()


def test_points_that_are_not_those_of_the_tests_are_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(EXERCISES["6"], "points", 20)
    with pytest.raises(UserError, match="6 has 20 points in .*, but its tests .* have 11"):
        mark.Marker(["6"], 1, 60, tmp_path)


def test_the_table(tmp_path, monkeypatch, capsys):
    """Answers that are right, in an unusual file; missing, unreadable, and in folders whose names
    are two columns, and a formula."""
    monkeypatch.chdir(tmp_path)
    for variable, value in (("PYTEST_ADDOPTS", "-q"), ("FORCE_COLOR", "1"), ("PY_COLORS", "1")):
        monkeypatch.setenv(variable, value)
    answers = {"right": UNUSUAL, "none": with_bodies(missing("6")), "=1+2": "def f(:",
               "eve\n10\t10\tbob": replaced(RIGHT, "throughput", "raise ValueError('\\x1b[2J')")}
    for name, module in answers.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cache.py").write_text(module, "utf-8")
    (tmp_path / "gone/notes").mkdir(parents=True)
    (tmp_path / "gone/notes/cache (1).py").touch()
    words = ["--csv", "marks.csv", "--only", "6", "--seed", "7"]
    monkeypatch.setattr(sys, "argv", ["mark.py", *answers, "gone", *words])
    mark.main()
    rows = [*csv.reader((tmp_path / "marks.csv").open(newline=""))]
    assert rows[0] == ["submission", "6", "total", "seed", "remarks"]
    assert [row[1:3] for row in rows[1:]] == [[points] * 2 for points in ("11", "0", "0", "6", "0")]
    assert rows[1][4] == "" and rows[2][4] == "6: not attempted"
    assert "SyntaxError" in rows[3][4] and "(cache.py, line 1)" in rows[3][4]
    assert "no cache.py; there is notes/cache (1).py" in rows[5][4]
    assert rows[4][0] == r"eve\n10\t10\tbob" and rows[3][0] == "./=1+2"
    assert not re.search(r"[\x00-\x1f]", "".join(sum(rows, [])))
    shown, errors = capsys.readouterr()
    assert "%|" not in errors  # no bar where there is no terminal
    assert shown.startswith("--seed 7\n6\ttotal\tsubmission\n11\t11\t")
    assert r"eve\n10\t10\tbob" in shown and "\x1b" not in shown


def test_results_for_gradescope_and_signs_of_life_on_a_terminal(tmp_path, monkeypatch):
    """The fields are those of https://gradescope-autograders.readthedocs.io/en/latest/specs/."""
    wrong = RIGHT.replace(ANSWER, f"    return 7.0\n{ANSWER}")
    (tmp_path / "cache.py").write_text(wrong, "utf-8")
    words = [str(tmp_path), "--only", "6", "--jobs", "1", "--results", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", ["mark.py", *words])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    mark.main()
    result, = json.loads((tmp_path / "results").read_text("utf-8")).pop("tests")
    output = result.pop("output")
    assert result == {"name": "6. what it is worth", "score": 10, "max_score": 11}
    assert output.startswith("lost: any K 1; first: ") and "yours 7.0; expected" in output
    shown = sys.stderr.getvalue()
    assert "the solution:   0%|" in shown and f"{tmp_path}:   0%|" in shown


def test_the_lecturers_lines_write_the_remarks_beside_the_answers(tmp_path):
    code = re.search(r'( {4})python -c "(import csv\n.*?)"\n', LECTURER, re.DOTALL).expand(r"\1\2")
    (tmp_path / "ann").mkdir()
    table = 'submission,5,6,total,seed,remarks\nann,1,8,9,2,"6: a, b"\n'
    (tmp_path / "marks.csv").write_text(table, "utf-8")
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, check=True)
    assert (tmp_path / "ann/remarks.txt").read_text("utf-8") == "9 6: a, b"
