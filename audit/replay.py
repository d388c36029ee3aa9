"""What the target says of every token of a text, given all that precedes it.

The texts of any engine are read once, by ordinary forward passes of transformers: nothing of this
repository's decoding has a part in it (no import here leads to `saguaro`, `sampling` or `cache`).
"""
from typing import Iterator, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.errors import not_finite

PIECE = 2 ** 22  # logits that are worked on at once
RANGES = 16      # of token ids


class Text(NamedTuple):
    """Holds a line of the file: token ids, and the group of every new token."""
    prompt: list[int]
    tokens: list[int]
    group: list[str]


class Replayed(NamedTuple):
    """Says how the target sees every token of the texts, `[N]`, given all that precedes it."""
    uniform: torch.Tensor   # [N] in (0, 1): see `audit`
    previous: torch.Tensor  # [N] that of the token before; -1: it is the text's first
    place: torch.Tensor     # [N] in the text, from 0
    argmax: torch.Tensor    # [N, 3] is it the argmax? See `surprise`
    log_p: torch.Tensor     # [N, 3] its log-probability
    ids: torch.Tensor       # [N, RANGES] is its id in this range? Less the probability of that
    p_ids: torch.Tensor     # [N, RANGES] and that probability
    next_id: torch.Tensor   # [N, 3] has its id followed the id before too often in earlier texts?
    next_nth: torch.Tensor  # [N, 3] has its rank? See `recall`
    possible: torch.Tensor  # [N] is its probability above 0?
    near_tie: torch.Tensor  # [N] may rounding have taken it across the edge of top-k or top-p?

    def where(self, chosen: torch.Tensor) -> "Replayed":
        return Replayed(*(part[chosen] for part in self))


def surprise(value: torch.Tensor, p: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return `[T, 3]`: a function of the token, `value` `[T, V]`, at the tokens `[T]` that were
    written, less its expectation under p `[T, V]`; its variance; its third central moment."""
    centred = value - (p * value).sum(-1, keepdim=True)
    seen = centred.gather(-1, tokens[:, None]).squeeze(-1)
    return torch.stack([seen, (p * centred ** 2).sum(-1), (p * centred ** 3).sum(-1)], -1)


def recall(table: torch.Tensor, row: torch.Tensor, p: torch.Tensor,
           tokens: torch.Tensor) -> torch.Tensor:
    """Return the `surprise` `[T, 3]` of what earlier texts have left in a table `[rows, V]`, in the
    `row` `[T]` of each token: how many times was it written there, less what was expected? Then
    add these tokens `[T]`, whose distributions are p `[T, V]`."""
    again = surprise(table[row], p, tokens)
    table.index_put_((row, tokens), p.new_ones(len(p)), accumulate=True)
    table.index_add_(0, row, -p)
    return again


def replay(logits: torch.Tensor, tokens: torch.Tensor, warpers: LogitsProcessorList,
           within: torch.Tensor, memory: list, start: int = 0, precision: float = 0.0) -> Replayed:
    """Compare a text's tokens `[T]` with the target's logits before them, `[T, V]`. `within` `[T]`,
    uniform in (0, 1), chooses a place in each token's interval. `memory` is the same list for all
    texts, empty at first: `recall` keeps its counts there. `start` is the id before the first
    token. If V is large, ids share a row of it. The result is in host memory.

    A token that top-k or top-p leaves out counts as the last one that they let in, if they would
    let it in with its logit raised by `rounding` at this `precision`: so it may have been inside in
    the engine."""
    vocab_size = logits.shape[-1]
    rows = max(1, PIECE // vocab_size)
    if not memory:
        memory += logits.new_zeros(2, min(rows, vocab_size), vocab_size, dtype=torch.float64)
    before = torch.cat([tokens.new_tensor([start]), tokens[:-1]])
    row = before % len(memory[0])
    pieces = [part.split(rows) for part in (logits, tokens, within, row)]
    parts = []
    for piece in zip(*pieces):
        parts.append(replay_piece(*piece, warpers, memory, precision))
    columns = {}
    for name in parts[0]:
        columns[name] = torch.cat([part[name] for part in parts]).cpu()
    previous = torch.cat([torch.tensor([-1.0]), columns["uniform"][:-1]])
    place = torch.arange(len(tokens))
    return Replayed(previous=previous, place=place, **columns)


def replay_piece(logits: torch.Tensor, tokens: torch.Tensor, within: torch.Tensor,
                 row: torch.Tensor, warpers: LogitsProcessorList, memory: list,
                 precision: float) -> dict[str, torch.Tensor]:
    """Return the columns of `Replayed`, but for `previous` and `place`, for some tokens `[T]` of a
    text. `row` `[T]` is that of each token in the tables of `memory`."""
    wide = widened(logits)
    p = warpers(None, wide).double().softmax(-1)                    # [T, V]
    if p.isnan().any():
        raise not_finite("the target's logits", logits.dtype)
    near_tie = outside_by_rounding(wide, tokens, p, warpers, precision)
    last_inside = wide.masked_fill(p == 0, torch.inf).argmin(-1)
    tokens = torch.where(near_tie, last_inside, tokens)
    own = p.gather(-1, tokens[:, None])                             # [T, 1]
    number = torch.arange(p.shape[-1], device=p.device)
    likelier = (p > own) | (p == own) & (number < tokens[:, None])  # [T, V]
    is_argmax = (number == p.argmax(-1, keepdim=True)).double()
    log_p = p.clamp(min=1e-300).log()
    likeliest_first = p.sort(descending=True).values
    nth = likelier.sum(-1)
    ids, p_ids = id_ranges(p, tokens)
    own = own.squeeze(-1)                                           # [T]
    return {
        "uniform": (p * likelier).sum(-1) + within * own,
        "argmax": surprise(is_argmax, p, tokens),
        "log_p": surprise(log_p, p, tokens),
        "ids": ids, "p_ids": p_ids,
        "next_id": recall(memory[0], row, p, tokens),
        "next_nth": recall(memory[1], row, likeliest_first, nth),
        "possible": own > 0, "near_tie": near_tie}


def widened(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits in float32, or in float64 if they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def outside_by_rounding(logits: torch.Tensor, tokens: torch.Tensor, p: torch.Tensor,
                        warpers: LogitsProcessorList, precision: float) -> torch.Tensor:
    """Return which tokens `[T]` have p = 0, but would have been let in with a logit raised by
    `rounding`."""
    own = tokens[:, None]
    raised = logits.scatter_add(-1, own, rounding(logits, precision)[:, None])
    let_in = warpers(None, raised).gather(-1, own) > -torch.inf
    outside = p.gather(-1, own) == 0
    return (outside & let_in).squeeze(-1)


def id_ranges(p: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[T, RANGES]` twice: is the token's id in this range, less the probability of that;
    and that probability."""
    vocab_size = p.shape[-1]
    ranges = torch.arange(vocab_size, device=p.device) * RANGES // vocab_size
    p_ids = p.new_zeros(len(p), RANGES).index_add_(1, ranges, p)
    return torch.nn.functional.one_hot(ranges[tokens], RANGES) - p_ids, p_ids


def warpers_of(temperature: float, top_k: int, top_p: float) -> LogitsProcessorList:
    """Make transformers' own warpers, in the order of `generate`. Raises ValueError, as they do."""
    if not 0 < top_p <= 1:  # NaN, too
        raise ValueError(f"top-p is {top_p}; it must be above 0, and at most 1")
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    return warpers


def target_logits(model, texts: list[Text], batch_size: int) -> Iterator[torch.Tensor]:
    """Return the target's logits `[T, V]` before every new token of each text, by one ordinary
    forward pass per batch. Nothing of this project has a part in it."""
    total = sum(len(text.tokens) for text in texts)
    bar = tqdm(total=total, unit="token", mininterval=5, delay=5)
    for start in range(0, len(texts), batch_size):
        batch = texts[start:start + batch_size]
        read = [torch.tensor((text.prompt + text.tokens)[:-1]) for text in batch]
        padded = pad_sequence(read, batch_first=True, padding_value=-1).to(model.device)
        is_token = (padded >= 0).long()
        skipped = min(len(text.prompt) for text in batch) - 1  # no logits of these are needed
        kept = padded.shape[1] - skipped
        with torch.inference_mode():
            logits = model(input_ids=padded.clamp(min=0), attention_mask=is_token,
                           logits_to_keep=kept, use_cache=False).logits
        for row, text in enumerate(batch):
            first = len(text.prompt) - 1 - skipped
            yield logits[row, first:first + len(text.tokens)]
            bar.update(len(text.tokens))
    bar.close()


def members(texts: list[Text]) -> dict[str, torch.Tensor]:
    """Return the members of "all" and of each group, as booleans over the texts' tokens `[N]`."""
    groups = []
    for text in texts:
        groups += text.group
    chosen = {"all": torch.ones(len(groups), dtype=torch.bool)}
    for name in sorted(set(groups) - {""}):  # "": of no group
        chosen[name] = torch.tensor([group == name for group in groups])
    return chosen


def precision_of(model) -> float:
    """Return the precision of the model's type, or 1e-5, which sums over many layers lose in
    float32."""
    return max(torch.finfo(model.dtype).eps, 1e-5)


def rounding(logits: torch.Tensor, precision: float) -> torch.Tensor:
    """Return how far rounding may take each of logits `[T, V]`, `[T]`: 4 times the precision, times
    the largest logit."""
    return 4 * precision * logits.abs().masked_fill(logits.isinf(), 0).amax(-1)


def greedy_gaps(model, texts: list[Text], batch_size: int) -> torch.Tensor:
    """Return two gaps for each token of greedy texts, `[N, 2]`: how far its logit is from the
    largest, and how far rounding may take it."""
    gaps = []
    for text, logits in zip(texts, target_logits(model, texts, batch_size)):
        logits = widened(logits)
        tokens = torch.tensor(text.tokens, device=logits.device)
        own = logits.gather(-1, tokens[:, None]).squeeze(-1)
        gap = logits.amax(-1) - own
        allowed = rounding(logits, precision_of(model))
        gaps.append(torch.stack([gap, allowed], -1).cpu())
    return torch.cat(gaps).double()
