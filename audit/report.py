"""Audits a file, and prints what was found."""
import argparse
import math
from typing import Iterator

import torch

from audit.evidence import ALPHA, TESTS, Finding, audit_groups, p_text, would_have_shown
from audit.replay import Text, greedy_gaps, members, warpers_of
from audit.texts import DEFAULTS, check_rows, load_target, read_rows
from engine.errors import UserError

NOTHING, FOUND, TOO_FEW = 0, 1, 3  # exit statuses
WIDTHS = (7, 7, 7, 7, 9, 10, 13, 13)  # of the columns of `TESTS`


def audit_file(args: argparse.Namespace) -> int:
    """Audit a file and print what was found. Returns the exit status."""
    of_file, rows = read_rows(args.file)
    given = {name: value for name, value in vars(args).items() if value is not None}
    trusted = [name for name in DEFAULTS if name in of_file.keys() - given.keys()]
    settings = DEFAULTS | of_file | given
    for name in ("target", "temperature"):
        if settings[name] is None:
            raise UserError(f"{args.file} has no line of settings: name --{name}")
    model, tokenizer = load_target(settings["target"], settings["dtype"], args.device)
    texts = check_rows(args.file, rows, tokenizer, model.config.get_text_config())
    title = ", ".join(f"{name} {settings[name]}" for name in DEFAULTS)
    title += f", {model.dtype}, {len(texts)} texts"
    if trusted:
        flags = ", --".join(trusted).replace("_", "-")
        title += f"; as the file says, unless you name --{flags}"
    say(title)
    if settings["temperature"] == 0:
        return report_greedy(texts, greedy_gaps(model, texts, args.batch_size))
    warpers = warpers_of(settings["temperature"], settings["top_k"], settings["top_p"])
    findings = audit_groups(model, texts, warpers, args.batch_size)
    return report(findings, texts, model.generation_config.eos_token_id)


def say(*lines: str) -> None:
    """Print lines at once. They hold what others wrote: what is not printable in them is escaped,
    line ends included."""
    for line in lines:
        shown = [letter if letter.isprintable() else repr(letter)[1:-1] for letter in line]
        print("".join(shown), flush=True)


def report(findings: dict[str, Finding], texts: list[Text], eos: int | list[int] | None) -> int:
    """Print what was found, and what would have shown. `eos` are the target's end-of-sequence
    tokens. Returns the exit status."""
    print_table(findings)
    whole = findings["all"]
    found = significant(findings)
    if whole.near_ties:
        say(f"{whole.near_ties:,} tokens are outside top-k or top-p by no more than rounding: "
            "they count as the last ones inside.")
    if found:
        more = " ..." if len(found) > 4 else ""
        say("FOUND: these texts are not distributed as the target's: "
            f"{'; '.join([*found][:4])}{more}.")
        say(*likely_causes(whole, set(found.values()), texts, eos))
    elif math.isnan(whole.p_values["bins"]):
        say(f"Too few to tell: {whole.tokens:,} tokens, and the bins need 400.")
        return TOO_FEW
    else:
        say(f"Nothing found: all p-values are above {ALPHA:g}. In {whole.tokens:,} tokens the bins "
            f"would have shown a bias of {would_have_shown(whole.tokens):.1%}",
            "towards likelier or less likely tokens. Biases that cancel there may be larger.")
    say("A correct program is called wrong with probability below "
        f"{2 * len(findings) * len(TESTS) * ALPHA:.0e}.")
    return FOUND if found else NOTHING


def print_table(findings: dict[str, Finding]) -> None:
    width = max(map(len, findings))
    titles = "".join(map(str.rjust, TESTS, WIDTHS))
    say("", f"{'':{width}}    tokens{titles}  show")
    for name, finding in findings.items():
        cells = ""
        for test, test_width in zip(TESTS, WIDTHS):
            cell = p_text(finding.p_values[test])
            if test in ("argmax", "log p"):
                cell = f"{finding.deviations[test]:+.1f}{cell:>7}"
            cells += cell.rjust(test_width)
        say(f"{name:{width}}{finding.tokens:10,}{cells}{would_have_shown(finding.tokens):6.0%}")
    say("", "p-values; argmax and log p also in standard deviations from what the target expects;",
        "-: too few tokens to tell; show: the bins see a bias from this total variation on")


def significant(findings: dict[str, Finding]) -> dict[str, str]:
    """Return what is significant, in words, with the name of the test that has found it."""
    found = {}
    impossible = findings["all"].impossible
    if impossible:
        found[f"{impossible:,} tokens are impossible (probability 0)"] = "possible"
    for name, finding in findings.items():
        where = "" if name == "all" else f", {name}"
        for test, p in finding.p_values.items():
            if p < ALPHA:
                found[f"p = {p_text(p)} ({test}{where})"] = test
    return found


def likely_causes(whole: Finding, failed: set, texts: list[Text], eos) -> Iterator[str]:
    """Yield what else than the engine may explain that these tests `failed`."""
    if whole.nats < -1 or 10 * whole.impossible > whole.tokens:
        yield ("They are far less likely than the target's own: another tokenizer, checkpoint or "
               "prompt?")
    different = {(*text.prompt, None, *text.tokens) for text in texts}
    repeated = len(texts) - len(different)
    if 10 * repeated > len(texts):
        yield f"{repeated:,} of {len(texts):,} texts repeat another: had each a seed of its own?"
    ends = set(eos) if isinstance(eos, list) else {eos}
    unended = all(ends.isdisjoint([None, *text.tokens]) for text in texts)
    if unended and failed <= {"ids", "next id"}:
        yield "No text holds an end-of-sequence token: do texts lack the token that ended them?"


def report_greedy(texts: list[Text], gaps: torch.Tensor) -> int:
    """Report how many tokens of greedy texts are the argmax, and how far the others' logits are
    from the largest. Returns the exit status: is any farther than rounding explains?"""
    groups = members(texts)
    width = max(map(len, groups))
    say("", f"{'':{width}}    tokens   argmax  near-ties  faults  largest gap of logits")
    gap, rounding = gaps.T
    faulty = gap > rounding
    for name, chosen in groups.items():
        tokens = int(chosen.sum())
        others = int((gap[chosen] > 0).sum())
        faults = int(faulty[chosen].sum())
        say(f"{name:{width}}{tokens:10,} {1 - others / tokens:8.3%} "
            f"{others - faults:10,} {faults:7,}  {gap[chosen].max():.3g}")
    if not faulty.any():
        say("Nothing found: every token is the target's argmax, or as good as that by rounding.")
        return NOTHING
    say(f"FOUND: {int(faulty.sum()):,} tokens are farther from the target's argmax than rounding "
        "takes.")
    return FOUND
