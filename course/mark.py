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
from argparse import ArgumentTypeError, Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import IO, TextIO

from cli import launch
from cli.settings import Parser, open_for_writing
from course.handout import EXERCISES, ROOT, without, write_program
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
        folder = file.parent
        others = (each for each in folder.rglob("*") if each.is_file())
        names = [str(each.relative_to(folder)) for each in islice(others, 5)]
        raise OSError(f"no {file.name}; there is {', '.join(names) or 'nothing'}")
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
    put_back = []
    for exercise in EXERCISES.values():
        if exercise["module"] == module:
            put_back += [name for name in exercise["functions"] if name not in functions]
    argument = json.dumps([*map(str, folders), module, put_back, names, seed, MEMORY, timeout])
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
        Path(folder, f"{module}.py").write_bytes(source)
        program = [sys.executable, "-c", ANSWER, argument]
        if box:
            program = [*boxed(folder, *folders), *program]
        in_time = run_in(folder, program, out, timeout)
        out.seek(0)
        lines = out.read(64 * MEGABYTE).decode(errors="replace").splitlines()
    try:
        return [json.loads(line) for line in lines], in_time
    except (ValueError, RecursionError, MemoryError) as problem:  # it may have written anything
        return [f"no values: {type(problem).__name__}"], in_time


def run_in(folder: str, program: list[str], out: IO[bytes], timeout: float) -> bool:
    """Run an answer's process in its folder. Returns whether it ended in time; nothing of it is
    left."""
    environment = {"HOME": folder, "PYTHONUSERBASE": site.getuserbase(), "OMP_NUM_THREADS": "1"}
    for name in ("PATH", "LD_LIBRARY_PATH"):
        if name in os.environ:
            environment[name] = os.environ[name]
    job = subprocess.Popen(program, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                           stdout=out, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        job.wait(timeout)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # and whatever it started
        job.wait()


class Marker:
    """Grades exercises, all submissions with the same arguments."""

    def __init__(self, numbers: list[str], seed: int, timeout: float, folder: Path):
        """`folder` is for the program, and for its modules without what a process is asked."""
        from tqdm import tqdm
        self.progress = partial(tqdm, leave=False, disable=None)  # on a terminal
        self.seed = seed
        self.timeout = timeout
        self.folder = folder
        self.parts = {number: {} for number in numbers}  # by functions: what is said in their tests
        self.ask_solution()
        write_program(folder / "program", [*EXERCISES])
        for number, parts in self.parts.items():
            for functions in parts:
                self.write_modules(number, functions)
        self.box = has_box(folder)
        if not self.box:
            print("mark.py: bubblewrap (bwrap, 0.8 or later) is missing or may not run here, so "
                  "answers run without a box: see course/LECTURER.md", file=sys.stderr, flush=True)

    def ask_solution(self) -> None:
        """Note what the solution says. Raises `UserError` if the points of an exercise are not
        those of its tests: wrong answers would keep points, or have less than none."""
        from course import grading  # takes seconds
        self.points = {name: test.points for name, test in grading.TESTS.items()}
        for number in self.parts:
            given = EXERCISES[number]["points"]
            tests = sum(test.points for test in grading.TESTS.values() if test.exercise == number)
            if given != tests:
                raise UserError(f"exercise {number} has {given} points in course/handout.toml, but "
                                f"its tests in course/values.toml have {tests}")
        for name, test in self.progress(grading.TESTS.items(), "the solution"):
            if test.exercise in self.parts:
                functions = asked(name, test.exercise)
                part = self.parts[test.exercise].setdefault(functions, {})
                part[name] = grading.exam_of(name, self.seed, solved=True)

    def write_modules(self, number: str, functions: tuple[str, ...]) -> None:
        """Write the modules that are handed in, without these functions."""
        folder = self.folder / " ".join(functions)
        folder.mkdir(exist_ok=True)
        for module in {exercise["module"] for exercise in EXERCISES.values()}:
            source = (ROOT / f"{module}.py").read_text("utf-8")
            if module == EXERCISES[number]["module"]:
                source = without(source, functions, number)
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
        lost = {name: fault for name, fault in faults.items() if fault}
        if not lost:
            return exercise["points"], ""
        points = exercise["points"] - sum(self.points[name] for name in lost)
        return points, self.remark(lost)

    def remark(self, lost: dict[str, str]) -> str:
        """Return which points are lost, by test, and the fault that the first of these found."""
        parts = []
        for name in lost:
            _, situation = name.split(", ", 1)
            parts.append(f"{situation} {self.points[name]}")
        several = ", ".join(parts[:4])
        if len(parts) > 4:
            several += f" and {len(parts) - 4} others"
        first, *_ = lost.values()
        return f"lost: {several}; first: {first}"


def fault_in(mine: list, said: list) -> str:
    """Return what is wrong with an answer's values, without the arguments, or ""."""
    from course.exam import failure  # takes seconds
    try:
        found = failure(said, mine, [each.value for each in said])
        parts = re.split(r"\n  (?=yours |expected |arguments )", found)
        lines = [" ".join(part.split()) for part in parts[:3]]  # without the arguments
        return "; ".join(line[:140] for line in lines)
    except Exception as problem:  # the answer's process may have written anything
        return f"no values: {type(problem).__name__}"


def cell(text: object) -> str:
    """Return text that stays in its place of a table, on the screen or in a file."""
    return printable(str(text)).replace("\t", "\\t").replace("\n", "\\n")


def new_file(name: str) -> str:
    """Return the name of a file that is to be written. It must not exist: neither marks nor what
    was handed in are written over."""
    if os.path.isfile(name):
        raise ArgumentTypeError(f"{name} exists, and is not written over: name a new file")
    return name


def arguments() -> Namespace:
    """Return what the command line says."""
    parser = Parser(description="Mark submissions.")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="a submission")
    parser.add_argument("--csv", type=new_file, metavar="FILE",
                        help="write points and remarks to this new file")
    parser.add_argument("--results", type=new_file, metavar="FILE",
                        help="write those of one submission to this new file, for Gradescope")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N",
                        help="processes at a time (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=120, metavar="SECONDS",
                        help="for each process (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=EXERCISES, metavar="N", default=[*EXERCISES],
                        help="mark these exercises only (default: all)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6),
                        metavar="N", help="draws the arguments (default: others each time)")
    args = parser.parse_args()
    if args.results and len(args.folders) > 1:
        parser.error("--results is for one submission: name one FOLDER")
    if args.csv and args.results and os.path.realpath(args.csv) == os.path.realpath(args.results):
        parser.error(f"--csv and --results are one file, {args.csv}: name two")
    if not 0 < args.timeout <= 1e6:  # with others no answer runs, and all would get no points
        parser.error(f"--timeout is {args.timeout}; it must be above 0 and at most a million")
    args.only = list(dict.fromkeys(args.only))
    return args


def for_gradescope(marks: dict[str, tuple[int, str]]) -> dict:
    """Return the points and remarks of the exercises as Gradescope reads them."""
    tests = []
    for number, (points, remark) in marks.items():
        exercise = EXERCISES[number]
        tests.append({"name": f"{number}. {exercise['title']}", "score": points,
                      "max_score": exercise["points"], "output": cell(remark)[:700]})
    return {"tests": tests}


def write_marks(file: TextIO, submission: Path, marks: dict[str, tuple[int, str]],
                seed: int) -> None:
    """Write a submission's points and remarks into a row of the CSV file, and on the screen."""
    name = cell(submission)
    points = [worth for worth, _ in marks.values()]
    points.append(sum(points))
    remarks = [cell(f"{number}: {remark}")[:700]
               for number, (_, remark) in marks.items() if remark]
    if name.startswith(("=", "+", "-", "@")):  # in a spreadsheet a formula
        name = f"./{name}"
    csv.writer(file).writerow([name, *points, seed, "; ".join(remarks)])
    file.flush()
    print(*points, name, sep="\t")
    for remark in remarks:
        print(f"\t{remark}", flush=True)


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
        csv.writer(file).writerow(["submission", *numbers, "total", "seed", "remarks"])
        for submission in args.folders:
            graded = pool.map(partial(marker.grade, submission), numbers)
            graded = marker.progress(graded, cell(submission), total=len(numbers))
            marks = dict(zip(numbers, graded))
            json.dump(for_gradescope(marks), results)
            write_marks(file, submission, marks, args.seed)


if __name__ == "__main__":
    raise SystemExit(launch.exit_status(main))
