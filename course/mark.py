"""Marks submissions: the points of every exercise, on the screen and as CSV.

    python -m course.mark FOLDER... --csv marks.csv --seed 2026

A submission is a folder with the files to hand in. Each exercise is graded in a process of its own,
with a time-out, and with the solutions of all others. Besides the values of the hand-out it is
tried on those that `--seed` makes of them; what should come out is what the solutions return, so a
table of answers does not pass. It is the students' code that runs: use a sandbox.
"""
import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy

from course.handout import EXERCISES, ROOT, missing


def varied(seed: int) -> str:
    """The values of values.toml with other numbers, and what the solutions make of them (JSON)."""
    from course import grading  # here, because torch takes seconds
    rng = numpy.random.default_rng(seed)
    times = rng.integers(2, 9)

    def vary(value):
        """Integers become larger, others smaller; four of these are a distribution, and stay so."""
        array = numpy.array(value)
        if array.dtype.kind == "i":
            return (array * times).tolist()
        array = array * rng.uniform(0.85, 1.0, array.shape)
        if array.shape[-1:] == (4,):
            array /= array.sum(-1, keepdims=True).clip(1e-9)
        return array.tolist()

    values = []
    for given in grading.VALUES:
        cases = []
        for arguments, _ in given["cases"]:
            arguments = [vary(argument) if place in given["vary"] else argument
                         for place, argument in enumerate(arguments)]
            solution = grading.FUNCTIONS[given["function"]]
            cases.append([arguments, solution(*map(grading.as_tensor, arguments))])
        if given["vary"]:
            values.append(given | {"cases": cases})
    return json.dumps(values, default=lambda tensor: tensor.tolist())


def grade(submission: Path, number: str, values: str, args) -> tuple[int, str]:
    """The points for one exercise, and a remark where there are none."""
    module, own = EXERCISES[number]["module"], EXERCISES[number]["functions"]
    others = [function for exercise in EXERCISES.values() if exercise["module"] == module
              for function in exercise["functions"] if function not in own]
    solved = "".join(f"\n{function} = solution.{function}" for function in others)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "pythonpath=",
               "-m", f"exercise{number}", str(ROOT / "course/grading.py")]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",  # an answer is found before its solution
            "GRADING_VALUES": values, "GRADING_SEED": str(args.seed), "COLUMNS": "150"}
        try:
            answer = (submission / f"{module}.py").read_text("utf-8")
            if missing(number) in answer:
                return 0, "not attempted"
            answer += f"\n\nimport solution{solved}\n"
            (Path(folder) / f"{module}.py").write_text(answer, "utf-8")
            shutil.copyfile(ROOT / f"{module}.py", Path(folder) / "solution.py")
            run = subprocess.run(command, cwd=folder, timeout=args.timeout, capture_output=True,
                                 env=environment, text=True, errors="replace")
        except subprocess.TimeoutExpired:
            return 0, f"not done after {args.timeout:g} seconds"
        except (OSError, ValueError) as problem:
            return 0, f"{type(problem).__name__}: {problem}"
    if run.returncode == 0 and " passed" in run.stdout:
        return EXERCISES[number]["points"], ""
    failure = re.search(r"^(?:FAILED .* - |E +)(\w+: .*)", run.stdout, re.MULTILINE)
    return 0, failure[1] if failure else "pytest did not come to an end"


def main() -> None:
    parser = argparse.ArgumentParser(description="Mark submissions.")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--csv", type=Path, help="write points and remarks to this file")
    parser.add_argument("--seed", type=int, default=0, help="of the numbers that are tried")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for each exercise")
    parser.add_argument("--only", nargs="+", choices=EXERCISES, metavar="N", default=[*EXERCISES])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    args = parser.parse_args()
    for folder in args.folders:
        if not folder.is_dir():
            parser.error(f"{folder}: no such folder")
    table = [["submission", *args.only, "total", "remarks"]]
    print("".join(f"{title:>6}" for title in table[0][1:-1]))
    values = varied(args.seed)
    with ThreadPoolExecutor(args.jobs) as pool:
        for folder in args.folders:
            marks = pool.map(lambda number: grade(folder, number, values, args), args.only)
            points, remarks = zip(*marks)
            said = [f"{number}: {remark}" for number, remark in zip(args.only, remarks) if remark]
            table.append([folder, *points, sum(points), "; ".join(said)])
            row = "".join(f"{number:6}" for number in table[-1][1:-1])
            print(f"{row}  {folder}", *said, sep="\n        ", flush=True)
    if args.csv:
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(table)


if __name__ == "__main__":
    main()
