"""Marks submissions: the points of every exercise, on the screen, as CSV and for Gradescope.

    python -m course.mark FOLDER... --csv marks.csv

A submission is a folder with the files to hand in. Each exercise is asked in a process of its own,
with a limit of time and memory, with the solutions of all others, and with other arguments than
the hand-out's. That process has no solution of the exercise, and only says what comes out; what is
right is decided here. It runs in a box of Bubblewrap's, where that can be had. Where one function
of an exercise calls another, each is asked in this way.
"""
import csv
import json
import os
import random
import re
import shutil
import signal
import site
import stat
import subprocess
import sys
import tempfile
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path

from cli import launch
from cli.settings import Parser, open_for_writing
from course.handout import EXERCISES, ROOT, missing, replaced, write_program
from engine.errors import UserError, printable

MEGABYTE = 2**20
LARGEST = 64 * 1024  # bytes of a file that is handed in
MEMORY = 8192 * MEGABYTE  # of addresses, of which PyTorch takes a few gigabytes
# what Python needs of a system, besides its own folders
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
ANSWER = Path(__file__).with_name("answer.py").read_text("utf-8")


def read(file: Path) -> bytes:
    """Return a file that was handed in."""
    if not os.path.lexists(file):
        others = (str(each.relative_to(file.parent)) for each in file.parent.rglob("*")
                  if each.is_file())
        raise OSError(f"no {file.name}; there is {', '.join(islice(others, 5)) or 'nothing'}")
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
        raise OSError(f"{file.name} is no regular file of at most 64 KB")
    return file.read_bytes()


def boxed(folder: str, *program: Path) -> list[str]:
    """Return the command of Bubblewrap (0.8 or later) for an answer. It sees Python, its own folder
    and those of the `program`, but no other process, file or network, and writes into small
    folders for temporary files and shared memory that end with it."""
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--dev", "/dev",
             "--proc", "/proc", "--size", 64 * MEGABYTE, "--tmpfs", "/tmp",
             "--size", 64 * MEGABYTE, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    python = (sys.prefix, sys.base_prefix, site.getusersitepackages())
    for place in (*SYSTEM, *python, *program, folder):
        words += ["--ro-bind-try", place, place]
    return [*map(str, words), "--remount-ro", "/", "--chdir", folder]


def has_box(folder: Path) -> bool:
    """Return whether answers can be boxed here."""
    words = [*boxed(str(folder), folder), sys.executable, "-c", "import torch"]
    return bool(shutil.which("bwrap")) and not subprocess.run(
        words, stderr=subprocess.DEVNULL).returncode


def asked(test: str, number: str) -> tuple[str, ...]:
    """Return the functions of an exercise that are asked together with this test."""
    exercise = EXERCISES[number]
    name = test.split(", ")[0]
    return tuple(function for function in exercise["functions"]
                 if not exercise.get("apart") or function.split(".")[-1] == name)


def run_answer(source: bytes, number: str, functions: tuple[str, ...], folders: tuple[Path, Path],
               names: list[str], seed: int, timeout: float, box: bool) -> tuple[list, bool]:
    """Return what an answer says in each test of these functions, as far as it comes, and whether
    it was in time. `folders` have the modules with all other functions, and the program. Raises
    OSError if this machine has no room for a small file: that is no fault of the answer."""
    module = EXERCISES[number]["module"]
    put_back = [function for exercise in EXERCISES.values() if exercise["module"] == module
                for function in exercise["functions"] if function not in functions]
    argument = json.dumps([*map(str, folders), module, put_back, names, seed, MEMORY, timeout])
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
        Path(folder, f"{module}.py").write_bytes(source)
        environment = {"HOME": folder, "PYTHONUSERBASE": site.getuserbase(), "OMP_NUM_THREADS": "1"}
        environment |= {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH")
                        if name in os.environ}
        words = [*(boxed(folder, *folders) if box else []), sys.executable, "-c", ANSWER, argument]
        job = subprocess.Popen(words, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                               stdout=out, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            in_time = job.wait(timeout) is not None
        except subprocess.TimeoutExpired:
            in_time = False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)  # and whatever it started
            job.wait()
        out.seek(0)
        lines = out.read(64 * MEGABYTE).decode(errors="replace").splitlines()
    try:
        return [json.loads(line) for line in lines], in_time
    except (ValueError, RecursionError, MemoryError) as problem:  # it may have written anything
        return [f"no values: {type(problem).__name__}"], in_time


class Marker:
    """Grades exercises, all submissions with the same arguments."""

    def __init__(self, numbers: list[str], seed: int, timeout: float, folder: Path):
        """`folder` is for the program, and for its modules without what a process is asked."""
        from tqdm import tqdm

        from course import grading  # takes seconds
        self.progress = partial(tqdm, leave=False, disable=None)  # on a terminal
        self.seed = seed
        self.timeout = timeout
        self.folder = folder
        self.points = {name: points for name, (_, points, *_) in grading.TESTS.items()}
        for number in numbers:  # else wrong answers would keep points, or have less than none
            given = EXERCISES[number]["points"]
            tests = sum(points for other, points, *_ in grading.TESTS.values() if other == number)
            if given != tests:
                raise UserError(f"exercise {number} has {given} points in course/handout.toml, but "
                                f"its tests in course/values.toml have {tests}")
        self.parts = {number: {} for number in numbers}  # by functions: what is said in their tests
        write_program(folder / "program", [*EXERCISES])
        for name, (number, *_) in self.progress(grading.TESTS.items(), "the solution"):
            if number in numbers:
                part = self.parts[number].setdefault(asked(name, number), {})
                part[name] = grading.exam_of(name, seed, solved=True)
        for number, parts in self.parts.items():
            for functions in parts:
                self.write_modules(number, functions)
        self.box = has_box(folder)
        if not self.box:
            print("mark.py: bubblewrap (bwrap, 0.8 or later) is missing or may not run here, so "
                  "answers run without a box: see course/LECTURER.md", file=sys.stderr, flush=True)

    def write_modules(self, number: str, functions: tuple[str, ...]) -> None:
        """Write the modules that are handed in, without these functions."""
        folder = self.folder / " ".join(functions)
        folder.mkdir(exist_ok=True)
        for module in {exercise["module"] for exercise in EXERCISES.values()}:
            source = (ROOT / f"{module}.py").read_text("utf-8")
            for function in functions if module == EXERCISES[number]["module"] else ():
                source = replaced(source, function, missing(number))
            (folder / f"{module}.py").write_text(source, "utf-8")

    def grade(self, submission: Path, number: str) -> tuple[int, str]:
        """Return the points for one exercise, and a remark if these are not all."""
        exercise = EXERCISES[number]
        try:
            source = read(submission / f"{exercise['module']}.py")
        except (OSError, ValueError) as problem:
            return 0, f"{type(problem).__name__}: {problem}"
        faults = {}
        for functions, tests in self.parts[number].items():
            folders = self.folder / " ".join(functions), self.folder / "program"
            said, in_time = run_answer(source, number, functions, folders, [*tests], self.seed,
                                       self.timeout, self.box)
            if said and isinstance(said[0], str):
                return 0, said[0]
            late = "the process ended" if in_time else f"not done after {self.timeout:g} seconds"
            for name, mine in zip_longest(tests, said[:len(tests)]):
                faults[name] = late if mine is None else fault_in(mine, tests[name])
        if all(f"NotImplementedError: exercise {number}: " in fault for fault in faults.values()):
            return 0, "not attempted"
        lost = {name: self.points[name] for name, fault in faults.items() if fault}
        if not lost:
            return exercise["points"], ""
        parts = [f"{name.split(', ', 1)[1]} {worth}" for name, worth in lost.items()]
        several = ", ".join(parts[:4])
        if len(parts) > 4:
            several += f" and {len(parts) - 4} others"
        first = faults[next(iter(lost))]
        return exercise["points"] - sum(lost.values()), f"lost: {several}; first: {first}"


def fault_in(mine: list, said: list) -> str:
    """Return what is wrong with an answer's values, without the arguments, or ""."""
    from course.exam import failure  # takes seconds
    try:
        parts = re.split(r"\n  (?=yours |expected |arguments )",
                         failure(said, mine, [each.value for each in said]))
        return "; ".join(" ".join(part.split())[:140] for part in parts[:3])
    except Exception as problem:  # the answer's process may have written anything
        return f"no values: {type(problem).__name__}"


def cell(text: object) -> str:
    """Return text that stays in its place of a table, on the screen or in a file."""
    return printable(str(text)).replace("\t", "\\t").replace("\n", "\\n")


def arguments() -> Namespace:
    """Return what the command line says."""
    parser = Parser(description="Mark submissions.")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--csv", help="write points and remarks to this file")
    parser.add_argument("--results", help="write those of one submission here, for Gradescope")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for each process")
    parser.add_argument("--only", nargs="+", choices=EXERCISES, metavar="N", default=[*EXERCISES])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6),
                        help="of the arguments; without it others each time")
    args = parser.parse_args()
    if args.csv and os.path.isfile(args.csv):
        parser.error(f"--csv {args.csv} exists, and marks are not written over: name a new file")
    if args.results and len(args.folders) > 1:
        parser.error("--results is for one submission: name one FOLDER")
    if not 0 < args.timeout <= 1e6:  # with others no answer runs, and all would get no points
        parser.error(f"--timeout is {args.timeout}; it must be above 0 and at most a million")
    args.only = list(dict.fromkeys(args.only))
    return args


def for_gradescope(marks: dict[str, tuple[int, str]]) -> dict:
    """Return the points and remarks of the exercises as Gradescope reads them."""
    return {"tests": [{"name": f"{number}. {EXERCISES[number]['title']}", "score": points,
                       "max_score": EXERCISES[number]["points"], "output": cell(remark)[:700]}
                      for number, (points, remark) in marks.items()]}


def main() -> None:
    args = arguments()
    numbers = args.only
    sys.stdout.reconfigure(errors="backslashreplace")  # a name may not be in its encoding
    with (open_for_writing("--csv", args.csv) as file,
          open_for_writing("--results", args.results) as results,
          ThreadPoolExecutor(max(1, args.jobs)) as pool, tempfile.TemporaryDirectory() as programs):
        file.reconfigure(newline="", errors="backslashreplace")
        marker = Marker(numbers, args.seed, args.timeout, Path(programs))
        print(f"--seed {args.seed}")
        print(*numbers, "total", "submission", sep="\t", flush=True)
        table = csv.writer(file)
        table.writerow(["submission", *numbers, "total", "seed", "remarks"])
        for submission in args.folders:
            name = cell(submission)
            graded = pool.map(partial(marker.grade, submission), numbers)
            graded = [*marker.progress(graded, name, total=len(numbers))]
            marks = dict(zip(numbers, graded))
            json.dump(for_gradescope(marks), results)
            points = [worth for worth, _ in graded]
            said = [cell(f"{number}: {remark}")[:700]
                    for number, (_, remark) in marks.items() if remark]
            if name.startswith(("=", "+", "-", "@")):  # in a spreadsheet a formula
                name = f"./{name}"
            table.writerow([name, *points, sum(points), args.seed, "; ".join(said)])
            file.flush()
            print(*points, sum(points), name, sep="\t")
            for line in said:
                print(f"\t{line}", flush=True)


if __name__ == "__main__":
    raise SystemExit(launch.exit_status(main))
