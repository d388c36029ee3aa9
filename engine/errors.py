"""Errors that the user can mend, and what libraries say."""
import logging
import re
from contextlib import contextmanager, suppress
from typing import Iterator

# all but tab and newline; what turns text around; half characters, and others not for XML
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069"
                     r"\ud800-\udfff\ufffe\uffff]")
BOLD = re.compile("\x1b\\[[0-9;]*m")  # and colours
LACKS = ("out of memory", "allocate memory",  # of a GPU, of the host
         "failed to map segment", "start new thread")
NO_WEIGHTS = ("it holds no weights: a download that broke off, or a Git LFS pointer, of about 130 "
              "bytes, for which `git lfs pull` fetches the file")
MEANINGS = {  # of what libraries say
    "byte 0x8b in position 1:": "it is compressed; unpack it, as by gunzip",
    "codec can't decode": "it is no text in UTF-8; save it as UTF-8",
    "trust_remote_code": "it needs code of its own, which is not run here",
    "deserializing header": NO_WEIGHTS, "Unsupported operand 118": NO_WEIGHTS}  # v of version


class UserError(Exception):
    """Reports an error that the user can mend; one sentence says how."""


def printable(text: str) -> str:
    """Return the text with control characters escaped, so that it cannot move the cursor."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def printable_record(name: str, *given, **more) -> logging.LogRecord:
    """Make a record of what is logged. Transformers logs strangers' words: the name of a weight."""
    record = make_record(name, *given, **more)
    if name.startswith(("transformers", "huggingface_hub")):
        with suppress(Exception):  # whoever prints it says what is wrong with it
            record.msg, record.args = printable(BOLD.sub("", record.getMessage())), ()
    return record


make_record = logging.getLogRecordFactory()
logging.setLogRecordFactory(printable_record)


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
    """Return the error that `whose` numbers, such as "the draft's q", are infinite or NaN."""
    wide = str(dtype) in ("torch.float32", "torch.float64")
    cause = "" if wide else "--dtype float32 or bfloat16 has room for larger ones, or "
    return UserError(f"{whose} are infinite or not numbers in {dtype}: {cause}a file is damaged")


@contextmanager
def reported_as(sentence: str, exceptions: type | tuple = Exception) -> Iterator[None]:
    """Report an exception in the block as a `UserError`: the sentence, and the first line of what
    the library says. By default `exceptions` are all, since damaged files and foreign models raise
    what they please. Panics of libraries in Rust always are. Lack of memory stays as it is."""
    try:
        yield
    except BaseException as problem:
        ours = isinstance(problem, exceptions) or type(problem).__name__ == "PanicException"
        if lacks_memory(problem) or not ours:
            raise
        raise UserError(f"{sentence}: {first_line(problem)}") from problem
