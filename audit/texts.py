"""Reads the texts of a file, and loads the target that is said to have written them."""
import math
from contextlib import suppress

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.utils import logging

from audit.replay import Text
from engine.errors import UserError, read_json_lines, reported_as

DEFAULTS = dict(target=None, temperature=None, top_k=0, top_p=1.0, dtype="auto")


def read_rows(path: str) -> tuple[dict, list[tuple[int, dict]]]:
    """Read the settings of the first line, if it holds any, and the lines with texts, numbered."""
    settings = {}
    rows = []
    for number, row in read_json_lines(path, path):
        where = f"{path}, line {number}"
        if "tokens" in row and row.keys() & {"settings", "statistics"}:
            raise UserError(f"{where}: a text, and settings or statistics: these have lines of "
                            "their own")
        if isinstance(row.get("settings"), dict):
            above = DEFAULTS | settings
            here = DEFAULTS | row["settings"]
            differ = [name for name in DEFAULTS if here[name] != above[name]]
            if settings and differ:
                raise UserError(f"{where}: another {', '.join(differ)} than in the settings above: "
                                "audit these texts apart")
            settings = row["settings"]
        elif "statistics" not in row:
            rows.append((number, row))
    return settings, rows


def check_rows(path: str, rows: list[tuple[int, dict]], tokenizer,
               config: PretrainedConfig) -> list[Text]:
    """Return the texts that hold tokens, the longest first: so there is little padding in a batch.
    Raises `UserError`, which says what is wrong with a line."""
    context = getattr(config, "max_position_embeddings", None) or math.inf
    texts = []
    for number, row in rows:
        with reported_as(f"{path}, line {number}", UserError):
            texts.append(check_row(row, tokenizer, config.vocab_size, context))
    texts = [text for text in texts if text.tokens]
    if not texts:
        raise UserError(f"{path} holds no tokens")
    return sorted(texts, key=lambda text: -len(text.prompt + text.tokens))


def check_row(row: dict, tokenizer, vocab_size: int, context: float) -> Text:
    prompt = row.get("prompt_tokens")
    if prompt is None and isinstance(row.get("prompt"), str):
        if tokenizer is None:
            raise UserError("a prompt in letters, and the target has no tokenizer: write the "
                            "token ids that the engine read, as prompt_tokens")
        with reported_as("the tokenizer cannot read it", TypeError):  # half a character
            prompt = tokenizer(row["prompt"])["input_ids"]
    tokens = row.get("tokens")
    check_ids("prompt_tokens (or prompt)", prompt, vocab_size)
    check_ids("tokens", tokens, vocab_size)
    if not prompt:
        raise UserError("an empty prompt: nothing says how likely the first token was; give at "
                        "least the token with which the engine began")
    length = len(prompt + tokens)
    if length > context:
        raise UserError(f"{length} tokens, and the target's context is {context}")
    group = row.get("group") or [""] * len(tokens)
    if not isinstance(group, list) or "all" in group:
        raise UserError("group must be a list, one entry a token, and none called all, the whole")
    if len(group) != len(tokens):
        raise UserError(f"{len(tokens)} tokens and {len(group)} entries of group")
    return Text(prompt, tokens, list(map(str, group)))


def check_ids(name: str, ids, vocab_size: int) -> None:
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise UserError(f"no list of token ids called {name}")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise UserError(f"{name} holds the id {outside[0]}, and the target's vocabulary has "
                        f"{vocab_size}: another model's tokenizer?")


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
