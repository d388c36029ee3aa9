"""The options of bench.py and of figures.draw."""
from dataclasses import dataclass

from cli.settings import TINY, DecodingSettings, Parser, option, pace_option
from engine.errors import UserError

SWEEPS = ("timeline", "fan-out", "shape", "noise", "downweight", "residual", "batch", "frontier",
          "lookahead", "growth")


@dataclass(frozen=True)
class BenchSettings(DecodingSettings):
    """Measure AR, SD and SSD, and draw the figures. At the default pace the comparison takes 40
    minutes, and --sweep all longer. Without a pace (--pace 0 0) transformers' generate is
    compared, too, in half an hour on two cores."""

    prompts: str = option("text", str(TINY / "prompts.jsonl"),
                          "JSON Lines with a field prompt, question or text")
    max_new_tokens: int | None = option(
        "text", None, "tokens to generate for each prompt, exactly; none: 40, or 160 for the table "
        "of --pace 0 0", min=2)
    pace: tuple[float, float] = pace_option(
        None, "; none: 75.5 8.75, or off if every rank has a GPU")
    quick: bool = option("bench", False, "3 prompts, 24 tokens, one seed, no choice of K")
    sweep: tuple[str, ...] = option(
        "bench", (), f"draw figures: all (with the comparison), {', '.join(SWEEPS)}", nargs="+",
        choices=("all", *SWEEPS), metavar="NAME")
    figures: str = option("bench", "figures", "folder for the figures")
    out: str | None = option("bench", None, "write all results to this file (JSON); none: "
                             "unpaced.json for the table of --pace 0 0, unless --quick")
    predict: bool = option("bench", False, "no measurement: Theorem 7 beside logs of GPUs")

    def __post_init__(self):
        values = vars(self)  # whose attributes cannot be assigned
        values["pace_is_default"] = self.pace is None
        if self.pace_is_default:
            values["pace"] = (75.5, 8.75)
        super().__post_init__()
        if any(self.pace) and not all(self.pace):
            raise UserError("--pace: Theorem 7 needs the times of both models; give both, or 0 0")
        without_pace = not any(self.pace) and not self.sweep
        if self.max_new_tokens is None:
            values["max_new_tokens"] = 160 if without_pace else 40
        if self.quick:
            values["max_new_tokens"] = 24
        elif without_pace and not self.predict:
            values["out"] = self.out or "unpaced.json"
        if self.predict:
            values["mode"] = "ar"  # one process


def draw_again() -> None:
    """Read the command line of figures.draw, then import it, and draw."""
    parser = Parser(description="Draw figures again, from what bench.py --sweep --out has written.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="results of --out (JSON)")
    parser.add_argument("--figures", default="figures", help="folder for the figures")
    args = parser.parse_args()
    from figures.draw import figures_of
    for path in args.files:
        figures_of(path, args.figures)
