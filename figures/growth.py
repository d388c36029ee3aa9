"""What the passes of a round take while one size grows: it decodes nothing, and times passes of
random weights."""
from statistics import median
from timeit import repeat
from typing import Callable

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig

from engine.model import CausalLM
from figures.table import print_table
from sampling import Sampler

# what grows, and the context, batch size and vocabulary of each measurement
GROWTH = [*(("context", n, 1, 49152) for n in (256, 1024, 4096, 16384)),
          *(("batch size", 1024, b, 49152) for b in (1, 4, 16)),
          *(("vocabulary", 1024, 1, V) for V in (2048, 49152, 151936, 262144))]
DIMENSIONS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
              "num_key_value_heads")
LLAMA_1B = (2048, 8192, 16, 32, 8)
SHAPES = {"cpu": (LLAMA_1B, (576, 1536, 30, 9, 3)),  # SmolLM2 135M drafts
          "cuda": ((4096, 14336, 32, 32, 8), LLAMA_1B)}  # Llama 3.1 8B


@torch.inference_mode()
def growth(bench) -> list[dict]:
    """Time the passes of a round, in ms, with random weights, while one size grows. They run as in
    decoding. A verification and the trunk read K + 1 tokens, a pass over the tree as many as the
    budget, and a pass of the backup one. Beside each stands the time of its linear layers alone. If
    a miss yields as many tokens as a hit, SSD is faster than SD where more than (T_p - 1) / T_b of
    the rounds end in hits alone: where T_p > 1 other rounds take T_p + T_b here, not 1 + T_b."""
    settings = bench.settings
    device = bench.job.placement.device
    shapes = 2 * [(64, 64, 1, 2, 1)] if settings.quick else SHAPES[device.type]
    sizes = GROWTH[:1] if settings.quick else GROWTH
    models = [random_model(shape, bench.job.dtype, device) for shape in shapes]
    found = []
    for axis, context, rows, vocab_size in tqdm(sizes, "growth"):
        f = {"name": axis, "lookahead": settings.lookahead, "budget": settings.budget,
             "context": context, "batch size": rows, "vocabulary": vocab_size}
        found.append(f | pass_times(bench, models, context, rows, vocab_size))
    print_table("growth", tuple(found[0])[1:], found)
    return found


def random_model(shape: tuple, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Return a Llama of this shape (see `DIMENSIONS`) with random weights."""
    dimensions = dict(zip(DIMENSIONS, shape))
    config = LlamaConfig(**dimensions, tie_word_embeddings=True)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def pass_times(bench, models: list, context: int, rows: int, vocab_size: int) -> dict:
    """Return how many ms the passes of a round take behind `context` tokens, with T_p and T_b."""
    K = bench.settings.lookahead
    budget = bench.settings.budget
    most = max(K + 1, budget)
    device = bench.job.placement.device
    start = torch.full((rows,), context)
    tokens = torch.zeros(rows, most, dtype=torch.long, device=device)
    f = {}
    for name, model in zip(("target", "draft"), models):
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
        ours = bench.job.with_graphs(CausalLM(model))
        ours.allocate(rows, context, scratch=most)
        for n in sorted({1, K + 1, budget}):
            read = tokens[:, :n]
            work = f"{name}, {n}"
            f[work] = milliseconds(ours.causal, read, start)
            f[f"{work}, linear"] = milliseconds(linear_layers(model, read))
    logits = torch.randn(rows, most, vocab_size, device=device)
    f["sampling"] = milliseconds(Sampler(1.0).sample, logits, tokens.double(), 0)
    verification = f[f"target, {K + 1}"]
    ahead = f[f"draft, {K + 1}"] + K * f[f"draft, {budget}"]
    f["T_p"] = ahead / verification
    f["T_b"] = K * f["draft, 1"] / verification
    return f


def linear_layers(model: torch.nn.Module, tokens: torch.Tensor) -> Callable:
    """Return what runs the linear layers of a model alone, each on random numbers for `tokens`
    `[B, n]`. On a GPU it is a CUDA graph: Python would take longer to launch them than they do."""
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    inputs = {}
    for layer in layers:
        numbers = torch.randn(*tokens.shape, layer.in_features)
        inputs[layer.in_features] = numbers.to(layer.weight)

    def run() -> list[torch.Tensor]:
        outputs = [layer(inputs[layer.in_features]) for layer in layers]
        return outputs[-1:]

    if tokens.device.type != "cuda":
        return run
    run()  # what libraries set up at their first use is not captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    return lambda: graph.replay() or outputs


def milliseconds(work: Callable, *inputs) -> float:
    """Return how long this takes, the median of three, until [0] of what it returns is there.
    Copying a few numbers waits for all."""
    def wait() -> None:
        work(*inputs)[0][..., :1].cpu()

    return 1000 * median(repeat(wait, number=1, repeat=3))
