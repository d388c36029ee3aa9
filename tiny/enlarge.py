"""A checkpoint that costs what a large model costs, and writes the text of an included one.

    python -m tiny.enlarge FOLDER --hidden-size 8192 --layers 32 --intermediate-size 28672

So texts, hits and times are real on any hardware, with no download. This is the command, which is
read before PyTorch; weights.py makes the weights.
"""
from pathlib import Path

from cli.launch import exit_status
from cli.settings import Parser

WIDTHS = [128 * 4 ** j for j in range(5)]  # of both included models, 128, and of large ones


def main() -> None:
    parser = Parser(description="Write a large checkpoint that writes an included model's text.")
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--model", choices=("target", "draft"), default="target")
    parser.add_argument("--hidden-size", type=int, required=True, choices=WIDTHS)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--intermediate-size", type=int, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32", "float64"),
                        default="bfloat16")
    args = parser.parse_args()
    from tiny.weights import write_checkpoint  # here, so that --help need not wait for torch
    write_checkpoint(args)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
