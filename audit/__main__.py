"""Audit the texts of any engine: is their distribution the target's?

    python -m audit FILE --target NAME --temperature T    (see docs/PORTING.md)

FILE is JSON Lines. Each line is a text: prompt_tokens, tokens, and if you like
group, one entry a token. Instead of prompt_tokens there may be prompt, which
the target's tokenizer must turn into the very ids that the engine read. The
first line may be {"settings": {...}}, as saguaro.py --output writes it; flags
override it.

The file must hold whole texts, each with the token that ended it, such as the
end-of-sequence token; all that were drawn, those that were slow, too; and each
must have been drawn with a seed of its own. Else exact engines fail, too. Name
the type in which the engine computed: rounding is a bias, too.

Exit status: 0 nothing found, 1 found, 2 a bad file or a failure, 3 too few
tokens to tell.
"""
import argparse
import os
import sys
from contextlib import suppress

from engine.errors import UserError, first_line, printable

FAILED = 2  # the exit status of a failure: Python's is 1, which means that something was found


def main(arguments: list[str] | None = None) -> int:
    """Audit, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m audit", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE", help="JSON Lines, see above")
    parser.add_argument("--target", help="folder, or name on the Hugging Face Hub")
    parser.add_argument("--temperature", type=float, help="with which the engine sampled")
    parser.add_argument("--top-k", type=int, help="0: off")
    parser.add_argument("--top-p", type=float, help="1: off")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16", "float64"),
                        help="auto: bfloat16 on GPUs, float32 on CPUs")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--batch-size", type=int, default=8, help="texts a forward pass")
    args = parser.parse_args(arguments)
    with suppress(AttributeError):  # a closed output, or a notebook's
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from audit.report import audit_file  # here, so that --help need not wait for torch
        return audit_file(args)
    except Exception as problem:
        prefix = "" if isinstance(problem, UserError) else f"{type(problem).__name__}: "
        with suppress(OSError):
            print(printable(prefix + first_line(problem)), file=sys.stderr, flush=True)
        return FAILED


if __name__ == "__main__":
    os._exit(main())  # all is flushed: if that fails once more, Python's exit has another status
