"""Random numbers: a stream each for the verifier, the branches and the backups."""
import torch

VERIFIER_STREAM, BRANCH_STREAM, BACKUP_STREAM = range(3)


class UniformStream:
    """Draws the uniform random numbers of one `stream` of a `seed` (0 to 2^30 - 1), by a generator
    of its own."""

    def __init__(self, seed: int, stream: int):
        self.generator = torch.Generator().manual_seed(3 * seed + stream)  # it takes 32 bits

    def draw(self, *shape: int) -> torch.Tensor:
        """Return the next numbers `[*shape]`, float64, in [0, 1), in host memory."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)
