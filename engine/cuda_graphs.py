"""Passes as CUDA graphs. Nothing here changes what is computed.

On a GPU a pass over few tokens is hundreds of kernels that take less time than Python takes to
launch them. As keys and values are written in place, into slots, such a pass is the same kernels at
the same addresses every time: it is captured once and replayed. Only the number of slots that
attention sees must not change from pass to pass, so it is rounded up to one of `WIDTHS`; what that
adds is not visible. At its first use, in a warm-up, a pass is captured for all widths: later
texts may be longer or shorter.

Ranks that share a model capture the all-reduces of its passes, too. Nothing is decoded after a
capture that failed: it leaves PyTorch's allocator and streams in a state that nobody promises.
"""
from typing import Callable

import torch

from engine.check import differ
from engine.errors import UserError, first_line
from engine.model import CausalLM

WIDTHS = [2 ** i for i in range(8, 24)]  # slots; see above
LONGEST_CAPTURED = 256  # tokens a row; beyond, kernels take longer than their launches


class CapturedGraph:
    """Holds a pass as a CUDA graph. A replay copies its inputs to the addresses of the captured
    ones."""

    def __init__(self, forward: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], pool,
                 stream: torch.cuda.Stream, like: "CapturedGraph | None"):
        """`pool` is memory that all graphs share. The output is that of `like`, the same pass over
        another number of slots, if there is one. They are captured on one `stream`, replayed one
        after the other, and what each gives is copied before the next. Raises RuntimeError if the
        pass cannot be captured, or if its replay gives other logits."""
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        main = torch.cuda.current_stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):  # what libraries set up at a first call is not captured
            expected = forward(*self.inputs)
        main.wait_stream(stream)
        self.output = like.output if like else torch.empty_like(expected)
        self.graph = torch.cuda.CUDAGraph()
        # only this thread is restricted while capturing
        with torch.cuda.graph(self.graph, pool, stream, capture_error_mode="thread_local"):
            self.output.copy_(forward(*self.inputs))
        self.output.fill_(torch.nan)  # so that nothing is left of the capture
        if differ(self.replay(self.inputs), expected):
            raise RuntimeError("the captured pass gives other logits")

    def replay(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        for place, tensor in zip(self.inputs, inputs):
            place.copy_(tensor)
        self.graph.replay()
        return self.output.clone()


class GraphRunner:
    """Stands in for `CausalLM.forward_eager`, for passes that give logits; prefill is always
    eager."""

    def __init__(self, model: CausalLM):
        self.model = model
        self.stream = torch.cuda.Stream()

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
                 visible: torch.Tensor) -> torch.Tensor:
        """Do as `CausalLM.forward_eager` does: return logits `[B, n, V]`, and write keys and
        values. Raises `UserError` for a model whose passes cannot be captured."""
        kv = self.model.kv
        seen = visible.shape[-1]
        widths = [width for width in WIDTHS if width < kv.slots] + [kv.slots]
        width = next(width for width in widths if width >= seen)

        def inputs(width: int) -> tuple[torch.Tensor, ...]:
            wider = torch.nn.functional.pad(visible, (0, width - seen))
            # Widths narrower than the text are captured, too. There a window would see nothing,
            # which is NaN in eager attention, so positions end where the width does.
            return tokens, positions.clamp(max=width - 1), slots, wider

        if tokens.shape[1] > LONGEST_CAPTURED:
            return self.model.forward_eager(*inputs(width))
        if (*tokens.shape, width) not in kv.graphs:
            graph = None
            for other in widths:
                graph = self.capture(inputs(other), graph)
                kv.graphs[*tokens.shape, other] = graph
        return kv.graphs[*tokens.shape, width].replay(inputs(width))

    def capture(self, inputs: tuple[torch.Tensor, ...],
                like: CapturedGraph | None) -> CapturedGraph:
        pool = next((graph.graph.pool() for graph in self.model.kv.graphs.values()), None)
        try:
            return CapturedGraph(self.model.forward_eager, inputs, pool, self.stream, like)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as problem:  # the cause, if the end of the capture failed because of it
            reason = first_line(problem.__context__ or problem)
            raise UserError(f"{self.model.model.config.model_type} passes cannot be captured as "
                            f"CUDA graphs ({reason}): start with --eager") from problem
