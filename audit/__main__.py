"""Audit the texts of any engine: is their distribution the target's?

    python -m audit FILE --target NAME --temperature T        (--help; docs/PORTING.md says more)
"""
import argparse
import json
import math
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from audit.evidence import ALPHA, TESTS, Finding, audit_groups, p_text, would_have_shown
from audit.replay import Text, greedy_gaps, members, warpers_of
from engine.errors import UserError, first_line


def audit_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m audit",
        description="Audit texts of any engine: is their distribution the target's? Exit status: 0 "
        "nothing found, 1 found, 2 a bad file.",
        epilog="The first line may be {\"settings\": {...}}, as saguaro.py --output writes it; "
        "flags override it. Name the type in which the engine computed: rounding is a bias, too.")
    parser.add_argument("file", metavar="FILE", help="JSON Lines: prompt_tokens (or "
                        "prompt, which the target's tokenizer must turn into the very ids that "
                        "the engine read), tokens, and if you like group, one entry a token")
    parser.add_argument("--target", help="folder, or name on the Hugging Face Hub")
    parser.add_argument("--temperature", type=float, help="with which the engine sampled")
    parser.add_argument("--top-k", type=int, help="0: off")
    parser.add_argument("--top-p", type=float, help="1: off")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16", "float64"),
                        help="auto: bfloat16 on GPUs, float32 on CPUs")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--batch-size", type=int, default=8, help="texts a forward pass")
    return parser


def audit_file(args: argparse.Namespace) -> bool:
    """Audit a file and print what was found. Returns whether anything was."""
    if args.batch_size < 1:
        raise UserError(f"--batch-size is {args.batch_size}; it must be at least 1")
    settings, rows = read_texts(args.file)
    settings |= {name: value for name, value in vars(args).items() if value is not None}
    for name in ("target", "temperature"):
        if settings.get(name) is None:
            raise UserError(f"{args.file} has no line of settings: name --{name}")
    model, tokenizer = load_target(settings["target"], settings.get("dtype", "auto"), args.device)
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or math.inf
    texts = []
    for number, row in rows:
        try:
            texts.append(check_text(row, tokenizer, config.vocab_size, context))
        except UserError as problem:
            raise UserError(f"{args.file}, line {number}: {problem}") from None
    texts = [text for text in texts if text.tokens]
    if not texts:
        raise UserError(f"{args.file} holds no tokens")
    texts.sort(key=lambda text: -len(text.prompt + text.tokens))  # little padding in a batch
    print(f"target {settings['target']}, temperature {settings['temperature']}, {model.dtype}, "
          f"{len(texts)} texts")
    if settings["temperature"] == 0:
        return report_greedy(texts, greedy_gaps(model, texts, args.batch_size))
    try:
        warpers = warpers_of(settings["temperature"], settings.get("top_k", 0),
                             settings.get("top_p", 1.0))
    except (ValueError, TypeError) as problem:  # transformers', which name what is wrong
        raise UserError(f"temperature, top-k or top-p: {first_line(problem)}") from problem
    return report(audit_groups(model, texts, warpers, args.batch_size))


def read_texts(path: str) -> tuple[dict, list[tuple[int, dict]]]:
    """Read the settings of the first line, if it holds any, and the lines with texts, numbered."""
    try:
        lines = Path(path).read_text("utf-8-sig").split("\n")
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise UserError(f"{path}: {reason}") from problem
    settings = {}
    texts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: not a JSON object; a text is a line such as "
                            '{"prompt_tokens": [1, 2], "tokens": [3, 4, 5]}')
        if "tokens" in row and row.keys() & {"settings", "statistics"}:
            raise UserError(f"{path}, line {number}: a text, and settings or statistics: these "
                            "have lines of their own")
        if isinstance(row.get("settings"), dict):
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
        try:
            prompt = tokenizer(row["prompt"])["input_ids"]
        except TypeError as problem:  # half a character
            raise UserError("the tokenizer cannot read the prompt "
                            f"({first_line(problem)})") from None
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
    if len(prompt) + len(tokens) > context:
        raise UserError(f"{len(prompt) + len(tokens)} tokens, and the target's context is "
                        f"{context}")
    if not isinstance(group, list) or "all" in group:
        raise UserError("group must be a list, one entry a token, and none called all, the whole")
    if group and len(group) != len(tokens):
        raise UserError(f"{len(tokens)} tokens and {len(group)} entries of group")
    return Text(prompt, tokens, [str(name) for name in group] or [""] * len(tokens))


def load_target(path: str, dtype: str, device: str):
    """Load the model, and its tokenizer if it has one."""
    if dtype == "auto":
        on_gpu = device != "cpu" and torch.cuda.is_available()
        dtype = "bfloat16" if on_gpu else "float32"
    logging.set_tqdm_hook(lambda _, bar, __: logging.EmptyTqdm(*bar))  # downloads keep theirs
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), device_map=device, trust_remote_code=False)
        if model.device.type == "meta":
            raise ValueError("on the device meta there are no weights")
    except Exception as problem:  # a damaged file raises what its reader pleases
        raise UserError(f"--target {path}: {first_line(problem)}") from problem
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception:  # only prompts in letters need one
        tokenizer = None
    return model.eval(), tokenizer


def report(findings: dict[str, Finding]) -> bool:
    """Print what was found, and what would have shown. Returns whether anything was found."""
    width = max(map(len, findings))
    print(f"\n{'':{width}}    tokens    bins   pairs   place     ids        argmax         log p"
          "  bins show")
    for name, finding in findings.items():
        p = {test: p_text(finding.p_values[test]) for test in TESTS}
        argmax, log_p = (f"{deviation:+.1f}" for deviation in finding.deviations)
        print(f"{name:{width}}{finding.tokens:10,} {p['bins']:>7} {p['pairs']:>7} {p['place']:>7}"
              f" {p['ids']:>7} {argmax:>5} {p['argmax']:>7} {log_p:>5} {p['log p']:>7}"
              f"      {would_have_shown(finding.tokens):5.1%}")
    print("\np-values; argmax and log p also in standard deviations from what the target expects; "
          "-: too few tokens\nto tell; bins show: a bias from this total-variation distance on")
    found = [f"p = {p_text(p)} ({test}{'' if name == 'all' else ', ' + name})"
             for name, finding in findings.items()
             for test, p in finding.p_values.items() if p < ALPHA]
    whole = findings["all"]
    if whole.near_ties:
        print(f"{whole.near_ties:,} tokens are outside top-k or top-p by no more than rounding: "
              "they count as the last ones inside.")
    if whole.impossible:
        found.insert(0, f"{whole.impossible:,} tokens are impossible (probability 0)")
    if found:
        print(f"FOUND: these texts are not distributed as the target's: {'; '.join(found[:4])}"
              f"{' ...' if len(found) > 4 else ''}.")
        if whole.nats < -1:
            print(f"They are {-whole.nats:.1f} nats a token less likely than the target's own: "
                  "another tokenizer, checkpoint\nor prompt?")
    else:
        print(f"Nothing found: all p-values are above {ALPHA:g}. In {whole.tokens:,} tokens a bias "
              f"of {would_have_shown(whole.tokens):.1%} of the\nbins' probability would have "
              "shown.")
    print(f"A correct program is called wrong with probability below "
          f"{len(findings) * len(TESTS) * ALPHA:.0e}.")
    return bool(found)


def report_greedy(texts: list[Text], gaps: torch.Tensor) -> bool:
    """Report how many tokens of greedy texts are the argmax, and how far the others' logits are
    from the largest. Returns whether any is farther than rounding explains."""
    groups = members(texts)
    width = max(map(len, groups))
    print(f"\n{'':{width}}    tokens   argmax  near-ties  faults  largest gap of logits")
    gap, rounding = gaps.T
    for name, chosen in groups.items():
        others = gap[chosen] > 0
        faults = int((gap > rounding)[chosen].sum())
        print(f"{name:{width}}{len(others):10,} {1 - others.double().mean():8.3%} "
              f"{int(others.sum()) - faults:10,} {faults:7,}  {gap[chosen].max():.3g}")
    faults = int((gap > rounding).sum())
    if faults:
        print(f"FOUND: {faults:,} tokens are not the target's argmax, by more than rounding "
              "explains (4 times the model's\nprecision, times the largest logit).")
    else:
        print("Nothing found: every token is the target's argmax, or as good as that: the gap is "
              "within rounding.")
    return faults > 0


def main(arguments: list[str] | None = None) -> int:
    """Audit, and return the exit status: 1 if a bias was found, 2 for a bad file."""
    args = audit_parser().parse_args(arguments)
    try:
        return int(audit_file(args))
    except UserError as problem:
        print(problem, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
