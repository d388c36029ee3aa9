"""What several test files share: random models, decoders in this process, `generate`, ranks.

Random models stand in for language models: small, in float64 (so that no tie is decided by
rounding), with large weights (so that their distributions are far from uniform). A draft is its
target plus noise.
"""
import copy
import itertools
import os
import sys
from functools import lru_cache

import torch
import torch.distributed as dist
import torch.multiprocessing
from transformers import AutoConfig, AutoModelForCausalLM

from cli.settings import Settings
from engine.model import CausalLM
from run.decoder import Decoder
from run.job import Models
from saguaro import Sequences, decode

RAGGED = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 12]]  # prompts
torch.set_num_threads(1)  # the models here are too small to share


@lru_cache(maxsize=None)
def random_model(family: str = "llama", seed: int = 0, **changes):
    """A random model of a Hugging Face architecture, in float64. Made once: to change it, copy
    it."""
    shape = dict(vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                 num_key_value_heads=4, intermediate_size=48, max_position_embeddings=64,
                 initializer_range=0.3, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **shape | changes)
    return AutoModelForCausalLM.from_config(config).double().eval()


def windowed(size: int) -> list[tuple[str, dict]]:
    """Families of random models, and changes: all layers have a window of `size` tokens; one of two
    has; all have chunks."""
    return [("mistral", dict(sliding_window=size, num_key_value_heads=2)),
            ("qwen2", dict(sliding_window=size, use_sliding_window=True, max_window_layers=1)),
            ("llama4_text", dict(attention_chunk_size=size, head_dim=8, num_local_experts=2,
                                 intermediate_size_mlp=48))]


def imitation(target, noise: float):
    """A draft: the target with noise on its weights, in units of each tensor's standard
    deviation."""
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.std() > 0:
                normal = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
                weight += noise * weight.std() * normal
    return draft


def settings(mode: str = "ssd", **choices) -> Settings:
    """Settings of the command line, with defaults for small models."""
    ours = dict(lookahead=3, budget=7, acceptance_rate=0.7, dtype="float64", device="cpu")
    return Settings(mode=mode, **ours | choices)


def make_decoder(target, draft=None, mode: str = "ssd", **choices) -> Decoder:
    """A decoder of two Hugging Face models, in this process."""
    target = CausalLM(target)
    draft = CausalLM(draft, target.vocab_size) if mode != "ar" else None
    models = Models(target, draft, target.context, target.vocab_size)
    return Decoder(settings(mode, **choices), models)


def texts_and_rounds(decoder: Decoder, prompts: list[list[int]]) -> tuple[list[list[int]], list]:
    """The new tokens of every prompt, and (row, new tokens, source) of every row and round."""
    rounds = []
    texts = decoder(prompts, lambda *new: rounds.append(new))
    return texts, rounds


def run_rounds(decoder: Decoder, prompts: list[list[int]], rounds: int) -> list:
    """Algorithm 1: the (speculation, outcome) of all rounds, round 0 first. No row finishes."""
    max_new_tokens = (rounds + 2) * (decoder.lookahead + 1)
    sequences = Sequences(prompts, max_new_tokens, context=sys.maxsize, eos=[])
    decoding = decode(decoder.target, decoder.speculator(sequences), sequences, decoder.lookahead)
    return list(itertools.islice(decoding, rounds + 1))


def greedy_reference(model, prompts: list[list[int]], max_new_tokens: int,
                     eos=()) -> list[list[int]]:
    """What transformers' own `generate` writes after each prompt."""
    texts = []
    for prompt in prompts:
        text = model.generate(torch.tensor([prompt]), do_sample=False,
                              max_new_tokens=max_new_tokens, pad_token_id=0,
                              attention_mask=torch.ones(1, len(prompt)).long(),
                              eos_token_id=list(eos) or None)
        texts.append(text[0, len(prompt):].tolist())
    return texts


def assert_close(actual: torch.Tensor, expected: torch.Tensor, within: float = 1e-12) -> None:
    """Assert equality up to rounding, which depends on the order of a sum."""
    torch.testing.assert_close(actual, expected, rtol=within, atol=within)


@lru_cache
def forks():
    """A context whose processes begin with all imports done; or, where forks are risky (macOS) or
    unknown (Windows), do them."""
    if sys.platform != "linux":
        return torch.multiprocessing.get_context("spawn")
    from multiprocessing import forkserver
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    forkserver.ensure_running()
    return context


def one_rank(given: tuple) -> tuple:
    rank, environment, job, arguments = given
    os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    result = job(*arguments)  # of a failed job models may live on: NCCL would wait for their graphs
    if dist.is_initialized():
        dist.destroy_process_group()
    return rank, result


def in_ranks(count: int, job, *arguments, seconds: float = 400) -> list:
    """What `job(*arguments)` returns (no tensors) in each of `count` processes with the environment
    of torchrun's ranks. `job` is a function of a module; each rank must import it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
                   "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
                   "OMP_NUM_THREADS": "1"}  # of several threads on busy cores each spins
    given = [(rank, environment, job, arguments) for rank in range(count)]
    with forks().Pool(count, maxtasksperchild=1) as pool:  # who is left at the end is killed
        answers = pool.imap_unordered(one_rank, given)
        results = dict(answers.next(seconds) for _ in range(count))  # the first failure at once
    return [results[rank] for rank in range(count)]
