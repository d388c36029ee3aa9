"""Prompt look-up as the backup (`--backup lookup`): what followed the last tokens where they stood
before (Saxena 2023). It takes no time, and in texts that repeat themselves it is often right."""
import torch

from draft_worker import BACKUPS, Drafted, DraftWorker
from engine.model import to_device
from ideas import ACCEPTANCE_RATES
from sampling import point_mass

MAX_MATCH = 16  # tokens: longer matches are equally good


def lookup_backup(draft: DraftWorker) -> Drafted:
    """Look tokens up in each row's own text, without a model. They are point masses."""
    tokens = []
    for row, length in zip(draft.text, draft.length):
        text = row[:length].tolist()
        tokens.append(prompt_lookup(text, draft.lookahead))
    tokens = to_device(torch.tensor(tokens), draft.model.device)
    return tokens, point_mass(tokens, like=draft.q_template)


def prompt_lookup(text: list[int], count: int) -> list[int]:
    """Return the `count` tokens that followed the longest earlier match of the end of the text, or
    the most recent of equally long ones. `MAX_MATCH` tokens are as good as more. What followed is
    repeated if the text ends first. Without a match the beginning of the text is returned.

    >>> prompt_lookup([1, 2, 3, 4, 1, 2], 5)
    [3, 4, 1, 2, 3]
    """
    def matched(end: int) -> int:
        length = 0
        while length < min(end, MAX_MATCH) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        return length

    ends = [0, *range(len(text) - 1, 0, -1)]  # 0 is without a match, then the most recent first
    start = max(ends, key=matched)            # of equals `max` takes the first
    return (text[start:] * count)[:count]


BACKUPS["lookup"] = lookup_backup
ACCEPTANCE_RATES["lookup"] = 0.2
