"""Tries a model, to find out whether it can be decoded here.

A model must be causal, and compute the same through KV slots: a pass over stale slots, and a branch
in scratch slots, must give the logits of an ordinary forward.
"""
from contextlib import contextmanager
from typing import Iterator

import torch
from torch.compiler import set_stance
from transformers import DynamicCache

from engine.errors import UserError, not_finite, reported_as
from engine.model import CausalLM, KVCache

PROBE = 32  # tokens of the text with which a model is tried
WINDOWS = {"sliding_window", "attention_chunk_size"}  # in tokens


@torch.inference_mode()
def check_model(model: CausalLM) -> CausalLM:
    """Return a model as it is. Raises `UserError` if it is not causal, if its logits change with
    slots by more than with transformers' own cache, which is rounding, or while it is decoded."""
    family = model.model.config.model_type
    tokens, other_ending = probes(model)
    half = tokens.shape[1] // 2
    with model.for_one(), short_windows(model) as windows:
        with reported_as(f"{family} models cannot run in {model.dtype}"):
            with set_stance("force_eager"), torch.autocast(model.device.type, enabled=False):
                plain = model.model(tokens, use_cache=False).logits
                changed = model.model(other_ending, use_cache=False).logits[:, :half]
                stepwise = token_by_token(model, tokens)
        with reported_as(f"{family} models cannot run with KV slots and tree attention"):
            slotted = through_slots(model, tokens)
    if not plain.isfinite().all():
        raise not_finite(f"this {family} model's logits", model.dtype)
    before = plain[:, :half]
    if differ(changed, before, rms(before) / 10_000):  # experts may round differently: 0.01%
        raise UserError(f"this {family} model is not causal: its logits change with later tokens")
    plain = plain[:, -3:]
    rounding = min(rms(stepwise - plain), rms(plain) / 20)  # seen in 105 families: 3% at most
    if differ(slotted, plain, rounding):
        given = f"with {' and '.join(windows)} in config.json " if windows else ""  # may be stray
        raise UserError(f"{given}{family} models give other logits with KV slots and tree "
                        "attention, so their text would be wrong")
    return model


def probes(model: CausalLM) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a text `[1, n]` to try a model with, and one with another second half."""
    n = min(PROBE, model.context)
    vocab_size = model.last_token + 1
    tokens = (7 * torch.arange(n, device=model.device)[None] + 1) % vocab_size
    other_ending = tokens.clone()
    other_ending[:, n // 2:] += 1
    return tokens, other_ending % vocab_size


@contextmanager
def short_windows(model: CausalLM) -> Iterator[list[str]]:
    """Let all windows end within the text in this block. Yields the names of those that it has."""
    sizes = vars(model.model.config.get_text_config())  # masks are made from them in every pass
    windows = {name: sizes[name] for name in WINDOWS & sizes.keys() if sizes[name]}
    sizes |= dict.fromkeys(windows, 4)
    try:
        yield list(windows)
    finally:
        sizes |= windows
        model.kv = KVCache(0, 0)  # what was captured has the windows of this text


def token_by_token(model: CausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Return logits `[1, 3, V]` of the last 3 of tokens `[1, n]`, by transformers' own cache."""
    cache = {model.cache_name: DynamicCache(config=model.model.config)}
    pieces = (tokens[:, :-3], *tokens[:, -3:].split(1, 1))
    logits = [model.model(piece, use_cache=True, **cache).logits for piece in pieces]
    return torch.cat(logits[1:], 1)


def through_slots(model: CausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Return the same logits through KV slots: one after a pass that leaves rejected tokens behind,
    two of a branch in scratch slots."""
    device = model.device
    n = tokens.shape[1]
    model.allocate(1, n, scratch=n)
    rejected = tokens[:, :3]
    with_rejected = torch.cat([tokens[:, :-3], rejected], 1)
    model.causal(with_rejected, torch.tensor([0]))
    third_last = tokens[:, -3:-2]
    after_rejection = model.causal(third_last, torch.tensor([n - 3]))
    # the last two tokens in one pass, the later one first: in slots n + 2 and n
    later_first = tokens[:, -2:].flip(1)
    positions = torch.tensor([[n - 1, n - 2]], device=device)
    slots = torch.tensor([[n + 2, n]], device=device)
    trunk = torch.arange(n + 3, device=device) < n - 2
    visible = trunk.repeat(1, 2, 1)   # [1, 2, slots]: both see the trunk,
    visible[:, :, n] = True           # both the earlier one,
    visible[:, 0, n + 2] = True       # and the later one sees itself
    branch = model.forward(later_first, positions, slots, visible)
    earlier_first = branch.flip(1)
    return torch.cat([after_rejection, earlier_first], 1)


def rms(logits: torch.Tensor) -> float:
    """Return the root mean square of the logits."""
    return float(logits.float().square().mean().sqrt())


def differ(logits: torch.Tensor, expected: torch.Tensor, rounding: float = 0.0) -> bool:
    """Return whether logits differ, in the vocabulary that both have, by more than 8 times the
    larger of `rounding` and a last digit. (In 15 families and four types sound models differ by at
    most 1.9 times the rounding, others by at least 15 times.)"""
    V = min(logits.shape[-1], expected.shape[-1])
    logits = logits[..., :V]
    expected = expected[..., :V]
    own_digit = torch.finfo(logits.dtype).eps
    least_digit = torch.finfo(torch.float32).eps  # norms are float32
    last_digit = max(own_digit, least_digit) * rms(expected)
    allowed = 8 * max(rounding, last_digit)
    distance = rms(logits - expected)
    return not distance <= allowed  # so that NaN differs
