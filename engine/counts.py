"""Counts which of the draft's guesses were right, for the statistics and the figures."""
import torch


class GuessCounts:
    """Counts guesses in `table` `[2, K+1, n+1]`: for each source, how often k tokens were accepted
    and the bonus token was the draft's guess number 0 to n-1 or, in the last column, none of them.
    So it tells how often a cache of any other shape would have hit with the same outcomes.
    `fan_outs` `[2, K+1]` is the sum of the F_0..F_K that an idea has chosen round by round."""

    def __init__(self, lookahead: int, num_guesses: int):
        with torch.inference_mode(False):  # else a caller's, and nothing can be added outside of it
            self.table = torch.zeros(2, lookahead + 1, num_guesses + 1, dtype=torch.long)
            self.fan_outs = torch.zeros(2, lookahead + 1, dtype=torch.long)
        self.last = None  # the guesses of the round under way

    def next_round(self, guesses: torch.Tensor, source: torch.Tensor, text: torch.Tensor,
                   length: torch.Tensor) -> None:
        """Count what became of the last round's guesses, and keep this round's: `guesses`
        `[B, K+1, n]`, for every k the likeliest bonus token first, after what `source` `[B]`
        drafted. The last outcome is read off the end of the verified `text` `[B, W]`, of `length`
        `[B]`: so nothing is counted while the target waits. Round 0 (K = 0) does not count."""
        last = self.last
        self.last = (guesses, source, length) if guesses.shape[1] > 1 else None
        if last and self.last:
            last_guesses, last_source, last_length = last
            k = length - last_length - 1
            active = k >= 0  # a finished row has not grown
            row = torch.arange(len(k))
            bonus = text.gather(1, length[:, None] - 1)              # [B, 1]
            found = last_guesses[row, k] == bonus                    # [B, n]
            number = found.long().argmax(1).where(found.any(1), -1)  # -1: the last column
            index = (last_source[active], k[active], number[active])
            self.table.index_put_(index, torch.tensor(1), accumulate=True)

    def clear(self) -> None:
        self.table.zero_()
        self.fan_outs.zero_()

    def tables(self) -> list[list]:
        """Return `table` and `fan_outs`."""
        return [self.table.tolist(), self.fan_outs.tolist()]
