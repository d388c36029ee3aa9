"""The assignment: the program with the bodies of the exercises' functions taken out.

    python -m course.handout FOLDER                 all exercises (SHEET.md)
    python -m course.handout FOLDER --only 4        one (or more), the rest is whole
    python -m course.handout FOLDER --solutions     all of it, with the proofs: for afterwards

A function keeps its signature and its docstring; its body becomes `raise NotImplementedError`. It
is found by its name: the program carries no marks of this. What would show a solution is kept back
till afterwards: the program's own tests plant mistakes in lines that they quote, README and figures
tell what the laboratory is to predict, and this folder's tests hold solutions.
"""
import argparse
import ast
import shutil
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GIVEN = ("LICENSE", "README.md", "requirements.txt", "sampling.py", "cache.py", "target_worker.py",
         "draft_worker.py", "saguaro.py", "bench.py", "test_equivalence.py", "runtime/*.py",
         "figures/*", "tiny/*", "tiny/*/*", "course/explain.py", "course/SHEET.md",
         "course/grading.py")
AFTERWARDS = ("README.md", "test_*.py", "*.svg")
RENAMED = {"course/SHEET.md": "SHEET.md", "course/grading.py": "test_exercises.py"}
EXERCISES = {  # the title, and the functions: module.function or module.Class.function
    1: ("accept and residual", "sampling.acceptance_probability", "sampling.residual"),
    2: ("lossless verification of a batch", "sampling.verify"),
    3: ("Definition 14, Saguaro sampling", "sampling.saguaro_distribution",
        "sampling.Warping.draw"),
    4: ("Theorem 12", "cache.acceptance_distribution", "cache.geometric_fan_out"),
    5: ("Definitions 4 and 10", "cache.likely_outcomes", "cache.matches",
        "cache.SpeculationCache.look_up"),
    6: ("Theorem 7, Corollary 16, Theorem 17", "cache.expected_tokens", "cache.throughput",
        "cache.critical_batch_size"),
    7: ("tree attention", "draft_worker.tree_layout", "draft_worker.tree_pass"),
    8: ("Algorithm 1", "draft_worker.DraftWorker.speculate",
        "draft_worker.DraftWorker.pre_speculate", "saguaro.serve")}


def replaced(source: str, name: str, body: str) -> str:
    """The source of a module with another body for the function `name` (or `Class.function`), below
    its docstring, which it must have."""
    node, lines = ast.parse(source), source.splitlines()
    for part in name.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    docstring = node.body[0]
    new = textwrap.indent(body.strip("\n"), " " * docstring.col_offset)
    return "\n".join([*lines[:docstring.end_lineno], new, *lines[node.end_lineno:]]) + "\n"


def missing(number: int) -> str:
    """What a student finds in place of a body."""
    return f'raise NotImplementedError("exercise {number}: {EXERCISES[number][0]}")'


def write(folder: Path, numbers: list[int]) -> None:
    """A copy of the program in `folder`, without the bodies of the exercises `numbers`; if there
    are none, all of it."""
    for file in (file for pattern in GIVEN for file in sorted(ROOT.glob(pattern))):
        place = file.relative_to(ROOT).as_posix()
        if file.is_file() and not (numbers and any(map(file.match, AFTERWARDS))):
            copy = folder / RENAMED.get(place, place)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    for number in numbers:
        for module, name in (function.split(".", 1) for function in EXERCISES[number][1:]):
            file = folder / f"{module}.py"
            file.write_text(replaced(file.read_text("utf-8"), name, missing(number)), "utf-8")
    (folder / ".pytest.ini").write_text(
        "[pytest]\npythonpath = .\naddopts = --tb=short\n"
        "filterwarnings = ignore::pytest.PytestUnknownMarkWarning\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the assignment as a folder to hand out.")
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet, or is empty")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", type=int, nargs="+", choices=EXERCISES, metavar="N",
                       help="take out these exercises only (default: all)")
    which.add_argument("--solutions", action="store_true",
                       help="take out nothing, and add the proofs: to hand out afterwards")
    s = parser.parse_args()
    if s.folder.exists() and (not s.folder.is_dir() or any(s.folder.iterdir())):
        parser.exit(2, f"handout.py: error: {s.folder} is there: name a new or an empty folder\n")
    numbers = [] if s.solutions else sorted(set(s.only or EXERCISES))
    write(s.folder, numbers)
    print(f"{s.folder}: exercises {', '.join(map(str, numbers)) or 'solved'}; read SHEET.md there")


if __name__ == "__main__":
    main()
