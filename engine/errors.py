"""Errors that the user can mend."""
from contextlib import contextmanager
from typing import Iterator

LACKS = ("out of memory", "allocate memory")  # of a GPU, of the host
NO_WEIGHTS = ("it holds no weights: a download that broke off, or a Git LFS pointer, of about 130 "
              "bytes, for which `git lfs pull` fetches the file")
MEANINGS = {  # of what libraries say
    "codec can't decode": "it is no text in UTF-8; save it as UTF-8",
    "trust_remote_code": "it needs code of its own, which is not run here",
    "deserializing header": NO_WEIGHTS, "Unsupported operand 118": NO_WEIGHTS}  # v of version


class UserError(Exception):
    """Reports an error that the user can mend; one sentence says how."""


def first_line(problem: Exception) -> str:
    """Return the first line of a library's error message, and the second if the first ends in a
    colon. Where the message would not help here, return what it means."""
    if isinstance(problem, UnicodeEncodeError) and problem.encoding == "utf-8":
        return f"half a character at place {problem.start + 1}"
    for sign, meaning in MEANINGS.items():
        if sign in str(problem):
            return meaning
    message = getattr(problem, "strerror", None) or str(problem).strip() or repr(problem)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])


def lacks_memory(problem: Exception) -> bool:
    """Return whether an exception means that memory is too small, of the host or of a GPU."""
    return isinstance(problem, MemoryError) or any(sign in str(problem) for sign in LACKS)


def not_finite(whose: str, dtype: object) -> UserError:
    """Return the error that numbers of a `torch.dtype` are infinite or NaN. `whose`: "the target's
    logits"."""
    wide = str(dtype) in ("torch.float32", "torch.float64")
    cause = "" if wide else "--dtype float32 or bfloat16 has room for larger ones, or "
    return UserError(f"{whose} are infinite or not numbers in {dtype}: {cause}a file is damaged")


@contextmanager
def reported_as(sentence: str, exceptions: type | tuple = Exception) -> Iterator[None]:
    """Report an exception in the block as a `UserError`: the sentence, and the first line of what
    the library says. `exceptions` is a class of exceptions or a tuple of them, as in `except`. By
    default it is all, because damaged files and foreign models raise what they please. If memory is
    too small, the exception stays as it is."""
    try:
        yield
    except exceptions as problem:
        if lacks_memory(problem):
            raise
        raise UserError(f"{sentence}: {first_line(problem)}") from problem
