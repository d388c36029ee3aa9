"""One Hugging Face causal language model behind one forward pass with KV slots and tree attention.

Batched speculation is awkward for one reason: rows accept different numbers of tokens, and a
branch of a speculation tree must see its own ancestors only. Both vanish if keys and values live
in numbered *slots* and the caller says, token by token,

    positions   where the token stands in the text (for the position embedding),
    slots       where its keys and values are written,
    mask        which slots it may see.

A verified token lives in the slot whose number is its position. Then
- a causal pass is slots = positions, visible = (slot <= position);
- rejecting tokens is lowering a length: stale slots are overwritten before anything can see them;
- rows of different length need no padding on the left: what lies above a row's length is masked;
- a tree grows in scratch slots above the trunk, each branch seeing the trunk up to its own fork,
  and its ancestors. With 3 tokens of text, K = 2, and one guess for each of 0, 1, 2 accepted:

    slot        0  1  2  | 3   4  | 5  6  7  | 8   9   10
    holds       x  y  t* | s1  s2 | a  b  c  | a1  b1  c1     a guesses "0 accepted", b "1", c "2"
    position    0  1  2  | 3   4  | 3  4  5  | 4   5   6
    b1 sees     x  x  x  | x   .  | .  x  .  | .   x   .

Hugging Face models take this unmodified: any object with a fitting `update` passes for
`past_key_values`, and a 4-D `attention_mask` is used as it is.
"""
import math
import time
from collections import Counter
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from runtime.settings import UserError, first_line

PROBE = 32  # tokens of the text with which a model is tried
PREFILL_CHUNK = 512  # tokens per prefill pass: bounds the memory of its attention mask


class Stopwatch:
    """Seconds spent in each kind of work: `with watch("verify"): ...`. A GPU takes the times itself
    (CUDA events): waiting for it would keep the host from launching what comes next."""

    def __init__(self, device: torch.device):
        self.device = device
        self.sums = {}
        self.events = []  # (name, start, end) of what a GPU may not have finished
        self.spans: list[tuple[str, float, float]] | None = None  # or receives (name, start, end)

    @contextmanager
    def __call__(self, name: str):
        on_gpu = self.device.type == "cuda"
        if on_gpu and self.spans is None:
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self.events.append((name, start, end))
            return
        started = time.perf_counter()
        yield
        if on_gpu:  # spans are in the host's time
            torch.cuda.synchronize(self.device)
        ended = time.perf_counter()
        self.add(name, ended - started)
        if self.spans is not None:
            self.spans.append((name, started, ended))

    def add(self, name: str, more: float) -> None:
        seconds, count = self.sums.get(name, (0.0, 0))
        self.sums[name] = (seconds + more, count + 1)

    def read(self) -> dict[str, tuple[float, int]]:
        """(seconds, count) of every kind of work since the last reading."""
        for name, start, end in self.events:
            end.synchronize()
            self.add(name, start.elapsed_time(end) / 1000)
        self.events = []
        sums = self.sums
        self.sums = {}
        return sums


class Pace:
    """Makes every decoding pass take at least `seconds`, as on the hardware whose latency that is:
    a pass that was computed faster sleeps for the rest, and a sleeping rank uses no core. 0: off.

    This assumes that a pass takes as long for one token as for hundreds, which holds on a GPU while
    weights, not arithmetic, bound a pass."""

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds
        self.passes = 0  # since the last reading
        self.kept = 0    # those that were fast enough

    @contextmanager
    def __call__(self):
        due = time.perf_counter() + self.seconds
        yield
        if not self.seconds:
            return
        remaining = due - time.perf_counter()
        self.passes += 1
        if remaining >= 0:
            self.kept += 1
            time.sleep(remaining)

    def read(self) -> tuple[int, int]:
        """(kept, passes) since the last reading."""
        counts = self.kept, self.passes
        self.kept = 0
        self.passes = 0
        return counts


class KVCache:
    """The keys and values of all layers: two buffers `[B, heads, slots, head size]` each, made at
    the first write."""

    def __init__(self, rows: int, slots: int):
        self.rows = rows
        self.slots = slots
        self.layers = {}
        self.uses = Counter()  # see cuda_graphs.py: uses and graphs die with the buffers
        self.graphs = {}

    def set_slots(self, slots: torch.Tensor, used: int) -> None:
        """The next pass writes to `slots` `[B, n]` and sees slots 0..used-1."""
        self.slot_mapping = slots
        self.used = used

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_,
               **__) -> list[torch.Tensor]:
        """Called by every attention layer: store `[B, heads, n, head size]`, return all to be
        seen."""
        if layer not in self.layers:
            self.layers[layer] = [new.new_zeros(*new.shape[:2], self.slots, new.shape[-1])
                                  for new in (keys, values)]
        for buffer, new in zip(self.layers[layer], (keys, values)):
            slots = self.slot_mapping.to(new.device)
            if len(slots) == 1:  # the same as below, in half the time
                buffer.index_copy_(2, slots[0], new)
            else:
                buffer.scatter_(2, slots[:, None, :, None].expand_as(new), new)
        return [buffer[:, :, :self.used] for buffer in self.layers[layer]]

    def get_seq_length(self, *_) -> int:
        return 0  # read by some models to number the positions, which we always give


class CausalLM:
    """A model, its KV slots, and the forward pass that both workers share. `B` rows, `n` tokens a
    row, `V` vocabulary."""

    def __init__(self, model: PreTrainedModel, vocab_size: int | None = None):
        """`vocab_size`: the V of the logits, by default its own; a draft is given its
        target's. Embeddings are often padded differently within a family: what the draft has
        beyond V is never proposed; what it lacks has q = 0, and is read as the last token that it
        knows."""
        self.model = model.eval()
        self.context = context_length(model.config)
        self.vocab_size = vocab_size or model.config.get_text_config().vocab_size
        self.last_token = model.get_input_embeddings().num_embeddings - 1
        self.device = model.get_input_embeddings().weight.device
        self.dtype = model.dtype
        self.kv = KVCache(0, 0)
        self.longest = 0  # text of all batches to come, in tokens; 0: unknown
        self.forward_fn = self.forward_eager  # `cuda_graphs.use_cuda_graphs` replaces it
        self.pace = Pace()
        self.check_slots()

    def allocate(self, rows: int, slots: int, longest: int) -> None:
        """Start a new batch of texts of up to `longest` tokens, with so many slots a row. The
        buffers of the last batch, and the graphs captured with them, serve again if they suffice;
        so there is room for the longest text of all at once. Raises `UserError` for too long
        texts."""
        limit = text_limit(self.model.config)
        if longest > limit:
            raise UserError(
                f"this {self.model.config.model_type} model treats texts of more than {limit} "
                f"tokens in a way that KV slots cannot express, and this run may need {longest}: "
                "shorten the prompt or --max-new-tokens")
        slots += max(0, self.longest - longest)
        if self.kv.rows != rows or self.kv.slots < slots:
            self.kv = KVCache(rows, slots)
        self.last_position = min(longest, self.context) - 1

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
                visible: torch.Tensor, logits: bool = True) -> torch.Tensor | None:
        """Logits `[B, n, V]` for tokens, positions and slots `[B, n]`, each of which sees the slots
        where `visible` `[B, n, slots in use]` is True. `logits=False` only fills the KV. Positions
        beyond the longest text are clamped to its end: such tokens are computed only to keep shapes
        static, and never used."""
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        if self.last_token < self.vocab_size - 1:  # only of a draft
            tokens = tokens.clamp(max=self.last_token)
        inputs = (tokens, positions.clamp(max=self.last_position), slots,
                  mask.masked_fill_(~visible, -torch.inf))
        if not logits:
            return self.forward_eager(*inputs, keep=1)
        with self.pace():
            computed = self.forward_fn(*inputs)
            if self.pace.seconds and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        return fit_vocabulary(computed, self.vocab_size)

    def forward_eager(self, tokens: torch.Tensor, positions: torch.Tensor,
                      slots: torch.Tensor, mask: torch.Tensor, keep: int = 0) -> torch.Tensor:
        """The pass, kernel by kernel: logits of the last `keep` tokens, or, if 0, of all."""
        self.kv.set_slots(slots, mask.shape[-1])
        return self.model(input_ids=tokens, position_ids=positions, attention_mask=mask[:, None],
                          past_key_values=self.kv, use_cache=True, logits_to_keep=keep).logits

    def causal(self, tokens: torch.Tensor, start: torch.Tensor,
               logits: bool = True) -> torch.Tensor | None:
        """Forward of tokens `[B, n]` that continue their rows at positions `start` `[B]` (host
        memory)."""
        count = tokens.shape[1]
        positions = start[:, None] + torch.arange(count)
        positions = to_device(positions, self.device)
        visible = torch.arange(int(start.max()) + count, device=self.device) <= positions[..., None]
        return self.forward(tokens, positions, positions, visible, logits)

    def prefill(self, prompts: list[list[int]]) -> None:
        """Fill the KV with all but the last token of every prompt: that one opens round 0."""
        longest = max(map(len, prompts)) - 1
        padded = [prompt[:-1] + [0] * (longest - len(prompt) + 1) for prompt in prompts]
        tokens = torch.tensor(padded, device=self.device)
        for start in range(0, longest, PREFILL_CHUNK):
            self.causal(tokens[:, start:start + PREFILL_CHUNK], torch.full((len(prompts),), start),
                        logits=False)

    def set_pace(self, milliseconds: float) -> None:
        """From now on each decoding pass takes at least so long. Raises `UserError` where this
        machine cannot compute a pass in that time at all."""
        self.allocate(1, 8, 8)
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            self.causal(torch.zeros(1, 1, dtype=torch.long, device=self.device), torch.tensor([0]))
            seconds.append(time.perf_counter() - started)
        fastest = 1000 * min(seconds)
        if 0 < milliseconds < fastest:
            raise UserError(f"--pace: a pass of this {self.model.config.model_type} model takes "
                            f"{fastest:.1f} ms on this machine, so it cannot keep a pace of "
                            f"{milliseconds:g} ms")
        self.pace = Pace(milliseconds / 1000)

    def check_slots(self) -> None:
        """Refuse a model that is not causal, or that computes something else through slots than
        plainly: a pass over stale slots and a branch in scratch slots must give the logits of an
        ordinary forward. What rounding explains is read off transformers' own decoding, token by
        token."""
        config = self.model.config
        if masks_by_slot(self.model):
            raise UserError(f"{config.model_type} models keep a causal mask of their own, by slot "
                            "and not by position, so their text would be wrong")
        n = int(min(PROBE, self.context, text_limit(config)))
        tokens = (7 * torch.arange(n, device=self.device)[None] + 1) % (self.last_token + 1)
        self.allocate(1, 2 * n, n)
        try:
            with torch.inference_mode():
                plain = self.model(tokens, use_cache=False).logits
                causal = self.is_causal(tokens, plain)
                past = self.model(tokens[:, :-3], use_cache=True).past_key_values
                stepwise = [self.model(token[None, None], past_key_values=past).logits
                            for token in tokens[0, -3:]]
            logits = self.through_slots(tokens)
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:
            raise UserError(f"{config.model_type} models cannot run with KV slots and tree "
                            f"attention ({type(problem).__name__}: {problem})") from problem
        if not plain.isfinite().all():
            raise UserError(f"this {config.model_type} model gives logits that are infinite or not "
                            f"numbers in {self.dtype}: a damaged file, or too narrow a --dtype")
        if not causal:
            raise UserError(f"this {config.model_type} model is not causal: its logits change with "
                            "later tokens, so it cannot write text token by token")
        plain = plain[:, -3:]
        rounding = distance(torch.cat(stepwise, 1), plain)
        if differ(logits, fit_vocabulary(plain, self.vocab_size), rounding):
            raise UserError(f"{config.model_type} models give other logits with KV slots and tree "
                            "attention, so their text would be wrong")

    def is_causal(self, tokens: torch.Tensor, plain: torch.Tensor) -> bool:
        """Do the logits of the first half stay when the second half of the tokens `[1, n]` changes?
        `plain`: the logits `[1, n, V]` before the change. Experts may round differently: 0.01%."""
        half = tokens.shape[1] // 2
        others = (tokens[:, half:] + 1) % (self.last_token + 1)
        changed = self.model(torch.cat([tokens[:, :half], others], 1), use_cache=False).logits
        before = plain[:, :half]
        after = changed[:, :half]
        return not differ(after, before, distance(torch.zeros_like(before), before) / 10_000)

    def through_slots(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits `[1, 3, V]` of the last three of the tokens `[1, n]`: one after a pass that leaves
        rejected tokens behind, two more out of order in scratch slots."""
        n = tokens.shape[1]
        scratch = (n + 2, n)
        self.causal(torch.cat([tokens[:, :-3], tokens[:, :3]], 1), torch.tensor([0]))
        logits = [self.causal(tokens[:, -3:-2], torch.tensor([n - 3]))]
        for step, slot in enumerate(scratch):
            seen = [other < n - 2 or other in scratch[:step + 1] for other in range(n + 3)]
            position, slot, seen = (torch.tensor([[part]], device=self.device)
                                    for part in (n - 2 + step, slot, seen))
            logits.append(self.forward(tokens[:, position[0, 0], None], position, slot, seen))
        return torch.cat(logits, 1)

    @property
    def eos_tokens(self) -> list[int]:
        """Every end-of-sequence id of the generation config."""
        eos = self.model.generation_config.eos_token_id
        return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def load(path: str, config: PretrainedConfig, dtype: torch.dtype, device: torch.device | str,
         max_memory: dict[int, int] | None = None) -> PreTrainedModel:
    """Load a checkpoint (Hub id or folder). `device` may also be a placement of accelerate's, such
    as "sequential", over the GPUs of `max_memory` (bytes by GPU)."""
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype,
                                                       device_map=device, max_memory=max_memory)
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ValueError("offloaded to the disk")  # which accelerate itself raises at times
    except Exception as problem:  # a corrupt file raises what its reader pleases
        if isinstance(problem, torch.OutOfMemoryError):
            raise
        said = first_line(problem)
        if max_memory and "offload" in said:
            said = f"it does not fit into the free memory of {len(max_memory)} GPUs"
        raise UserError(f"cannot load {path}: {said}") from problem
    return model


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor in host memory, or there already, on the device; the host does not wait for what the
    GPU is doing."""
    return tensor.to(device, non_blocking=True)


def weights_size(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of a model's weights; none are loaded."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).get_memory_footprint()


def context_length(config: PretrainedConfig) -> int:
    """The most tokens a text may have under this model, prompt included. Refuses what is no decoder
    with a context."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if config.is_encoder_decoder or context is None:
        raise UserError(f"{config.model_type} models cannot be decoded here: what is needed is a "
                        "causal language model with attention over its whole context "
                        "(max_position_embeddings)")
    return context


def text_limit(config: PretrainedConfig) -> float:
    """The longest text up to which every layer attends to everything and no position embedding
    depends on the length of the text: beyond it (windows, chunks, rotary embeddings of type
    longrope) masks over slots do not tell the whole story. Those of type dynamic stretch only
    beyond the context, where every text ends."""
    config = config.get_text_config()
    limits = []
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    if "chunked_attention" in layers:
        limits.append(config.attention_chunk_size)
    if "sliding_attention" in layers and getattr(config, "use_sliding_window", True):
        limits.append(getattr(config, "sliding_window", None))
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):  # one for all layers, or one for every type of layer
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            limits.append(rope["original_max_position_embeddings"])
    return min(filter(None, limits), default=math.inf)


def masks_by_slot(model: PreTrainedModel) -> bool:
    """Does a layer hold a causal mask `[1, 1, N, N]`? Its rows and columns are slot numbers, where
    a window, or a scratch slot beyond N, goes wrong (GPT-Neo)."""
    return any(buffer.dim() == 4 and buffer.shape == (1, 1, *buffer.shape[-1:] * 2)
               for buffer in model.buffers())


def distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The root mean square of their difference, where `expected` is finite (`fit_vocabulary`)."""
    known = expected.isfinite()
    return float((logits - expected)[known].float().square().mean().sqrt())


def differ(logits: torch.Tensor, expected: torch.Tensor, rounding: float = 0.0) -> bool:
    """Are they further apart than 8 times the given rounding, or a last digit? (Seen in 15
    families of random models, in four types: those that slots do not change up to 1.9 times,
    others from 15 on.)"""
    digit = max(torch.finfo(logits.dtype).eps, torch.finfo(torch.float32).eps)  # norms are float32
    last_digit = digit * distance(torch.zeros_like(expected), expected)
    return not distance(logits, expected) <= 8 * max(rounding, last_digit)  # so that NaN differs


def fit_vocabulary(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits `[..., V']` as `[..., vocab_size]`: cut, or filled up with -inf."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
