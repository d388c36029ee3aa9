"""One Hugging Face causal language model behind one forward pass with KV slots and tree attention.

Batched speculation is awkward for one reason: rows accept different numbers of tokens, and a branch of a
speculation tree must see its own ancestors only. Both vanish if keys and values live in numbered *slots* and the
caller says, token by token,

    positions   where the token stands in the text (for the position embedding),
    slots       where its keys and values are written,
    mask        which slots it may see.

A verified token lives in the slot whose number is its position. Then
- a causal pass is slots = positions, visible = (slot <= position);
- rejecting tokens is lowering a length: stale slots are overwritten before anything can see them;
- rows of different length need no padding on the left: what lies above a row's length is masked;
- a tree grows in scratch slots above the trunk, each branch seeing the trunk up to its own fork, and its ancestors.

Hugging Face models take this unmodified: any object with a fitting `update` passes for `past_key_values`, and a 4-D
`attention_mask` is used as it is. So do models whose heads are shared out to several processes (`load_sharded`): each
process keeps the slots of its own heads.

On a GPU a pass over few tokens is hundreds of kernels that take less time than Python takes to launch them. As slots
are written in place, such a pass is the same kernels at the same addresses every time: it is recorded once, as a CUDA
graph, and replayed (`Recording`). Only the number of slots that attention sees must not change from pass to pass, so it
is rounded up to a multiple of `BUCKET`.
"""
import math
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Callable

import torch
import torch.distributed.checkpoint
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

PREFILL_CHUNK = 512  # tokens per prefill pass: bounds the memory of its attention mask
BUCKET = 256  # slots; see above
RECORD_FROM = 3  # the use of a shape that is recorded: shrinking batches have shapes that occur once or twice
LONGEST_RECORDED = 64  # tokens a row; beyond, kernels take longer than their launches
PARALLEL_STYLES = {  # by transformers' names; None: whole on every rank, as without a plan
    "colwise": ColwiseParallel(), "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(), "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": None, "embedding_rowwise": None}


class UserError(Exception):
    """Something the user can mend; its text is one sentence that says how."""


class Stopwatch:
    """Seconds spent in each kind of work: `with watch("verify"): ...`. Waits for the GPU, where there is one."""

    def __init__(self, device: torch.device):
        self.device, self.sums = device, {}
        self.spans: list[tuple[str, float, float]] | None = None  # a list here receives (name, start, end) of all work

    @contextmanager
    def __call__(self, name: str):
        started = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        ended = time.perf_counter()
        seconds, count = self.sums.get(name, (0.0, 0))
        self.sums[name] = (seconds + ended - started, count + 1)
        if self.spans is not None:
            self.spans.append((name, started, ended))

    def read(self) -> dict[str, tuple[float, int]]:
        """(seconds, count) of every kind of work since the last reading."""
        sums, self.sums = self.sums, {}
        return sums


class Recording:
    """A pass as a CUDA graph. Inputs are copied to where they lay when it was recorded."""

    def __init__(self, run: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]):
        """Raises RuntimeError where the pass cannot be recorded, or where a replay would give something else."""
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        stream, main = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):  # what libraries set up at a first call must not be recorded
            expected = run(*self.inputs)
        main.wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # NCCL's threads do as they please
            self.output = run(*self.inputs)
        if differ(self.replay(inputs), expected):
            raise RuntimeError("the recorded pass gives other logits")

    def replay(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        for place, tensor in zip(self.inputs, inputs):
            place.copy_(tensor)
        self.graph.replay()
        return self.output.clone()


class KVSlots:
    """The keys and values of all layers: per layer two buffers `[B, heads, slots, head size]`, made at the first
    write. With them go the recorded passes, which know their addresses."""

    def __init__(self, batch: int, slots: int):
        self.batch, self.slots, self.keys, self.values = batch, slots, {}, {}
        self.uses: Counter[tuple] = Counter()  # passes by shape
        self.recordings: dict[tuple, Recording] = {}

    def aim(self, slots: torch.Tensor, used: int, rows: torch.Tensor | None) -> None:
        """The next pass writes to `slots` `[B, n]` and sees slots 0..used-1, of the batch rows `rows` `[B]` or of
        all."""
        self.target, self.used, self.rows = slots, used, rows

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_,
               **__) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by every attention layer: store `[B, heads, n, head size]`, return all that may be seen."""
        if layer not in self.keys:
            batch, heads, _, size = keys.shape
            self.keys[layer] = keys.new_zeros(batch, heads, self.slots, size)
            self.values[layer] = values.new_zeros(batch, heads, self.slots, values.shape[-1])
        return self.write(self.keys[layer], keys), self.write(self.values[layer], values)

    def write(self, buffer: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        slots = self.target.to(new.device)
        if self.rows is None:
            if len(slots) == 1:  # the same as below, and faster
                buffer.index_copy_(2, slots[0], new)
            else:
                buffer.scatter_(2, slots[:, None, :, None].expand_as(new), new)
            return buffer[:, :, :self.used]
        rows = self.rows.to(new.device)
        buffer[rows[:, None], :, slots] = new.transpose(1, 2)
        return buffer[rows, :, :self.used]

    def keep(self, rows: torch.Tensor) -> None:
        """Drop the batch rows that `rows` `[B]` (bool) does not select, unless none is left: then the batch is over,
        and the next one may use the buffers."""
        if not rows.any():
            return
        for buffers in (self.keys, self.values):
            for layer, buffer in buffers.items():
                buffers[layer] = buffer[rows.to(buffer.device)]
        self.batch = int(rows.sum())
        self.recordings.clear()  # of more rows, they have no use, and hold the old buffers

    def get_seq_length(self, *_) -> int:
        return 0  # read by some models to number the positions, which we always give


class CausalLM:
    """A model, its KV slots, and the forward pass that both workers share. `B` rows, `n` tokens a row, `V`
    vocabulary."""

    def __init__(self, network: PreTrainedModel, vocab_size: int | None = None):
        """`vocab_size`: the V of the logits, by default the network's own; a draft is given its target's.
        Embeddings are often padded differently within a family: what the draft has beyond V is never proposed; what
        it lacks has q = 0, and is read as the last token that it knows."""
        self.network = network.eval()
        self.context = context_length(network.config)
        self.vocab_size = vocab_size or network.config.get_text_config().vocab_size
        self.last_token = network.get_input_embeddings().num_embeddings - 1
        self.device = network.get_input_embeddings().weight.device
        self.dtype = network.dtype
        self.kv = KVSlots(0, 0)
        self.records = False  # no CUDA graphs, unless `speed_up` is called
        self.check_slots()

    def speed_up(self, graphs: bool, compiled: bool) -> "CausalLM":
        """Let torch.compile fuse the kernels of a pass, and, of a model on one GPU, record passes as CUDA graphs."""
        if compiled:
            self.network.compile(dynamic=True)
        devices = {parameter.device for parameter in self.network.parameters()}
        self.records = graphs and self.device.type == "cuda" and devices == {self.device}
        return self

    def allocate(self, batch: int, longest: int, spare: int = 0) -> None:
        """Start a new batch of so many rows: slots for texts of up to `longest` tokens, and `spare` ones for
        speculation. Those of the last batch serve again if they suffice."""
        limit = text_limit(self.network.config)
        if limit is not None and longest > limit:
            raise UserError(f"this {self.network.config.model_type} model treats texts of more than {limit} tokens in "
                            f"a way that KV slots cannot express, and this run may need {longest}: shorten the prompt "
                            "or --max-new-tokens")
        if self.kv.batch != batch or self.kv.slots < longest + spare:
            self.kv = KVSlots(batch, longest + spare)
        self.last_position = min(longest, self.context) - 1

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor,
                rows: torch.Tensor | None = None, logits: bool = True) -> torch.Tensor | None:
        """Logits `[B, n, V]` for tokens, positions and slots `[B, n]` and an additive mask `[B, n, slots in use]`.

        `rows` `[B]` selects batch rows (default: all). `logits=False` only fills the KV. Positions beyond the
        longest text are clamped to its end: such tokens are computed only to keep shapes static, and never used."""
        positions = positions.clamp(max=self.last_position)  # here, because a recording outlives the batch
        if self.records and logits and rows is None and tokens.shape[1] <= LONGEST_RECORDED:
            return self.replay(tokens, positions, slots, mask)
        return self.run(tokens, positions, slots, mask, rows, logits)

    def replay(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
               mask: torch.Tensor) -> torch.Tensor:
        """A pass that is recorded when its shape is used for the `RECORD_FROM`th time, and replayed from then on."""
        seen = min(math.ceil(mask.shape[-1] / BUCKET) * BUCKET, self.kv.slots)
        mask = torch.nn.functional.pad(mask, (0, seen - mask.shape[-1]), value=-torch.inf)
        inputs, shape, recordings = (tokens, positions, slots, mask), (*tokens.shape, seen), self.kv.recordings
        self.kv.uses[shape] += 1
        if self.kv.uses[shape] == RECORD_FROM:
            try:
                recordings[shape] = Recording(self.run, inputs)
            except RuntimeError as problem:
                print(f"{self.network.config.model_type} passes cannot be recorded as CUDA graphs and run eagerly: "
                      f"{problem}", file=sys.stderr)
                self.records = False
        return recordings[shape].replay(inputs) if shape in recordings else self.run(*inputs)

    def run(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor,
            rows: torch.Tensor | None = None, logits: bool = True) -> torch.Tensor | None:
        """The pass, kernel by kernel."""
        self.kv.aim(slots, mask.shape[-1], rows)
        output = self.network(
            input_ids=tokens.clamp(max=self.last_token), position_ids=positions,
            attention_mask=mask[:, None], past_key_values=self.kv, use_cache=True, logits_to_keep=0 if logits else 1)
        return fit_vocabulary(output.logits, self.vocab_size) if logits else None

    def causal(self, tokens: torch.Tensor, start: torch.Tensor, rows: torch.Tensor | None = None,
               logits: bool = True) -> torch.Tensor | None:
        """Forward of tokens `[B, n]` that continue their rows at positions `start` `[B]` (host memory)."""
        count = tokens.shape[1]
        positions = start[:, None] + torch.arange(count)
        positions = positions.to(self.device, non_blocking=True)  # else the host waits for the pass before
        visible = torch.arange(int(start.max()) + count, device=self.device) <= positions[..., None]
        return self.forward(tokens, positions, positions, self.additive(visible), rows, logits)

    def additive(self, visible: torch.Tensor) -> torch.Tensor:
        """A boolean mask as the term that is added to attention scores: 0 where visible, else -inf."""
        return torch.zeros(visible.shape, dtype=self.dtype, device=visible.device).masked_fill_(~visible, -torch.inf)

    def prefill(self, prompts: list[list[int]]) -> None:
        """Fill the KV with all but the last token of every prompt: that one opens round 0."""
        longest = max(map(len, prompts)) - 1
        tokens = torch.tensor([prompt[:-1] + [0] * (longest - len(prompt) + 1) for prompt in prompts],
                              device=self.device)
        for start in range(0, longest, PREFILL_CHUNK):
            self.causal(tokens[:, start:start + PREFILL_CHUNK], torch.full((len(prompts),), start), logits=False)

    def seconds_per_pass(self, rows: int, count: int, length: int) -> float:
        """Seconds (median of 5) of a causal pass over `count` tokens in each of `rows` rows that have `length`
        tokens."""
        self.allocate(rows, length + count)
        tokens, start = torch.zeros(rows, count, dtype=torch.long, device=self.device), torch.full((rows,), length)
        seconds = []
        for _ in range(7 + RECORD_FROM * self.records):
            watch = Stopwatch(self.device)
            with watch("pass"):
                self.causal(tokens, start)
            seconds.append(watch.read()["pass"][0])
        return sorted(seconds[-5:])[2]

    def check_slots(self) -> None:
        """Refuse a model that computes something else through slots than plainly: a pass over stale slots and a
        branch in scratch slots must give the logits of an ordinary forward."""
        tokens = torch.arange(1, 6, device=self.device)[None]
        self.allocate(1, 10)
        try:
            with torch.inference_mode():
                plain = fit_vocabulary(self.network(input_ids=tokens, use_cache=False).logits, self.vocab_size)[0, 2:]
            self.causal(tokens[:, [0, 1, 4, 0]], torch.tensor([0]))
            logits = [self.causal(tokens[:, 2:3], torch.tensor([2]))]
            for step, slot in enumerate((6, 9)):  # the fourth and fifth token, out of order in scratch slots
                visible = torch.tensor([[[other < 3 or other in (6, 9)[:step + 1] for other in range(10)]]])
                logits.append(self.forward(tokens[:, 3 + step, None], torch.tensor([[3 + step]], device=self.device),
                                           torch.tensor([[slot]], device=self.device),
                                           self.additive(visible.to(self.device))))
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:
            raise UserError(f"{self.network.config.model_type} models cannot run with KV slots and tree attention "
                            f"({type(problem).__name__}: {problem})") from problem
        if differ(torch.cat(logits, 1)[0], plain):
            raise UserError(f"{self.network.config.model_type} models give other logits with KV slots and tree "
                            "attention, so their text would be wrong")

    @property
    def eos_tokens(self) -> list[int]:
        """Every end-of-sequence id of the generation config."""
        eos = self.network.generation_config.eos_token_id
        return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def load(path: str, config: PretrainedConfig, dtype: torch.dtype, device: torch.device | str,
         vocab_size: int | None = None, max_memory: dict[int, int] | None = None) -> CausalLM:
    """Load a checkpoint (Hub id or folder). `device` may also be a placement of accelerate's, such as "sequential",
    over the GPUs of `max_memory` (bytes by GPU)."""
    logging.disable_progress_bar()
    try:
        network = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, device_map=device,
                                                       max_memory=max_memory)
    except (OSError, ValueError) as problem:
        raise UserError(f"cannot load {path}: {str(problem).splitlines()[0]}") from problem
    if any(parameter.is_meta for parameter in network.parameters()):
        raise UserError(f"{path} does not fit into the free memory of {len(max_memory)} GPUs")
    return CausalLM(network, vocab_size)


def parallel_plan(config: PretrainedConfig, shards: int) -> dict[str, ParallelStyle]:
    """What each of `shards` processes computes of every layer: the plan that comes with the architecture, in PyTorch's
    terms. Refuses a model without one, or whose parts cannot be shared evenly."""
    styles = config.base_model_tp_plan
    if not styles or not PARALLEL_STYLES.keys() >= set(styles.values()) or getattr(config, "quantization_config", None):
        raise UserError(f"{shards} target ranks cannot share this {config.model_type} model: it has no tensor-parallel "
                        "plan, or one for layers (experts, quantized ones) that are not split here; start two ranks")
    sizes = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    divisor = math.gcd(*(getattr(config, name, None) or 0 for name in sizes))
    if divisor % shards:
        raise UserError(f"{shards} target ranks cannot share this {config.model_type} model's heads and layers "
                        f"evenly: the number of target ranks must divide {divisor}")
    return {name: PARALLEL_STYLES[style] for name, style in styles.items() if PARALLEL_STYLES[style]}


def load_sharded(path: str, config: PretrainedConfig, dtype: torch.dtype, plan: dict[str, ParallelStyle],
                 mesh: DeviceMesh) -> CausalLM:
    """Load a checkpoint (Hub id or folder, safetensors) over the processes of `mesh`, all of which call this, and later
    compute every pass together. Nowhere is it loaded whole: a process reads its part of the weights that `plan`
    splits, and all of the others."""
    with init_empty_weights():  # of parameters, not of buffers: those that no checkpoint holds are computed here
        network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    parallelize_module(network.base_model, mesh, plan)
    weights = {name: torch.empty_like(tensor, device=mesh.device_type)
               for name, tensor in network.state_dict().items() if name not in network.all_tied_weights_keys}
    try:
        folder = path if Path(path).is_dir() else snapshot_download(path, allow_patterns="model*.safetensors")
        torch.distributed.checkpoint.load(weights, storage_reader=HuggingFaceStorageReader(folder),
                                          process_group=mesh.get_group())
    except (OSError, CheckpointException) as problem:
        if isinstance(problem, CheckpointException):
            problem = next(iter(problem.failures.values()))[0]
        raise UserError(f"cannot load {path} in parts: {str(problem).splitlines()[0]}") from problem
    network.load_state_dict(weights, strict=False, assign=True)
    network.tie_weights()
    with suppress(OSError):  # there need not be one
        network.generation_config = GenerationConfig.from_pretrained(path)
    return CausalLM(network.to(mesh.device_type))


def context_length(config: PretrainedConfig) -> int:
    """The most tokens a text may have under this model, prompt included. Refuses what is no decoder with a
    context."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if config.is_encoder_decoder or context is None:
        raise UserError(f"{config.model_type} models cannot be decoded here: a causal language model with attention "
                        "over its whole context (max_position_embeddings) is needed")
    return context


def text_limit(config: PretrainedConfig) -> int | None:
    """The longest text, if there is one, up to which every layer attends to everything and no position embedding
    depends on the length of the text: beyond it (windows, chunks, stretched rotary embeddings) masks over slots do
    not tell the whole story."""
    config = config.get_text_config()
    limits = []
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    if "chunked_attention" in layers:
        limits.append(config.attention_chunk_size)
    if "sliding_attention" in layers and getattr(config, "use_sliding_window", True):
        limits.append(getattr(config, "sliding_window", None))
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        limits.append(rope.get("original_max_position_embeddings")
                      or getattr(config, "original_max_position_embeddings", config.max_position_embeddings))
    return min(filter(None, limits), default=None)


def differ(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Do they differ, both of one shape, by more than rounding explains?"""
    known = expected.isfinite()  # not what `fit_vocabulary` filled up
    error, largest = (logits - expected)[known].abs().max(), expected[known].abs().max()
    return not error <= (1e-3 if torch.finfo(logits.dtype).bits >= 32 else 0.1) * largest  # so that NaN differs


def fit_vocabulary(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits `[..., V']` as `[..., vocab_size]`: cut, or filled up with -inf."""
    missing = vocab_size - logits.shape[-1]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[..., :vocab_size]
