"""The options of slow motion and of the page."""
from dataclasses import dataclass

from cli.settings import DecodingSettings, option, pace_option


@dataclass(frozen=True)
class ExplainSettings(DecodingSettings):
    """Rounds of speculative speculative decoding in slow motion: one process, nothing overlaps."""
    mode = "sd"  # no option: one process holds both models

    prompt: tuple[str, ...] = option(
        "text", (), "the text to continue; several are a batch, to see section 4.3", nargs="+")
    rounds: int = option("slow motion", 3, "rounds to show after round 0, the prompt's", min=1)
    pause: bool = option("slow motion", False, "wait for Enter after each round")
    color: bool = option("slow motion", False, "colours even where the output is no terminal")


@dataclass(frozen=True)
class PageSettings(DecodingSettings):
    """Write a page that shows one text, decoded by AR, SD and SSD, with the K, budgets and
    temperatures of figures/results.json; and race.svg beside it, the greedy text as it grows."""

    prompt: tuple[str, ...] = option("text", (), "the text; none: tiny/prompt.txt", nargs=1)
    prompts: str | None = option("text", None, "a JSON Lines file, whose first text is continued")
    max_new_tokens: int = option("text", 40, "tokens to generate", min=2)
    pace: tuple[float, float] = pace_option((75.5, 8.75))
    out: str = option("page", "page.html", "the page to write", metavar="FILE")
