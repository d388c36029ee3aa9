"""Public noise (`--verification race`): the draft foresees the bonus token.

Above temperature 0 the bonus token is a random draw from the residual r, which the draft can hardly
guess. But random numbers need not be secret. Here the draw is a race: token x arrives at the time
E_x / r(x), where the E_x are independent and exponentially distributed, and the first is drawn.
This is x with probability r(x). The draft knows the same E. So it runs the race with its q in the
place of r, and guesses, for each k, the F_k tokens that arrive first. All else is block
verification (block.py).

A text stays the target's. Fix all that was before a round's numbers are drawn: the text, q, and the
drafted tokens, which were drawn by numbers of the draft's own. The round's numbers are new, and
independent of these. u_1..u_K decide k as ever. E follows from the last number alone: it is
independent of k, and the race draws from r. The draft looks at E to choose for which outcomes it
prepares something, but draws what it prepares by numbers of its own. So the tokens of the next
round, too, were drawn from the q that is reported, and independently of the numbers to come.

Two things would bias the text. One is to draft by the numbers that will judge the draft. The other
is to judge by numbers u_1..u_K that belong to positions of the text and not to a round: k is the
largest i whose number is below a bound, so of the numbers behind k one knows that they are large,
and those positions would be judged by them again.

Who knows the noise of a sample forecasts it better (Wiggers and Hoogeboom 2020, arXiv:2002.09928).
Others let the draft itself draw by the target's noise (Daliri et al. 2024, arXiv:2408.07978; Kobus
and Gunduz 2025, arXiv:2504.15475; Rowan et al. 2025, arXiv:2506.05632). Then both draw the same
token at worst with probability (1 - TV) / (1 + TV), where p / q accepts 1 - TV, with the total
variation TV between p and q. We know of none that fills the cache of SSD.
"""
from functools import partial

import torch

from cache import Speculation
from draft_worker import DraftWorker
from engine.model import to_device
from ideas import GUESSERS, VERIFICATIONS
from ideas.block import block_verify
from sampling import VERIFIER_STREAM, UniformStream

GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as int64, and two factors: of splitmix64
FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


def race(p: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw a token `[B]` from each distribution `[B, V]`, normalised or not, by its uniform number
    `[B]`, as `sampling.inverse_cdf` does. Should two tokens arrive together, which in float64 is
    very rare, either is drawn.

    >>> uniforms = torch.rand(100_000, generator=torch.Generator().manual_seed(0)).double()
    >>> drawn = race(torch.tensor([1/2, 1/4, 1/4, 0]).expand(100_000, 4), uniforms)
    >>> [round(n / 100_000, 2) for n in drawn.bincount().tolist()]
    [0.5, 0.25, 0.25]
    """
    E = exponentials(uniforms, p.shape[-1])
    return (p / E).argmax(-1)


def exponentials(uniforms: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the noise E `[..., V]`, float64, neither 0 nor infinite, that follows from uniform
    numbers `[...]`: a hash of number and token, by integers alone, as all devices have them."""
    numbers = (uniforms * 2 ** 53).long()
    keys = scrambled(numbers)[..., None]           # [..., 1]
    token = torch.arange(1, vocab_size + 1, device=keys.device)
    hashed = scrambled(keys + GOLDEN * token)      # [..., V]
    bits = hashed >> 12                            # from -2^51 to 2^51 - 1
    noise = (bits.double() + 0.5) / 2 ** 52 + 0.5  # uniform, above 0 and below 1
    return -noise.log()


def scrambled(x: torch.Tensor) -> torch.Tensor:
    """Return the hash of each int64 that ends splitmix64. Products overflow."""
    x = (x ^ shifted(x, 30)) * FACTORS[0]
    x = (x ^ shifted(x, 27)) * FACTORS[1]
    return x ^ shifted(x, 31)


def shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return each int64 shifted right, as an unsigned number: >> alone repeats the sign."""
    remaining = (1 << (64 - count)) - 1
    return (x >> count) & remaining


class RacingDraft(DraftWorker):
    """Guesses the tokens that are first in the race of its own q. `run.Decoder` adds `settings`."""

    def manual_seed(self, seed: int) -> None:
        super().manual_seed(seed)
        self.verifier = UniformStream(seed, VERIFIER_STREAM)  # a copy of the target's, in step

    def candidates(self, logits: torch.Tensor, speculation: Speculation) -> torch.Tensor:
        rows, lookahead = speculation.tokens.shape
        uniforms = self.verifier.draw(rows, lookahead + 1)  # as `TargetWorker.verify` does
        last = to_device(uniforms[:, -1:], logits.device)   # [B, 1]
        E = exponentials(last, logits.shape[-1])            # [B, 1, V]
        # This q lacks top-k and top-p: the target may draw what these would take from the draft,
        # and of tokens with q = 0 none would come before another.
        log_q = logits.to(self.q_template) / self.settings.temperature
        log_E = E.log().to(log_q)
        earliness = log_q - log_E                           # [B, K+1, V] the order of q / E
        return super().candidates(earliness, speculation)


VERIFICATIONS["race"] = partial(block_verify, draw=race)
GUESSERS["race"] = RacingDraft
