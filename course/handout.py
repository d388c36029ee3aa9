"""The assignment: the program with the bodies of the exercises' functions taken out.

    python -m course.handout FOLDER --only 4 8b       (without --only all exercises of SHEET.md)

A function keeps its signature and its docstring, in which a pointer to the paper replaces the
formula; its body becomes `raise NotImplementedError`. handout.toml lists the exercises, these
docstrings, and the files; those that would show a solution are kept back till afterwards.
"""
import ast
import json
import re
import shutil
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Iterable

from cli import launch
from cli.settings import ROOT, Parser
from engine.errors import reported_as

CONTENTS = tomllib.loads((ROOT / "course/handout.toml").read_text("utf-8"))
EXERCISES = CONTENTS["exercises"]  # by number: title, points, module, functions


def missing(number: str) -> str:
    """Return the line that a student finds in place of a body."""
    return f'raise NotImplementedError("exercise {number}: {EXERCISES[number]["title"]}")'


def replaced(source: str, function: str, body: str) -> str:
    """Return the source of a module with another body for a function, or for `Class.function`."""
    node = ast.parse(source)
    for name in function.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == name)
    docstring = node.body[0]
    lines = source.splitlines()
    body = textwrap.indent(body.strip("\n"), " " * docstring.col_offset)
    lines[docstring.end_lineno:node.end_lineno] = [body]
    return "\n".join(lines) + "\n"


def without(source: str, functions: Iterable[str], number: str) -> str:
    """Return the source of a module without the bodies of these functions of an exercise."""
    for function in functions:
        source = replaced(source, function, missing(number))
    return source


def sheet(text: str, numbers: list[str]) -> str:
    """Return SHEET.md with the table's rows, the hints and the points of these exercises alone."""
    points = sum(EXERCISES[number]["points"] for number in numbers)
    for other in EXERCISES.keys() - numbers:
        text = re.sub(rf"^(\| {other} \||- {other}\.) .*\n(  .*\n)*", "", text, flags=re.MULTILINE)
    return text.replace("100 points", f"{points} points")


def linked(text: str, folder: Path) -> str:
    """Return a document in `folder` with the new names of what is renamed. Links to files that are
    not handed out become plain words."""
    for old, new in CONTENTS["renamed"].items():
        text = text.replace(old, new)

    def kept(link: re.Match) -> str:
        return link[0] if (folder / link["file"]).exists() else link["words"]
    return re.sub(r"\[(?P<words>[^]]*)\]\((?!\w+:)(?P<file>[^)#]+)[^)]*\)", kept, text)


def files_of(part: str) -> set[str]:
    """Return the files that the patterns in this part of handout.toml stand for."""
    found = set()
    for pattern in CONTENTS[part]:
        found |= {file.relative_to(ROOT).as_posix() for file in ROOT.glob(pattern)}
    return found


def write_program(folder: Path, numbers: list[str]) -> None:
    """Write the program into `folder`, without the bodies of the exercises `numbers`, or if there
    are none, with what is given out afterwards. Raises `ValueError` if handout.toml misquotes a
    docstring."""
    files = files_of("files")
    later = files_of("afterwards")
    for file in files - later if numbers else files | later:
        copy = folder / CONTENTS["renamed"].get(file, file)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, copy)
    for change in CONTENTS["docstring"] if numbers else []:
        file = folder / f"{change['module']}.py"
        source = file.read_text("utf-8")
        start = source.index(change["from"])
        end = source.index(change["to"], start + 1)
        file.write_text(source[:start] + change["text"] + source[end:], "utf-8")
    for number in numbers:
        exercise = EXERCISES[number]
        file = folder / f"{exercise['module']}.py"
        source = without(file.read_text("utf-8"), exercise["functions"], number)
        file.write_text(source, "utf-8")
    file = folder / "SHEET.md"
    text = sheet(file.read_text("utf-8"), numbers or [*EXERCISES])
    file.write_text(text, "utf-8")
    for document in folder.rglob("*.md"):
        document.write_text(linked(document.read_text("utf-8"), document.parent), "utf-8")


def expected() -> dict[str, list]:
    """Return what the solution says in the tests of the hand-out. Raises `UserError` if it fails
    there."""
    from course import grading  # takes seconds
    return {name: grading.expected(name) for name in grading.TESTS}


def main() -> None:
    parser = Parser(description="Write the assignment as a folder to hand out.")
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet, or is empty")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", choices=EXERCISES, metavar="N", default=[*EXERCISES],
                       help="take out these exercises only (default: all)")
    which.add_argument("--solutions", action="store_const", dest="only", const=[],
                       help="take out nothing, and add the proofs: to hand out afterwards")
    args = parser.parse_args()
    numbers = list(dict.fromkeys(args.only))
    with reported_as(f"FOLDER '{args.folder}'", OSError):
        if args.folder.exists() and any(args.folder.iterdir()):
            raise OSError("it is not empty; name a new or empty folder")
        said = json.dumps(expected() if numbers else {})
        write_program(args.folder, numbers)
        if numbers:
            (args.folder / "expected.json").write_text(said, "utf-8")
    sys.stdout.reconfigure(errors="backslashreplace")  # a name may not be in its encoding
    print(f"{args.folder}: exercises {', '.join(numbers) or 'solved'}; read SHEET.md there")


if __name__ == "__main__":
    raise SystemExit(launch.exit_status(main))
