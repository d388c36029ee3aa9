"""Audit the texts of any engine: is their distribution the target's?

    python -m audit FILE --target NAME --temperature T        (docs/PORTING.md says more)

FILE is JSON Lines. Each line is a text: prompt_tokens, tokens, and if you like group, one entry a
token. Instead of prompt_tokens there may be prompt, which the target's tokenizer must turn into the
very ids that the engine read. The first line may be {"settings": {...}}, as saguaro.py --output
writes it; flags override it.

The file must hold whole texts, each with the token that ended it, such as the end-of-sequence
token; all that were drawn, those that were slow, too; and each must have been drawn with a seed of
its own. Else exact engines fail, too. Name the type in which the engine computed: rounding is a
bias, too.

Exit status: 0 nothing found, 1 found, 2 a bad file or a failure, 3 too few tokens to tell.
"""
import argparse
import math
import os
import sys
from contextlib import suppress

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from audit.evidence import ALPHA, TESTS, Finding, audit_groups, p_text, would_have_shown
from audit.replay import Text, greedy_gaps, members, warpers_of
from engine.errors import UserError, first_line, read_json_lines, reported_as

DEFAULTS = dict(target=None, temperature=None, top_k=0, top_p=1.0, dtype="auto")
NOTHING, FOUND, FAILED, TOO_FEW = range(4)  # exit statuses


def audit_parser() -> argparse.ArgumentParser:
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
    return parser


def audit_file(args: argparse.Namespace) -> int:
    """Audit a file and print what was found. Returns the exit status."""
    settings, rows = read_texts(args.file)
    given = {name: value for name, value in vars(args).items() if value is not None}
    trusted = [name for name in DEFAULTS if name in settings.keys() - given.keys()]
    settings = DEFAULTS | settings | given
    for name in ("target", "temperature"):
        if settings[name] is None:
            raise UserError(f"{args.file} has no line of settings: name --{name}")
    model, tokenizer = load_target(settings["target"], settings["dtype"], args.device)
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or math.inf
    texts = []
    for number, row in rows:
        with reported_as(f"{args.file}, line {number}", UserError):
            texts.append(check_text(row, tokenizer, config.vocab_size, context))
    texts = [text for text in texts if text.tokens]
    if not texts:
        raise UserError(f"{args.file} holds no tokens")
    texts.sort(key=lambda text: -len(text.prompt + text.tokens))  # little padding in a batch
    said = ", ".join(f"{name} {settings[name]}" for name in DEFAULTS)
    said += f", {model.dtype}, {len(texts)} texts"
    if trusted:
        flags = ", --".join(trusted).replace("_", "-")
        said += f"; as the file says, unless you name --{flags}"
    say(said)
    if settings["temperature"] == 0:
        return report_greedy(texts, greedy_gaps(model, texts, args.batch_size))
    warpers = warpers_of(*(settings[name] for name in ("temperature", "top_k", "top_p")))
    findings = audit_groups(model, texts, warpers, args.batch_size)
    return show(findings, texts, model.generation_config.eos_token_id)


def read_texts(path: str) -> tuple[dict, list[tuple[int, dict]]]:
    """Read the settings of the first line, if it holds any, and the lines with texts, numbered."""
    settings = {}
    texts = []
    for number, row in read_json_lines(path, path):
        if "tokens" in row and row.keys() & {"settings", "statistics"}:
            raise UserError(f"{path}, line {number}: a text, and settings or statistics: these "
                            "have lines of their own")
        if isinstance(row.get("settings"), dict):
            above, here = DEFAULTS | settings, DEFAULTS | row["settings"]
            differ = [name for name in DEFAULTS if settings and here[name] != above[name]]
            if differ:
                raise UserError(f"{path}, line {number}: another {', '.join(differ)} than in the "
                                "settings above: audit these texts apart")
            settings = row["settings"]
        elif "statistics" not in row:
            texts.append((number, row))
    return settings, texts


def check_text(row: dict, tokenizer, vocab_size: int, context: float) -> Text:
    """Return a line as a `Text`. Raises `UserError`, which says what is wrong with it."""
    prompt = row.get("prompt_tokens")
    if prompt is None and isinstance(row.get("prompt"), str):
        if tokenizer is None:
            raise UserError("a prompt in letters, and the target has no tokenizer: write the "
                            "token ids that the engine read, as prompt_tokens")
        with reported_as("the tokenizer cannot read it", TypeError):  # half a character
            prompt = tokenizer(row["prompt"])["input_ids"]
    tokens = row.get("tokens")
    group = row.get("group") or []
    for name, ids in (("prompt_tokens (or prompt)", prompt), ("tokens", tokens)):
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise UserError(f"no list of token ids called {name}")
        outside = [token for token in ids if not 0 <= token < vocab_size]
        if outside:
            raise UserError(f"{name} holds the id {outside[0]}, and the target's vocabulary has "
                            f"{vocab_size}: another model's tokenizer?")
    if not prompt:
        raise UserError("an empty prompt: nothing says how likely the first token was; give at "
                        "least the token with which the engine began")
    if len(prompt + tokens) > context:
        raise UserError(f"{len(prompt + tokens)} tokens, and the target's context is {context}")
    if not isinstance(group, list) or "all" in group:
        raise UserError("group must be a list, one entry a token, and none called all, the whole")
    if group and len(group) != len(tokens):
        raise UserError(f"{len(tokens)} tokens and {len(group)} entries of group")
    return Text(prompt, tokens, [str(name) for name in group] or [""] * len(tokens))


def load_target(path: str, dtype: str, device: str):
    """Load the model, and its tokenizer if it has one."""
    if dtype == "auto":
        dtype = "bfloat16" if device != "cpu" and torch.cuda.is_available() else "float32"
    logging.set_tqdm_hook(lambda _, bar, __: logging.EmptyTqdm(*bar))  # downloads keep theirs
    with reported_as(f"--target {path}"):
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), device_map=device, output_loading_info=True,
            trust_remote_code=False)
        if info["missing_keys"]:  # drawn at random: then every engine would be accused
            raise ValueError(f"its files lack {min(info['missing_keys'])}")
    tokenizer = None
    with suppress(Exception):  # only prompts in letters need one
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    return model.eval(), tokenizer


def say(*lines: str, file=None) -> None:
    """Print lines at once. They hold what others wrote: what is not printable in them is escaped,
    line ends included."""
    for line in lines:
        print("".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line),
              file=file, flush=True)


def show(findings: dict[str, Finding], texts: list[Text], eos: int | list[int] | None) -> int:
    """Print what was found, and what would have shown. `eos` are the target's end-of-sequence
    tokens. Returns the exit status."""
    width = max(map(len, findings))
    say("", f"{'':{width}}    tokens   bins  pairs  place    ids  next id  next nth       argmax"
        "        log p  show")
    for name, finding in findings.items():
        p = {test: p_text(finding.p_values[test]) for test in TESTS}
        argmax, log_p = (f"{finding.deviations[test]:+.1f}" for test in ("argmax", "log p"))
        say(f"{name:{width}}{finding.tokens:10,}{p['bins']:>7}{p['pairs']:>7}{p['place']:>7}"
            f"{p['ids']:>7}{p['next id']:>9}{p['next nth']:>10}{argmax:>6}{p['argmax']:>7}"
            f"{log_p:>6}{p['log p']:>7}{would_have_shown(finding.tokens):6.0%}")
    say("", "p-values; argmax and log p also in standard deviations from what the target expects;",
        "-: too few tokens to tell; show: the bins see a bias from this total variation on")
    whole = findings["all"]
    impossible = f"{whole.impossible:,} tokens are impossible (probability 0)"
    found = {impossible: "possible"} if whole.impossible else {}
    found |= {f"p = {p_text(p)} ({test}{'' if name == 'all' else ', ' + name})": test
              for name, finding in findings.items()
              for test, p in finding.p_values.items() if p < ALPHA}
    if whole.near_ties:
        say(f"{whole.near_ties:,} tokens are outside top-k or top-p by no more than rounding: "
            "they count as the last ones inside.")
    if found:
        say(f"FOUND: these texts are not distributed as the target's: {'; '.join([*found][:4])}"
            f"{' ...' if len(found) > 4 else ''}.")
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


def likely_causes(whole: Finding, failed: set, texts: list[Text], eos) -> list[str]:
    """Return what else than the engine may explain that these tests `failed`."""
    repeated = len(texts) - len({(*text.prompt, None, *text.tokens) for text in texts})
    ends = set(eos if isinstance(eos, list) else [eos])
    unended = all(ends.isdisjoint([None, *text.tokens]) for text in texts)
    causes = {
        "They are far less likely than the target's own: another tokenizer, checkpoint or prompt?":
            whole.nats < -1 or 10 * whole.impossible > whole.tokens,
        f"{repeated:,} of {len(texts):,} texts repeat another: had each a seed of its own?":
            10 * repeated > len(texts),
        "No text holds an end-of-sequence token: do texts lack the token that ended them?":
            unended and failed <= {"ids", "next id"}}
    return [cause for cause, applies in causes.items() if applies]


def report_greedy(texts: list[Text], gaps: torch.Tensor) -> int:
    """Report how many tokens of greedy texts are the argmax, and how far the others' logits are
    from the largest. Returns the exit status: is any farther than rounding explains?"""
    groups = members(texts)
    width = max(map(len, groups))
    say("", f"{'':{width}}    tokens   argmax  near-ties  faults  largest gap of logits")
    gap, rounding = gaps.T
    for name, chosen in groups.items():
        others = gap[chosen] > 0
        faults = int((gap > rounding)[chosen].sum())
        say(f"{name:{width}}{len(others):10,} {1 - others.double().mean():8.3%} "
            f"{int(others.sum()) - faults:10,} {faults:7,}  {gap[chosen].max():.3g}")
    faults = int((gap > rounding).sum())
    if faults:
        say(f"FOUND: {faults:,} tokens are farther from the target's argmax than rounding takes.")
    else:
        say("Nothing found: every token is the target's argmax, or as good as that by rounding.")
    return FOUND if faults else NOTHING


def main(arguments: list[str] | None = None) -> int:
    """Audit, and return the exit status. That of a failure is `FAILED`: Python's is 1, `FOUND`."""
    args = audit_parser().parse_args(arguments)
    with suppress(AttributeError):  # a closed output, or a notebook's
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return audit_file(args)
    except Exception as problem:
        prefix = "" if isinstance(problem, UserError) else f"{type(problem).__name__}: "
        with suppress(OSError):
            say(f"{prefix}{first_line(problem)}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    os._exit(main())  # all is flushed: if that fails once more, Python's exit has another status
