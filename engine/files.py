"""JSON Lines files, which users write: prompts, and texts for the audit."""
import json
from pathlib import Path
from typing import Iterator

from engine.errors import reported_as


def read_json_lines(name: str, path: str) -> Iterator[tuple[int, dict]]:
    """Yield the objects of a JSON Lines file, each with the number of its line. Raises
    `UserError`, with the `name` of the file, if it cannot be read."""
    with reported_as(name, (OSError, ValueError)):
        lines = Path(path).read_text("utf-8-sig").split("\n")  # U+2028 ends no line
    for number, line in enumerate(lines, start=1):
        if line.strip():
            with reported_as(f"{name}, line {number}: not a JSON object",
                             (ValueError, RecursionError)):
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"it is a {type(row).__name__}")
            yield number, row
