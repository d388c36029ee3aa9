"""Random numbers, hashes of what they belong to: streams of uniform ones; public noise."""
import math

import torch

VERIFIER_STREAM, BRANCH_STREAM, BACKUP_STREAM, NOISE_STREAM = range(4)
GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio: the step of SplitMix64


class UniformStream:
    """The uniform random numbers of one `stream` of a `seed` (0 to 2^63 - 1), independent of all
    other streams and seeds."""

    def __init__(self, seed: int, stream: int):
        self.key = splitmix64(splitmix64(torch.tensor(seed)) ^ stream)
        self.count = 0

    def draw(self, *shape: int) -> torch.Tensor:
        """The next numbers `[*shape]`, float64, in (0, 1), in host memory."""
        size = math.prod(shape)
        index = torch.arange(self.count, self.count + size)
        self.count += size
        return to_uniform(splitmix64(self.key + index * GOLDEN)).view(shape)


def splitmix64(x: torch.Tensor) -> torch.Tensor:
    """A 64-bit hash of int64 `[...]`: the next output of SplitMix64 (Steele, Lea, Flood 2014).

    >>> hex(int(splitmix64(torch.tensor(0))) % 2 ** 64)  # the first number of seed 0
    '0xe220a8397b1dcdaf'
    """
    x = x + GOLDEN
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47  # masked, because >> keeps the sign
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & 0x1FFFFFFFF)


def to_uniform(bits: torch.Tensor) -> torch.Tensor:
    """Hashes `[...]` as float64 in (0, 1): the middles of 2^52 equal intervals."""
    return ((bits >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0 ** -52


# ---- public noise (ours, not the paper's): --public-noise ----

class PublicNoise:
    """Noise for the bonus tokens of a batch: a function of (seed, row, position, token). The target
    draws bonus tokens with it; the draft guesses with it but never draws with it, so the output's
    distribution is untouched. (Leave C at 1: the draft's likeliest tokens are not the guesses.)"""

    def __init__(self, seed: int):
        self.key = UniformStream(seed, NOISE_STREAM).key
        self.rows = torch.arange(0)  # their numbers in this run: no two rows share noise

    def start(self, batch_size: int) -> None:
        """Number the rows of a new batch."""
        first = int(self.rows[-1]) + 1 if len(self.rows) else 0
        self.rows = torch.arange(first, first + batch_size)

    def keys(self, length: torch.Tensor, lookahead: int) -> torch.Tensor:
        """`[B, K+1]`, for the positions that a bonus token may have, after 0 to K accepted tokens,
        in rows of `length` `[B]` tokens."""
        position = length[:, None] + torch.arange(lookahead + 1)
        return splitmix64(splitmix64(self.key ^ self.rows)[:, None] ^ position)


def exponential_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Exponentially distributed noise `[..., V]`, float64, for keys `[...]`."""
    token = torch.arange(vocab_size, device=keys.device)
    return -to_uniform(splitmix64(keys[..., None] + token * GOLDEN)).log()


def sample_with_noise(r: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """argmax_x r(x) / e(x), e ~ Exp(1): exactly a draw `[B]` from r `[B, V]`. (Of V exponential
    clocks of rates r(x) it is the first to ring: the Gumbel trick with one logarithm less.)"""
    return (r / exponential_noise(keys, r.shape[-1])).argmax(-1)
