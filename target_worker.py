"""The verifier (Algorithm 1): one target pass judges K drafted tokens, and adds one of its own.

It never learns who drafted. Autoregressive decoding is K = 0.
"""
import torch

import sampling
from cache import Outcome, Speculation
from runtime.model import CausalLM, Stopwatch, UserError


class TargetWorker:
    """The target model and the end of the verified text of every row of a batch of B."""

    def __init__(self, model: CausalLM, warping: sampling.Warping, seed: int,
                 public_seed: int | None = None):
        """`seed` of the coins that accept, reject and draw bonus tokens; these are drawn with
        public noise instead, if its seed is given."""
        self.model, self.warping, self.rows = model, warping, 0
        self.public_seed = None if warping.greedy else public_seed
        self.generator = torch.Generator().manual_seed(seed)
        self.watch = Stopwatch(model.device)

    def prefill(self, prompts: list[list[int]], longest: int, lookahead: int) -> Outcome:
        """Round 0: read the prompts (token ids, none empty) of texts that will have at most
        `longest` tokens, and verify an empty speculation; later ones have at most `lookahead`
        tokens."""
        self.model.allocate(len(prompts), longest + lookahead, longest)
        self.model.prefill(prompts)
        self.row = torch.arange(self.rows, self.rows + len(prompts))  # no two rows share noise
        self.rows += len(prompts)
        self.length = torch.tensor([len(prompt) for prompt in prompts])  # [B] verified tokens
        self.last = torch.tensor([prompt[-1] for prompt in prompts])     # [B], not yet in the KV
        outcome = self.verify(Speculation.empty(len(prompts)))
        self.watch.read()  # times speak of decoding alone
        return outcome

    def verify(self, speculation: Speculation) -> Outcome:
        """One target pass over the last verified token and the K drafted ones: accept, reject, add
        the bonus token. Nothing is final before `advance`. Raises `UserError` if logits
        overflow."""
        device, (rows, lookahead) = self.model.device, speculation.tokens.shape
        with self.watch("verify"):
            # All that must move to a GPU moves before the pass: later, it would wait for it.
            coins = torch.rand(rows, lookahead + 1, generator=self.generator, dtype=torch.float64)
            last, drafted, q, coins = (part.to(device) for part in (
                self.last[:, None], speculation.tokens, speculation.q, coins))
            keys = None
            if self.public_seed is not None:
                keys = sampling.noise_keys(self.public_seed, self.row, self.length, lookahead)
                keys = keys.to(device)
            logits = self.model.causal(torch.cat([last, drafted], 1), self.length - 1)
            p = self.warping.probabilities(logits)
            sound = (logits.amax(-1).sum(1) + q.sum((1, 2))).isfinite().long()
            verdict = torch.stack([*sampling.verify(p, drafted, q, coins, keys), sound]).cpu()
        if not verdict[2].all():
            raise UserError(f"logits are infinite or not numbers in {self.model.dtype}: "
                            "--dtype float32 or bfloat16 has room for larger ones")
        return Outcome(*verdict[:2])

    def advance(self, outcome: Outcome) -> None:
        """The accepted tokens and the bonus token join the text. Rejecting the others is not going
        further; a row that has ended (k = -1) goes nowhere."""
        self.length = self.length + outcome.num_accepted + 1
        self.last = outcome.bonus
