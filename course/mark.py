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
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from course.handout import EXERCISES, HAND_IN, ROOT, missing, transplanted, write

PARSER = Lock()  # Python 3.11's cannot work in two threads at once


def varied(seed: int) -> list[dict]:
    """The values of values.toml with other numbers, and what the solutions make of them."""
    from course import grading  # here, because torch takes seconds
    rng = random.Random(seed)
    shift = rng.randint(1, 9)

    def vary(value, shifts: bool):
        if isinstance(value, float):
            return value * rng.uniform(0.85, 1.0)
        if isinstance(value, int):
            return value + shift * shifts
        if len(value) == 4 and isinstance(value[0], float):  # a distribution
            weights = [0.01 + rng.random() for _ in value]
            return [0.7 * old + 0.3 * new / sum(weights) for old, new in zip(value, weights)]
        return [vary(part, shifts) for part in value]

    values = []
    for given in grading.VALUES:
        name = given["function"]
        if name == "geometric_fan_out" and "tolerance" in given:
            continue  # rounding may differ
        cases = []
        for arguments, _ in given["cases"]:
            if name == "geometric_fan_out":  # what is integral stays so
                arguments = [arguments[0] * (1 + shift), *arguments[1:]]
            else:
                arguments = vary(arguments, shifts=given["exercise"] == "5")
            out = grading.FUNCTIONS[name](*map(grading.as_tensor, arguments))
            parts = out if isinstance(out, tuple) else [out]
            parts = [part.tolist() if hasattr(part, "tolist") else part for part in parts]
            cases.append([arguments, parts if isinstance(out, tuple) else parts[0]])
        tolerance = 0.011 if name in ("verify", "sample") else 1e-5
        values.append(given | {"cases": cases, "tolerance": tolerance})
    return values


def assemble(folder: Path, submission: Path, number: str) -> None:
    """The program, with a student's answer to one exercise and the solutions of the others."""
    write(folder, [])
    own = EXERCISES[number]["functions"]
    module = own[0].split(".")[0]
    solution = (ROOT / f"{module}.py").read_text("utf-8")
    answer = (submission / f"{module}.py").read_text("utf-8")
    for exercise in EXERCISES.values():
        for function in exercise["functions"]:
            if function.startswith(f"{module}.") and function not in own:
                answer = transplanted(answer, function.split(".", 1)[1], solution)
    (folder / f"{module}.py").write_text(answer, "utf-8")


def grade(submission: Path, number: str, values: list[dict], args) -> tuple[int, str]:
    """The points for one exercise, and a remark where there are none."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", f"exercise{number}", "test_exercises.py"]
    environment = os.environ | {"GRADING_SEED": str(args.seed), "COLUMNS": "150"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            with PARSER:
                assemble(Path(folder), submission, number)
            if any(missing(number) in (Path(folder) / name).read_text("utf-8") for name in HAND_IN):
                return 0, "not attempted"
            (Path(folder) / "varied.json").write_text(json.dumps(values))
            run = subprocess.run(command, cwd=folder, timeout=args.timeout, capture_output=True,
                                 env=environment, text=True, errors="replace")
        except subprocess.TimeoutExpired:
            return 0, f"not done after {args.timeout:g} seconds"
        except (OSError, SyntaxError, ValueError, StopIteration) as problem:
            return 0, f"{type(problem).__name__}: {problem}"
    if run.returncode == 0 and " passed" in run.stdout:
        return EXERCISES[number]["points"], ""
    failures = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return 0, (failures or ["pytest did not come to an end"])[0].split(" - ")[-1]


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
            parser.exit(2, f"mark.py: error: {folder}: no such folder\n")
    values = varied(args.seed)
    table = [["submission", *args.only, "total", "remarks"]]
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = {(folder, number): pool.submit(grade, folder, number, values, args)
                for folder in args.folders for number in args.only}
        print("".join(f"{name:>6}" for name in table[0][1:-1]))
        for folder in args.folders:
            points, remarks = zip(*(jobs[folder, number].result() for number in args.only))
            said = [f"{number}: {remark}" for number, remark in zip(args.only, remarks) if remark]
            table.append([folder, *points, sum(points), "; ".join(said)])
            row = "".join(f"{number:6}" for number in table[-1][1:-1])
            print(f"{row}  {folder}", *said, sep="\n        ", flush=True)
    if args.csv:
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(table)


if __name__ == "__main__":
    main()
