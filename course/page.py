"""A page of one text, decoded by AR, SD and SSD: one HTML file, for any browser; and their race.

    python -m course.page --out docs/index.html     (the page of this repository, and docs/race.svg)

docs/index.html is the template, too: its scripts draw whatever trace stands in its one long line.

All ranks decode the text at --pace, for its times; then one process does, for what slow motion sees
of a round. K, budget and temperature are those of the comparison in figures/results.json.
"""
if __name__ == "__main__":  # before the imports below, which take seconds
    from cli.launch import launch
    from course.options import PageSettings
    launch(PageSettings, "course.page")  # parses, starts rank 1, and calls `main`

import json
import re
import time
from itertools import islice
from pathlib import Path

from bench import Bench, Point
from cli.launch import is_rank_0
from cli.settings import ROOT, open_for_writing
from course.explain import Narrator
from course.options import PageSettings
from course.race import race
from engine.errors import UserError
from run.assist import decode_as_asked
from run.decoder import warm_up
from run.placement import gather
from run.text import text_pieces
from saguaro import Sequences

TRACE = r'(?<=<script id="trace" type="application/json">).*(?=</script>)'  # one long line


def check_pace(kept: float | None) -> None:
    """Raise `UserError` if more than 2% of the passes were late; None: there was no pace."""
    if kept is not None and kept < 0.98:
        raise UserError(f"{kept:.0%} of the passes kept --pace; a page needs 98%, so none is "
                        "written: let nothing else run meanwhile, or choose a slower pace")


def timed(bench: Bench, line: dict) -> dict:
    """Decode as for this line of the comparison. Returns rounds and spans, in seconds."""
    text = bench.prompts[:1]
    settings = bench.settings_of(Point("", 0, line["with"]))
    decoder = bench.decoder(settings, False, text)
    rounds = []
    warm_up(settings, decoder.models, text)
    decoder(text, lambda row, new, source: rounds.append(
        {"time": time.perf_counter(), "new": new, "source": source}))
    check_pace(decoder.stats.pace_kept())
    spans = [(span.work, span.start, span.end) for span in decoder.stats.spans]
    return {"launch": line, "rounds": rounds, "spans": spans}


def tokens_of(run: dict) -> list[int]:
    """Return the tokens that a run has decoded."""
    return sum((decoded["new"] for decoded in run["rounds"]), [])


def look_inside(bench: Bench, run: dict) -> None:
    """Decode again, and add to each round what was seen. Raises `UserError` for another text."""
    settings = bench.settings_of(Point("", 0, run["launch"]["with"]))
    context = bench.sd_models.context
    # the text ends where `Bench` ends it; beyond that there is room for what the last round drafts
    sequences = Sequences(bench.prompts[:1], settings.max_new_tokens, context, [], context)
    bench.sd_models.set_pace((0.0, 0.0))
    narrator = Narrator(settings, bench.sd_models, sequences, bench.job.tokenizer)
    seen = [rows[0].brief() for rows in narrator.decode()]
    if sequences.new_tokens[0] != tokens_of(run):
        raise UserError("the same settings gave two texts, so no page is written")
    for decoded, inside in zip(run["rounds"], seen):
        decoded |= inside


def main(settings: PageSettings) -> None:
    out = Path(settings.out)
    if is_rank_0():  # refuse at once what could not be written
        for file in (out, out.parent / "race.svg"):
            open_for_writing("--out", str(file), "a").close()
    bench = Bench(settings)
    if not bench.leads:
        return decode_as_asked(bench.models)
    lines = json.loads((ROOT / "figures/results.json").read_text("utf-8"))["results"]
    runs = [timed(bench, line) for line in lines
            if line["sweep"] == "comparison" and line["name"] in ("AR", "SD", "SSD")]
    tokenizer = bench.job.tokenizer
    for run in runs:
        pieces = iter(text_pieces(tokenizer, bench.prompts[0], tokens_of(run)))
        for decoded in run["rounds"]:
            decoded["text"] = list(islice(pieces, len(decoded["new"])))
        if run["launch"]["lookahead"]:
            look_inside(bench, run)
    gather(None)  # lets rank 1 go
    trace = {"pace": settings.pace, "prompt": bench.job.texts[0], "runs": runs,
             "words": tokenizer.batch_decode([[token] for token in range(len(tokenizer))]),
             "logs": json.loads((ROOT / "figures/logs.json").read_text("utf-8"))}
    write_page(trace, out)


def write_page(trace: dict, out: Path) -> None:
    """Write the page, and beside it the race. Their templates are read before, because they may be
    these very files."""
    data = json.dumps(trace, separators=(",", ":")).replace("<", "\\u003c")
    template = (ROOT / "docs/index.html").read_text("utf-8")
    before, after = re.split(TRACE, template)
    texts = {out: before + data + after, out.with_name("race.svg"): race(trace)}
    for file, text in texts.items():
        with open_for_writing("--out", str(file)) as written:
            written.write(text)
