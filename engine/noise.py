"""Random numbers, each a hash of its seed, stream and index."""
import math

import torch

VERIFIER_STREAM, BRANCH_STREAM, BACKUP_STREAM = range(3)
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
    """Map hashes `[...]` to float64 in (0, 1): the middles of 2^52 equal intervals."""
    return ((bits >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0 ** -52
