"""How tables are printed, from rows of metrics by their names."""
from typing import Any

from run.screen import KEPT, TOO_SLOW

COLUMNS = {  # how they are headed
    "lookahead": "K", "budget": "budget", "top_p": "top-p", "tokens/s": "tokens/s",
    "standard error": "+-", "tokens_per_round": "a round", "acceptance_rate": "a",
    "hit_rate": "hits",
    "T_v in ms": "T_v", "T_v alone": "alone", "T_p": "T_p", "T_b": "T_b",
    "verifier_utilisation": "util", "measured / Theorem 7": "/ Thm 7", "pace_kept": "kept"}


def print_table(title: str, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    """Print a table with columns as wide as they must be, and names flush left."""
    names = ("name", *columns)
    lines = [["", *[COLUMNS.get(name, name) for name in columns]]]
    for row in rows:
        lines.append([cell(row.get(name)) for name in names])
    widest, *widths = [max(map(len, column)) for column in zip(*lines)]
    print(f"\n{title}", flush=True)
    for first, *others in lines:
        padded = map(str.rjust, others, widths)
        print("", first.ljust(widest), *padded)
    kept = [row["pace_kept"] for row in rows if row.get("pace_kept") is not None]
    if kept and min(kept) < KEPT:
        print(TOO_SLOW)


def cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)
