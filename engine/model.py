"""One Hugging Face causal language model behind one forward pass with KV slots and tree attention.

Batched speculation is awkward for two reasons: rows accept different numbers of tokens, and a
branch of a speculation tree must see its own ancestors only. Both vanish if keys and values live
in numbered *slots* and the caller says, token by token,

    positions   where the token stands in the text (for the position embedding),
    slots       where its keys and values are written,
    visible     which slots it may see.

A verified token lives in the slot whose number is its position. Then
- a causal pass is slots = positions, visible = (slot <= position);
- rejecting tokens is lowering a length: stale slots are overwritten before anything can see them;
- rows of different length need no padding on the left: what lies above a row's length is masked;
- the slots that a token sees hold its text in order: counting them gives the position that each
  holds, which is all that a layer with a window, or chunks, must know;
- a tree grows in scratch slots above the trunk, each branch seeing the trunk up to its own fork,
  and its ancestors. With 3 tokens of text, K = 2, and one guess for each of 0, 1, 2 accepted:

    slot        0  1  2  | 3   4  | 5  6  7  | 8   9   10
    holds       x  y  t* | s1  s2 | a  b  c  | a1  b1  c1     a guesses "0 accepted", b "1", c "2"
    position    0  1  2  | 3   4  | 3  4  5  | 4   5   6
    b1 sees     x  x  x  | x   .  | .  x  .  | .   x   .

Hugging Face models take this unmodified: any object with a fitting `update` passes for their cache,
and a 4-D `attention_mask` is used as it is. Any module with the same call can stand in for one.
"""
import inspect
import re
import threading
import weakref
from contextlib import ExitStack, contextmanager
from typing import Callable, Iterator

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from engine.attention import FIRST_SEEN, attention_mask, layer_types
from engine.errors import UserError, reported_as
from engine.timing import PacedClock

PREFILL_CHUNK = 512  # tokens per prefill pass: bounds the memory of its attention mask
PENALTIES = {  # of a generation config, which nobody applies here, and what means none
    "repetition_penalty": 1, "no_repeat_ngram_size": 0, "exponential_decay_length_penalty": None,
    "bad_words_ids": None, "suppress_tokens": None, "begin_suppress_tokens": None,
    "sequence_bias": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "min_length": 0, "min_new_tokens": 0, "guidance_scale": 1, "min_p": 0, "typical_p": 1}
IN_USE = weakref.WeakKeyDictionary()  # of each module, by whatever `CausalLM`: see `check_model`
LOADING = threading.Lock()  # meanwhile transformers changes what all its models share


def loading_bar(bar: type, given: tuple, options: dict):
    """Return a bar of transformers': on a terminal, after two seconds, until loading has ended."""
    return bar(*given, **options | {"delay": 2, "leave": False, "disable": None})


logging.set_tqdm_hook(loading_bar)
# what `load` says in a sentence, transformers would first say in a table
logging.get_logger("transformers.modeling_utils").addFilter(
    lambda record: not (LOADING.locked() and re.search("MISSING|MISMATCH", str(record.msg))))


class KVCache:
    """Stands in for the cache of transformers. It holds keys and values: per layer two buffers
    `[rows, heads, slots, head size]`, made at the first write. Smaller batches use the first rows.
    A pass writes to the slots of `slot_mapping` `[B, n]` and sees slots 0..`used`-1."""

    def __init__(self, rows: int, slots: int):
        self.rows = rows
        self.slots = slots
        self.layers = {}
        self.graphs = {}  # see cuda_graphs.py: they die with the buffers

    @torch.compiler.disable  # its dictionary would have every layer compiled anew
    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_,
               **__) -> list[torch.Tensor]:
        """Store keys and values `[B, heads, n, head size]` of a layer, and return all that are in
        use. Every attention layer calls this."""
        if layer not in self.layers:
            self.layers[layer] = [
                new.new_zeros(self.rows, new.shape[1], self.slots, new.shape[-1])
                for new in (keys, values)]
        slots = self.slot_mapping
        buffers = [buffer[:len(keys)] for buffer in self.layers[layer]]
        for buffer, new in zip(buffers, (keys, values)):
            if len(slots) == 1:  # the same as below, in half the time
                buffer.index_copy_(2, slots[0], new)
            else:
                buffer.scatter_(2, slots[:, None, :, None].expand_as(new), new)
        return [buffer[:, :, :self.used] for buffer in buffers]

    def get_seq_length(self, *_) -> int:
        return 0  # some models number positions by it; we give them (see `context_length`)


class CausalLM:
    """Holds a model and its KV slots, with the forward pass that both workers share. B is the
    number of rows, n that of tokens in a row, V the size of the vocabulary."""

    def __init__(self, model: PreTrainedModel, vocab_size: int | None = None):
        """Of a `model` its `config`, `dtype`, `get_input_embeddings` and `forward` are used, and of
        a target its `generation_config`. `vocab_size` is the V of the logits. A draft is given its
        target's, because families pad embeddings differently: it proposes no id beyond V, gives
        ids that it lacks q = 0, and reads its own last id in their place."""
        self.model = model
        text = model.config.get_text_config()
        if getattr(text, "output_router_logits", False):  # for training: a loss, by another mask
            text.output_router_logits = False
        self.context = context_length(model.config)
        self.vocab_size = vocab_size or model.config.get_text_config().vocab_size
        self.last_token = model.get_input_embeddings().num_embeddings - 1
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.dtype = model.dtype
        names = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"  # before 5.24
        self.kv = KVCache(0, 0)
        self.at_work = threading.Lock()
        self.module_at_work = IN_USE.setdefault(model, threading.RLock())
        # or a `GraphRunner`. It is given this model: two that hold each other would outlive their
        # last user, and so would their CUDA graphs.
        self.forward_fn: Callable[..., torch.Tensor] = CausalLM.forward_eager
        self.clock = PacedClock(self.device)

    @contextmanager
    def for_one(self) -> Iterator[None]:
        """Keep the KV slots, and from other threads the module, from others in this block. Raises
        `UserError` if others have them."""
        with ExitStack() as until_done:
            for lock in (self.at_work, self.module_at_work):
                if not lock.acquire(blocking=False):
                    raise UserError("these models are decoding another batch: one at a time")
                until_done.callback(lock.release)
            yield

    @torch.inference_mode()
    def allocate(self, rows: int, max_length: int, scratch: int) -> None:
        """Make room for a batch: `max_length` slots a row for its text, and `scratch` more.
        Buffers, and the CUDA graphs on them, are kept if they are large enough."""
        self.model.eval()  # without dropout: somebody may train it between batches
        slots = max_length + scratch
        slots += -slots % 8  # else attention would pad the mask in every layer
        if self.kv.rows < rows or self.kv.slots < slots:
            self.kv = KVCache(max(rows, self.kv.rows), max(slots, self.kv.slots))
        for buffers in self.kv.layers.values():
            for buffer in buffers:  # masks hide what a batch has left, but for NaN: 0 x NaN is NaN
                buffer[:rows].zero_()
        self.last_position = min(max_length, self.context) - 1

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
                visible: torch.Tensor, logits: bool = True) -> torch.Tensor:
        """Return logits `[B, n, V]` for tokens, positions and slots `[B, n]`. A token sees the
        slots where `visible` `[B, n, slots in use]` is True, and in their order these hold its
        text. Logits of ids that the model lacks are -inf. Positions beyond the longest text are
        clamped: such tokens keep shapes static, and what follows from their logits is cut off.
        `logits=False` only fills the KV, unpaced."""
        if self.last_token < self.vocab_size - 1:  # a draft that lacks the target's last ids
            tokens = tokens.clamp(max=self.last_token)
        positions = positions.clamp(max=self.last_position)
        if not logits:
            with torch.compiler.set_stance("force_eager"):
                return self.forward_eager(tokens, positions, slots, visible, keep=1)
        self.clock.passes += 1  # of the work at hand, for the pace
        given = self.forward_fn(self, tokens, positions, slots, visible)[..., :self.vocab_size]
        missing = self.vocab_size - given.shape[-1]
        return torch.nn.functional.pad(given, (0, missing), value=-torch.inf) if missing else given

    def forward_eager(self, tokens: torch.Tensor, positions: torch.Tensor,
                      slots: torch.Tensor, visible: torch.Tensor, keep: int = 0) -> torch.Tensor:
        """Run the pass kernel by kernel. Returns the logits of the last `keep` tokens (0: all)."""
        self.kv.slot_mapping = slots
        self.kv.used = visible.shape[-1]
        mask = attention_mask(self.model.config.get_text_config(), positions, visible, self.dtype)
        with torch.autocast(self.device.type, enabled=False):  # --dtype decides, as of the buffers
            return self.model(input_ids=tokens, position_ids=positions, attention_mask=mask,
                              use_cache=True, logits_to_keep=keep,
                              **{self.cache_name: self.kv}).logits

    def causal(self, tokens: torch.Tensor, start: torch.Tensor,
               logits: bool = True) -> torch.Tensor:
        """Read tokens `[B, n]` that continue their rows at `start` `[B]`, given in host memory."""
        count = tokens.shape[1]
        positions = to_device(start[:, None] + torch.arange(count), self.device)  # [B, n]
        visible = torch.arange(int(start.max()) + count, device=self.device) <= positions[..., None]
        return self.forward(tokens, positions, positions, visible, logits)

    def prefill(self, prompts: list[list[int]]) -> None:
        """Fill the KV with all but the last token of every prompt. That one is read in round 0."""
        rows = []
        for prompt in prompts:
            rows.append(torch.tensor(prompt[:-1], dtype=torch.long))
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        tokens = to_device(padded, self.device)
        for begin in range(0, tokens.shape[1], PREFILL_CHUNK):
            piece = tokens[:, begin:begin + PREFILL_CHUNK]
            start = torch.full((len(prompts),), begin)
            self.causal(piece, start, logits=False)

    @property
    def eos_tokens(self) -> list[int]:
        """Return every end-of-sequence id of the generation config."""
        given = self.model.generation_config.eos_token_id
        if given is None:
            return []
        return given if isinstance(given, list) else [given]

    @property
    def penalties(self) -> list[str]:
        """Return what the generation config asks for, by which the text would be another one."""
        given = vars(self.model.generation_config)
        return [name for name, none in PENALTIES.items() if given.get(name) not in (None, none)]


def load(path: str, config: PretrainedConfig, dtype: torch.dtype,
         device: torch.device | str) -> PreTrainedModel:
    """Load a checkpoint (Hub id or folder)."""
    with LOADING, reported_as(f"cannot load {path}"):
        model, info = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, device_map=device, output_loading_info=True,
            ignore_mismatched_sizes=True, trust_remote_code=False)
        # such weights transformers has drawn at random
        if info["missing_keys"]:
            raise ValueError(f"its files lack {min(info['missing_keys'])}")
        if info["mismatched_keys"]:
            name, given, expected = min(info["mismatched_keys"])
            raise ValueError(f"{name} has the shape {[*given]}, but by config.json {[*expected]}")
    return model


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on the device, from host memory or from there. The host does not wait for
    what the GPU is doing."""
    return tensor.to(device, non_blocking=True)


def check_family(config: PretrainedConfig) -> None:
    """Raise `UserError` for a model that is no decoder with a context, or has layers that do not
    attend."""
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    others = ", ".join(sorted(layer_types(text) - FIRST_SEEN.keys()))
    if config.is_encoder_decoder or context is None or others:
        raise UserError(f"{config.model_type} models cannot be decoded here: only causal language "
                        "models with a context (max_position_embeddings) and full, sliding or "
                        f"chunked attention in all layers{others and ', not '}{others}")


def context_length(config: PretrainedConfig) -> int:
    """Return the most tokens that a text may have, prompt included. Beyond that, positions have no
    embedding, or the model computes something else. Raises `UserError` as `check_family` does."""
    check_family(config)
    text = config.get_text_config()
    limits = [text.max_position_embeddings]
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):  # one for all layers, or one for every type of layer
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            limits.append(rope["original_max_position_embeddings"])  # all are embedded anew
    if getattr(text, "attn_temperature_tuning", False):
        # Llama 4 scales attention by a position that it asks its cache for
        limits.append(text.floor_scale - 1)
    if hasattr(text, "keep_window_size"):
        limits.append(text.keep_window_size)  # Doge drops tokens
    return min(limits)
