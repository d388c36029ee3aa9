"""Errors that the user can mend, what libraries say, and the lines of files that users write."""
import json
import re
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

# control characters but tab and newline; what reverses text; surrogates, and what XML forbids
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069"
                     r"\ud800-\udfff\ufffe\uffff]")
LACKS = ("out of memory", "allocate memory",  # of a GPU, of the host
         "failed to map segment", "start new thread")


class UserError(Exception):
    """Reports an error that the user can mend; one sentence says how."""


def printable(text: str) -> str:
    """Return the text with control characters escaped, so that it cannot move the cursor."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def first_line(problem: Exception) -> str:
    """Return the first line of a library's error message, and the second if the first ends in a
    colon. What is said of a Git LFS pointer, by safetensors, and of a missing key is made plain."""
    if "deserializing header" in str(problem):  # by safetensors
        return ("it holds no weights: a download that broke off, or a Git LFS pointer, of about "
                "130 bytes, for which `git lfs pull` fetches the file")
    said = "" if isinstance(problem, KeyError) else str(problem).strip()
    message = getattr(problem, "strerror", None) or said or repr(problem)
    first, *others = [line.strip() for line in message.splitlines()]
    return f"{first} {others[0]}" if first.endswith(":") and others else first


def lacks_memory(problem: Exception) -> bool:
    """Return whether an exception means that memory is too small, of the host or of a GPU."""
    return isinstance(problem, MemoryError) or any(sign in str(problem) for sign in LACKS)


def not_finite(whose: str, dtype: object) -> UserError:
    """Return the error that `whose` numbers, such as "the draft's q", are infinite or NaN."""
    return UserError(f"{whose} are infinite or not numbers in {dtype}: a file is damaged, or they "
                     "are too large for float16, but not for --dtype float32 or bfloat16")


@contextmanager
def reported_as(sentence: str, exceptions: type | tuple = Exception) -> Iterator[None]:
    """Report an exception in the block as a `UserError`: the sentence, and the first line of what
    the library says. By default `exceptions` are all, since damaged files and foreign models raise
    what they please. Lack of memory stays as it is."""
    try:
        yield
    except exceptions as problem:
        if lacks_memory(problem):
            raise
        raise UserError(f"{sentence}: {first_line(problem)}") from problem


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
