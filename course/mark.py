"""Marks submissions: the points of every exercise, on the screen and as CSV.

    python -m course.mark FOLDER... --csv marks.csv

A submission is a folder with the files to hand in. Each exercise is graded in a process of its own,
with a time-out, and with the solutions of all others. It is the students' code that runs: use a
sandbox.
"""
import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from cli.settings import Parser, open_for_writing
from cli.text import printable
from course.handout import EXERCISES, ROOT, missing
from course.options import run_command


def grade(submission: Path, number: str, timeout: float) -> tuple[int, str]:
    """The points for one exercise, and a remark where there are none."""
    exercise = EXERCISES[number]
    file = f"{exercise['module']}.py"
    put_back = "\n\nimport solution\n"
    for other in EXERCISES.values():
        if other["module"] == exercise["module"] and other is not exercise:
            put_back += "".join(f"{name} = solution.{name}\n" for name in other["functions"])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "pythonpath=",
               "-m", f"exercise{number}", str(ROOT / "course/grading.py")]
    with tempfile.TemporaryDirectory() as folder:
        # an answer is found before its solution
        environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "COLUMNS": "150"}
        try:
            answer = (submission / file).read_text("utf-8")
            if missing(number) in answer:
                return 0, "not attempted"
            Path(folder, file).write_text(answer + put_back, "utf-8")
            shutil.copyfile(ROOT / file, Path(folder, "solution.py"))
            run = subprocess.run(command, cwd=folder, timeout=timeout, capture_output=True,
                                 env=environment, text=True, errors="replace")
        except subprocess.TimeoutExpired:
            return 0, f"not done after {timeout:g} seconds"
        except (OSError, ValueError) as problem:
            return 0, f"{type(problem).__name__}: {problem}"
    if run.returncode == 0 and " passed" in run.stdout:
        return exercise["points"], ""
    failure = re.search(r"^(?:FAILED .* - |E +)(\w+: .*)", run.stdout, re.MULTILINE)
    return 0, failure[1] if failure else "pytest did not come to an end"


def folder(name: str) -> Path:
    if not os.path.isdir(name):
        raise argparse.ArgumentTypeError(f"{name!r} is no folder; name one with files handed in")
    return Path(name)


def seconds(text: str) -> float:
    if not 0 < float(text) <= 1e6:  # NaN neither
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1000000")
    return float(text)


def main() -> None:
    parser = Parser(description="Mark submissions.")
    parser.add_argument("folders", type=folder, nargs="+", metavar="FOLDER")
    parser.add_argument("--csv", help="write points and remarks to this file")
    parser.add_argument("--timeout", type=seconds, default=120, help="seconds for each exercise")
    parser.add_argument("--only", nargs="+", choices=EXERCISES, metavar="N", default=[*EXERCISES])
    args = parser.parse_args()
    numbers = list(dict.fromkeys(args.only))
    sys.stdout.reconfigure(errors="backslashreplace")  # a name may not be in its encoding
    with open_for_writing("--csv", args.csv) as file, ThreadPoolExecutor(os.cpu_count()) as pool:
        file.reconfigure(newline="", errors="backslashreplace")
        print(*numbers, "total", "submission", sep="\t")
        table = csv.writer(file)
        table.writerow(["submission", *numbers, "total", "remarks"])
        for submission in args.folders:
            marks = pool.map(partial(grade, submission, timeout=args.timeout), numbers)
            points, remarks = zip(*marks)
            said = [f"{number}: {remark}" for number, remark in zip(numbers, remarks) if remark]
            table.writerow([submission, *points, sum(points), "; ".join(said)])
            line = [*points, sum(points), "\n\t".join([str(submission), *said])]
            print(printable("\t".join(map(str, line))), flush=True)


if __name__ == "__main__":
    run_command(main)
