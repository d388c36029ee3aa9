"""The verifier (Algorithm 1): one target pass verifies K drafted tokens, and adds one of its own.

It never learns who drafted. Autoregressive decoding is K = 0.
"""
from typing import Callable

import torch

import sampling
from cache import Outcome, Speculation
from engine.errors import not_finite
from engine.model import CausalLM, to_device
from sampling import VERIFIER_STREAM, Sampler, UniformStream


class TargetWorker:
    """Holds the target model, and the end of the verified text of every row of a batch of B."""

    def __init__(self, model: CausalLM, sampler: Sampler, seed: int,
                 rule: Callable = sampling.verify):
        """`seed` decides the uniform numbers by which the `rule`, called as `sampling.verify` is,
        accepts, rejects and draws bonus tokens."""
        self.model = model
        self.sampler = sampler
        self.rule = rule
        self.clock = model.clock
        self.manual_seed(seed)

    def manual_seed(self, seed: int) -> None:
        """Begin with the random numbers of this seed."""
        self.uniforms = UniformStream(seed, VERIFIER_STREAM)

    def prefill(self, prompts: list[list[int]], max_length: int, lookahead: int) -> Outcome:
        """Read the prompts of texts of at most `max_length` tokens, and verify round 0's empty
        speculation. Later ones have at most `lookahead` tokens."""
        self.model.allocate(len(prompts), max_length, scratch=lookahead)  # the last may run over
        self.model.prefill(prompts)
        self.length = torch.tensor([len(prompt) for prompt in prompts])  # [B] verified tokens
        self.last = torch.tensor([prompt[-1] for prompt in prompts])     # [B], not yet in the KV
        outcome = self.verify(Speculation.empty(len(prompts)))
        self.clock.read()  # discards the times of prefill
        return outcome

    def verify(self, speculation: Speculation) -> Outcome:
        """Make one pass over the last verified token and the K drafted ones. Accept, reject, and
        add the bonus token. Raises `UserError` for logits or a q that are infinite or NaN."""
        device = self.model.device
        rows, lookahead = speculation.tokens.shape
        with self.clock("verify"):
            # Copy inputs before the pass: a later copy would queue behind it.
            last = to_device(self.last[:, None], device)
            drafted = to_device(speculation.tokens, device)
            q = to_device(speculation.q, device)
            uniforms = to_device(self.uniforms.draw(rows, lookahead + 1), device)
            logits = self.model.causal(torch.cat([last, drafted], 1), self.length - 1)
            p = self.sampler.probabilities(logits)
            num_accepted, bonus = self.rule(p, drafted, q, uniforms)
            # NaN and inf show in the maximum, -inf is allowed. A NaN in q would just reject.
            finite = [logits.amax(-1).isfinite().all(1), q.sum((1, 2)).isfinite()]
            # The host waits once, not for each of these.
            num_accepted, bonus, *finite = torch.stack([num_accepted, bonus, *finite]).cpu()
        for whose, numbers in zip(("the target's logits", "the draft's q"), finite):
            if not numbers.all():
                raise not_finite(whose, self.model.dtype)
        return Outcome(num_accepted, bonus)

    def advance(self, outcome: Outcome) -> None:
        """Add the accepted tokens and the bonus token to the text. Rejection needs no work: the
        length grows by k + 1, which is 0 for finished rows."""
        self.length = self.length + outcome.num_accepted + 1
        self.last = outcome.bonus
