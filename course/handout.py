"""The assignment: the program with the bodies of the exercises' functions taken out.

    python -m course.handout FOLDER                 all exercises (SHEET.md)
    python -m course.handout FOLDER --only 4 8a     some, the rest is whole
    python -m course.handout FOLDER --solutions     all of it, with the proofs: for afterwards

A function keeps its signature and its docstring, in which a pointer to the paper replaces the
formula (handout.toml); its body becomes `raise NotImplementedError`. What would show a solution is
kept back till afterwards: the program's own tests plant mistakes in lines that they quote, README
and figures tell what the laboratory is to predict, and this folder's tests hold solutions.
"""
import argparse
import ast
import shutil
import subprocess
import textwrap
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHANGES = tomllib.loads((ROOT / "course/handout.toml").read_text("utf-8"))
EXERCISES = CHANGES["exercises"]  # by number: title, points, functions
HAND_IN = ("sampling.py", "cache.py", "draft_worker.py", "saguaro.py")
GIVEN = (*HAND_IN, "LICENSE", "README.md", "requirements.txt", "target_worker.py", "bench.py",
         "test_equivalence.py", "runtime/*.py", "figures/*", "tiny/*", "tiny/*/*",
         "course/explain.py", "course/SHEET.md", "course/grading.py", "course/values.toml")
AFTERWARDS = ("README.md", "test_*.py", "*.svg")
RENAMED = {"course/SHEET.md": "SHEET.md", "course/grading.py": "test_exercises.py",
           "course/values.toml": "values.toml"}
PYTEST = """[pytest]
pythonpath = .
addopts = --tb=short
filterwarnings = ignore::pytest.PytestUnknownMarkWarning
faulthandler_timeout = 60
faulthandler_exit_on_timeout = true
"""


def definition(source: str, name: str) -> ast.AST:
    """The function `name` (or `Class.function`) in the source of a module."""
    node = ast.parse(source)
    for part in name.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    return node


def replaced(source: str, name: str, body: str) -> str:
    """The source of a module with another body for a function, below its docstring."""
    node = definition(source, name)
    docstring = node.body[0]
    lines = source.splitlines()
    body = textwrap.indent(body.strip("\n"), " " * docstring.col_offset)
    lines[docstring.end_lineno:node.end_lineno] = [body]
    return "\n".join(lines) + "\n"


def transplanted(source: str, name: str, donor: str) -> str:
    """The source of a module with a function as another one has it."""
    old, new = definition(source, name), definition(donor, name)
    lines = source.splitlines()
    lines[old.lineno - 1:old.end_lineno] = donor.splitlines()[new.lineno - 1:new.end_lineno]
    return "\n".join(lines) + "\n"


def missing(number: str) -> str:
    """What a student finds in place of a body."""
    return f'raise NotImplementedError("exercise {number}: {EXERCISES[number]["title"]}")'


def without(numbers: list[str], module: str, source: str) -> str:
    """A module without the bodies of these exercises. Raises `ValueError` if a docstring that is
    handed out differently is not what it was."""
    for change in CHANGES["docstring"]:
        if change["module"] == module:
            start = source.index(change["from"])
            end = source.index(change["to"], start + 1)
            source = source[:start] + change["text"] + source[end:]
    for number in numbers:
        for function in EXERCISES[number]["functions"]:
            if function.startswith(f"{module}."):
                source = replaced(source, function.split(".", 1)[1], missing(number))
    return source


def files() -> list[str]:
    """The program's files: of a git checkout only those that git knows; no caches."""
    found = [path for pattern in GIVEN for path in sorted(ROOT.glob(pattern)) if path.is_file()]
    names = [path.relative_to(ROOT).as_posix() for path in found if path.suffix != ".pyc"]
    known = set()
    if shutil.which("git"):
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
        known = set(filter(None, listing.stdout.decode().split("\0")))
    return [name for name in names if name in known or not known]


def write(folder: Path, numbers: list[str]) -> None:
    """A copy of the program in `folder`, without the bodies of the exercises `numbers`; if there
    are none, all of it."""
    for name in files():
        if not numbers or not any(map(Path(name).match, AFTERWARDS)):
            copy = folder / RENAMED.get(name, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy)
    for name in HAND_IN if numbers else ():
        source = (ROOT / name).read_text("utf-8")
        (folder / name).write_text(without(numbers, Path(name).stem, source), "utf-8")
    (folder / ".pytest.ini").write_text(PYTEST)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the assignment as a folder to hand out.")
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet, or is empty")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", choices=EXERCISES, metavar="N",
                       help="take out these exercises only (default: all)")
    which.add_argument("--solutions", action="store_true",
                       help="take out nothing, and add the proofs: to hand out afterwards")
    args = parser.parse_args()
    if args.folder.exists() and (not args.folder.is_dir() or any(args.folder.iterdir())):
        parser.exit(2, f"handout.py: error: {args.folder} is there: name a new or empty folder\n")
    numbers = [] if args.solutions else sorted(set(args.only or EXERCISES))
    write(args.folder, numbers)
    print(f"{args.folder}: exercises {', '.join(numbers) or 'solved'}; read SHEET.md there")


if __name__ == "__main__":
    main()
