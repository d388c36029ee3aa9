"""What runs with a student's code, in a process that mark.py starts: a line of JSON for each test.

It runs as `python -c`, in the answer's folder: nothing of the marker is there to be imported.
"""
import functools
import importlib.util
import json
import os
import resource
import signal
import sys
import time
from typing import TextIO


def set_limits(memory: int, timeout: float) -> None:
    """Limit this process to so many bytes, files of 64 MB, and the processor's seconds in which
    somebody waits for it."""
    seconds = 2 * round(timeout + 0.5)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**26, 2**26))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    set_limit = sys.setrecursionlimit  # millions of calls would outlive the alarm
    sys.setrecursionlimit = lambda calls: set_limit(min(calls, 10**5))


def load_tests(solved: str, program: str, module: str, put_back: list[str]):
    """Import the answer, with the solution of what is missing and of the functions `put_back`.
    Returns the module of the tests."""
    sys.path[1:1] = [solved, program]  # behind the answer's folder
    answer = importlib.import_module(module)
    spec = importlib.util.spec_from_file_location("solution", f"{solved}/{module}.py")
    solution = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(solution)
    for name in vars(solution):  # what is missing costs only the tests that ask for it
        vars(answer).setdefault(name, vars(solution)[name])
    for function in put_back:
        *owner, name = function.split(".")
        given = functools.reduce(getattr, owner, solution)
        wanted = functools.reduce(getattr, owner, answer)
        setattr(wanted, name, vars(given)[name])
    return importlib.import_module("test_exercises")


def ask_all(tests, names: list[str], seed: int, end: float, out: TextIO) -> None:
    """Ask the tests of these names, and end this process: by the time `end`, if the answer lets
    it. Each test has as long as the others, and what those before it left."""
    numbered = enumerate(names, start=1)
    begun = time.monotonic()

    def late(*_):
        signal.signal(signal.SIGALRM, still_late)
        raise TimeoutError("it was not done in time")

    def still_late(*_):  # an `except:` of the answer took the first alarm, so never return to it
        print(json.dumps(["TimeoutError: it was not done in time"]), file=out, flush=True)
        ask_the_rest()

    def ask_the_rest():
        for number, test in numbered:
            due = begun + (end - begun) * number / len(names)
            signal.signal(signal.SIGALRM, late)
            signal.setitimer(signal.ITIMER_REAL, max(due - time.monotonic(), 0.01), 1)
            try:
                said = json.dumps([each.value for each in tests.exam_of(test, seed)])
            except BaseException as problem:  # also where JSON has no such number
                said = json.dumps([f"{type(problem).__name__}: {problem}"])
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(said, file=out, flush=True)
        os._exit(0)  # whatever threads the answer left
    ask_the_rest()


def main() -> None:
    *where, names, seed, memory, timeout = json.loads(sys.argv[1])
    end = time.monotonic() + timeout
    set_limits(memory, timeout)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the answer prints is none of it
    try:
        tests = load_tests(*where)
    except BaseException as problem:
        print(json.dumps(f"{type(problem).__name__}: {problem}"), file=out, flush=True)
        os._exit(0)
    ask_all(tests, names, seed, end, out)


if __name__ == "__main__":
    main()
