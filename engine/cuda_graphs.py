"""Passes as CUDA graphs. Nothing here changes what is computed.

On a GPU a pass over few tokens is hundreds of kernels that take less time than Python takes to
launch them. As keys and values are written in place, into slots, such a pass is the same kernels at
the same addresses every time: it is captured once and replayed. Only the number of slots that
attention sees must not change from pass to pass, so it is rounded up to one of `WIDTHS`; what that
adds is not visible. At its first use, in a warm-up, a pass is captured for all widths: later
texts may be longer or shorter.

Ranks that share a model capture the all-reduces of its passes, too. They capture, replay or run
eagerly all together.
"""
import sys
from typing import Callable

import torch
import torch.distributed as dist

from engine.check import differ
from engine.model import CausalLM

WIDTHS = [2 ** i for i in range(8, 24)]  # slots; see above
LONGEST_CAPTURED = 256  # tokens a row; beyond, kernels take longer than their launches


class CapturedGraph:
    """Holds a pass as a CUDA graph. A replay copies its inputs to the addresses of the captured
    ones."""

    def __init__(self, forward: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], pool,
                 stream: torch.cuda.Stream):
        """`pool` is memory that all graphs share. They run on one `stream`, one after the other,
        and the output of each is copied before the next."""
        self.forward = forward
        self.pool = pool
        self.stream = stream
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        main = torch.cuda.current_stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):  # what libraries set up at a first call is not captured
            self.expected = forward(*self.inputs)
        main.wait_stream(stream)

    def capture(self) -> None:
        """Capture the pass. Raises RuntimeError where that is impossible."""
        self.graph = torch.cuda.CUDAGraph()
        # only this thread is restricted while capturing
        with torch.cuda.graph(self.graph, self.pool, self.stream,
                              capture_error_mode="thread_local"):
            self.output = self.forward(*self.inputs)

    def try_out(self) -> None:
        """Replay the pass once. Raises RuntimeError if that gives other logits."""
        self.output.fill_(torch.nan)  # so that nothing is left of the capture
        if differ(self.replay(self.inputs), self.expected):
            raise RuntimeError("the captured pass gives other logits")
        del self.expected

    def replay(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        for place, tensor in zip(self.inputs, inputs):
            place.copy_(tensor)
        self.graph.replay()
        return self.output.clone()


class GraphRunner:
    """Stands in for `CausalLM.forward_eager`, for passes that give logits; prefill is always
    eager."""

    def __init__(self, model: CausalLM, group: dist.ProcessGroup | None = None):
        """`group` holds the ranks that share the model, if there are several."""
        self.model = model
        self.group = group
        self.stream = torch.cuda.Stream()

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
                 visible: torch.Tensor) -> torch.Tensor:
        """Do as `CausalLM.forward_eager` does: return logits `[B, n, V]`, and write keys and
        values."""
        kv = self.model.kv
        seen = visible.shape[-1]
        widths = [width for width in WIDTHS if width < kv.slots] + [kv.slots]
        width = next(width for width in widths if width >= seen)

        def inputs(width: int) -> tuple[torch.Tensor, ...]:
            wider = torch.nn.functional.pad(visible, (0, width - seen))
            return tokens, positions, slots, wider

        shape = (*tokens.shape, width)
        if shape not in kv.graphs and tokens.shape[1] <= LONGEST_CAPTURED:
            for other in widths:
                self.capture((*tokens.shape, other), inputs(other))
        if shape in kv.graphs:
            return kv.graphs[shape].replay(inputs(width))
        return self.model.forward_eager(*inputs(width))

    def capture(self, shape: tuple[int, ...], inputs: tuple[torch.Tensor, ...]) -> None:
        kv = self.model.kv
        if shape in kv.graphs or self.model.forward_fn != self:  # captured; or none can be
            return
        pool = next((graph.graph.pool() for graph in kv.graphs.values()), None)
        graph = CapturedGraph(self.model.forward_eager, inputs, pool, self.stream)
        for step in (graph.capture, graph.try_out):
            fine = True
            try:
                step()
            except RuntimeError as problem:
                fine = False
                print(f"{self.model.model.config.model_type} passes cannot be captured as CUDA "
                      f"graphs and run eagerly: {problem}", file=sys.stderr)
            if not self.all_agree(fine):
                self.model.forward_fn = self.model.forward_eager
                return
        kv.graphs[shape] = graph

    def all_agree(self, fine: bool) -> bool:
        """Return whether it is fine on all ranks that share the model."""
        if self.group is None:
            return fine
        flag = torch.tensor(int(fine), device=self.model.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN, self.group)
        return bool(flag)
