"""Passes as CUDA graphs. Nothing here changes what is computed.

On a GPU a pass over few tokens is hundreds of kernels that take less time than Python takes to
launch them. As keys and values are written in place, into slots, such a pass is the same kernels at
the same addresses every time: it is recorded once and replayed. Only the number of slots that
attention sees must not change from pass to pass, so it is rounded up to a multiple of `BUCKET`; the
mask hides what that adds.
"""
import math
import sys
from typing import Callable

import torch

from runtime.model import CausalLM, differ

BUCKET = 256  # slots; see above
RECORD_FROM = 3  # the use of a shape that is recorded: some occur but once or twice
LONGEST_RECORDED = 64  # tokens a row; beyond, kernels take longer than their launches


class Recording:
    """A pass as a CUDA graph. Inputs are copied to where they lay when it was recorded."""

    def __init__(self, run: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], pool,
                 stream: torch.cuda.Stream):
        """`pool`: memory that recordings may share, as none is replayed before the last one's
        output was copied; those that do have one `stream`. Raises RuntimeError where the pass
        cannot be recorded, or a replay gives other logits."""
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        main = torch.cuda.current_stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):  # what libraries set up at a first call is not recorded
            expected = run(*self.inputs)
        main.wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        # NCCL's and other threads do as they please meanwhile
        with torch.cuda.graph(self.graph, pool, stream, capture_error_mode="thread_local"):
            self.output = run(*self.inputs)
        self.output.fill_(math.nan)  # all that a replay gives is its own
        if differ(self.replay(inputs), expected):
            raise RuntimeError("the recorded pass gives other logits")

    def replay(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        for place, tensor in zip(self.inputs, inputs):
            place.copy_(tensor)
        self.graph.replay()
        return self.output.clone()


class Recorder:
    """Stands in for `CausalLM.eager`, for passes that give logits; prefill is always eager."""

    def __init__(self, model: CausalLM):
        self.model, self.stream = model, torch.cuda.Stream()

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
                 mask: torch.Tensor) -> torch.Tensor:
        """Logits `[B, n, V]`, of inputs and with effects as in `CausalLM.eager`."""
        eager, kv = self.model.eager, self.model.kv
        if tokens.shape[1] > LONGEST_RECORDED:
            return eager(tokens, positions, slots, mask)
        seen = min(math.ceil(mask.shape[-1] / BUCKET) * BUCKET, kv.slots)
        mask = torch.nn.functional.pad(mask, (0, seen - mask.shape[-1]), value=-torch.inf)
        inputs, shape = (tokens, positions, slots, mask), (*tokens.shape, seen)
        kv.uses[shape] += 1
        if kv.uses[shape] == RECORD_FROM:
            pool = next((other.graph.pool() for other in kv.recordings.values()), None)
            try:
                kv.recordings[shape] = Recording(eager, inputs, pool, self.stream)
            except RuntimeError as problem:
                print(f"{self.model.network.config.model_type} passes cannot be recorded as CUDA "
                      f"graphs and run eagerly: {problem}", file=sys.stderr)
                self.model.run = eager
        return kv.recordings[shape].replay(inputs) if shape in kv.recordings else eager(*inputs)


def record_passes(model: CausalLM) -> None:
    """Record the passes of a model that sits on one CUDA device entirely; leave any other as it is.

    Not for a target that several ranks share: its passes hold collectives, and where recording
    fails on one rank only, the others would wait for it in the replay that tries theirs out."""
    devices = {parameter.device for parameter in model.network.parameters()}
    if model.device.type == "cuda" and devices == {model.device}:
        model.run = Recorder(model)
