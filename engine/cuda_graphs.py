"""Passes as CUDA graphs, of compiled layers. Nothing here changes what is computed.

On a GPU a pass over few tokens is hundreds of kernels that take less time than Python takes to
launch them. As keys and values are written in place, into slots, such a pass is the same kernels at
the same addresses every time: it is captured once and replayed. Only the number of slots that
attention sees must not change from pass to pass, so it is rounded up to one of `WIDTHS`; what that
adds is not visible. At its first use, in a warm-up, a pass is captured for all widths.

Most of these kernels are so small that the GPU takes longer to start them than to run them. So the
warm-up of a pass has PyTorch compile the layers, which makes one kernel of several. All layers of a
kind share what is compiled. Models that PyTorch cannot compile are captured as they are.

Ranks that share a model capture the all-reduces of its passes, too. Nothing is decoded after a
capture that failed: it leaves PyTorch's allocator and streams in a state that nobody promises.
"""
import sys
import warnings

import torch
from torch.compiler import set_stance

from engine.check import differ
from engine.errors import UserError, first_line, lacks_memory
from engine.model import CausalLM

WIDTHS = [2 ** i for i in range(8, 24)]  # slots; see above
LONGEST_CAPTURED = 256  # tokens a row; beyond, kernels take longer than their launches


class CapturedGraph:
    """Holds a pass as a CUDA graph. A replay copies its inputs to where the captured ones are."""

    def __init__(self, model: CausalLM, inputs: tuple[torch.Tensor, ...], expected: torch.Tensor,
                 stream: torch.cuda.Stream, like: "CapturedGraph | None"):
        """`expected` are the logits of this pass, which has run before. `like` is a graph of the
        same pass over another number of slots, whose output buffer is used again. All graphs of a
        model share memory: they are captured on one `stream`, replayed one after the other, and
        what each gives is copied before the next. Raises RuntimeError if the pass cannot be
        captured, or if its replay gives other logits."""
        self.inputs = inputs
        pool = next((graph.graph.pool() for graph in model.kv.graphs.values()), None)
        self.output = like.output if like else torch.empty_like(expected)
        self.graph = torch.cuda.CUDAGraph()
        # only this thread is restricted while capturing
        with torch.cuda.graph(self.graph, pool, stream, capture_error_mode="thread_local"):
            self.output.copy_(model.forward_eager(*self.inputs))
        self.output.fill_(torch.nan)  # so that nothing is left of the capture
        if differ(self.replay(self.inputs), expected):
            raise RuntimeError("the captured pass gives other logits")

    def replay(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        for place, tensor in zip(self.inputs, inputs):
            place.copy_(tensor)
        self.graph.replay()
        return self.output.clone()


class GraphRunner:
    """Stands in for `CausalLM.forward_eager`, but not in prefill, which is always eager."""

    def __init__(self, model: CausalLM, compiled: bool):
        """Have the model's layers, the modules of its lists, `compiled` in captured passes."""
        self.stream = torch.cuda.Stream()
        self.stance = "default" if compiled else "force_eager"
        if compiled:
            torch.compiler.config.dynamic_sources = ".*layer_idx"  # else: compiled layer by layer
            torch._dynamo.config.recompile_limit = 64  # shapes, of all models of a family
            warnings.filterwarnings("ignore", module="torch._inductor")  # how it sums a softmax
            for module in model.model.modules():
                if isinstance(module, torch.nn.ModuleList):
                    for layer in module:
                        layer.compile()

    def __call__(self, model: CausalLM, tokens: torch.Tensor, positions: torch.Tensor,
                 slots: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Do as `CausalLM.forward_eager` does: return logits `[B, n, V]`, and write keys and
        values. Raises `UserError` for a model whose passes cannot be captured."""
        kv = model.kv
        seen = visible.shape[-1]
        widths = [width for width in WIDTHS if width < kv.slots] + [kv.slots]
        width = next(width for width in widths if width >= seen)

        def inputs(width: int) -> tuple[torch.Tensor, ...]:
            wider = torch.nn.functional.pad(visible, (0, width - seen))
            # Widths narrower than the text are captured, too. There a window would see nothing,
            # which is NaN in eager attention, so positions end where the width does.
            return tokens, positions.clamp(max=width - 1), slots, wider

        if tokens.shape[1] > LONGEST_CAPTURED:
            with set_stance("force_eager"):
                return model.forward_eager(*inputs(width))
        if (*tokens.shape, width) not in kv.graphs:
            graph = None
            for other in widths:
                graph = self.capture(model, inputs(other), graph)
                kv.graphs[*tokens.shape, other] = graph
        return kv.graphs[*tokens.shape, width].replay(inputs(width))

    def capture(self, model: CausalLM, inputs: tuple[torch.Tensor, ...],
                like: CapturedGraph | None) -> CapturedGraph:
        inputs = tuple(tensor.clone() for tensor in inputs)  # their places, from the warm-up on
        expected = self.warm_up(model, inputs)
        try:
            with set_stance(self.stance):
                return CapturedGraph(model, inputs, expected, self.stream, like)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as problem:  # of the capture's end: its cause says more
            reason = first_line(problem.__context__ or problem)
            raise UserError(f"{model.model.config.model_type} passes cannot be captured as CUDA "
                            f"graphs ({reason}): start with --passes eager") from problem

    def warm_up(self, model: CausalLM, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the logits of a pass, the first of its shape: what libraries set up there, and the
        compiler, is not captured. If the model cannot be compiled, say so, and go on without."""
        main = torch.cuda.current_stream()
        self.stream.wait_stream(main)
        try:
            with set_stance(self.stance), torch.cuda.stream(self.stream):
                return model.forward_eager(*inputs)
        except Exception as problem:  # no C compiler, or an operation that the compiler lacks
            if self.stance == "force_eager" or lacks_memory(problem):
                raise
            print(f"{model.model.config.model_type} layers run as they are, since they cannot be "
                  f"compiled: {first_line(problem)}", file=sys.stderr, flush=True)
            self.stance = "force_eager"
            return self.warm_up(model, inputs)
        finally:
            main.wait_stream(self.stream)
