"""Tensor parallelism (Shoeybi et al. 2019, Megatron-LM): a target that several processes share.

A block of a transformer is two linear maps, and between them what works head by head, or unit by
unit:

    B f(A x) = sum over ranks r of  B_r f(A_r x)    A_r: some rows of A, B_r: as many columns of B

so each process keeps its rows of every A ("colwise") and its columns of every B ("rowwise"), and
one all-reduce after every B adds the parts up. Which layers these are says the plan that comes with
the architecture, `config.base_model_tp_plan`. Layers of other known styles stay whole on every
rank, which is always right: in these styles a layer takes and gives whole activations.
"""
import json
import re
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from runtime.settings import UserError, first_line

SPLIT = {"colwise": 0, "rowwise": 1}  # the dimension of a weight `[out, in]` that is shared out
WHOLE = {"colwise_gather_output", "rowwise_split_input", "replicated_with_grad_allreduce",
         "embedding_rowwise"}


def check_shardable(config: PretrainedConfig, ranks: int, enough: str = "") -> None:
    """Raise `UserError` for a model that `ranks` processes cannot share; nothing is loaded.
    `enough`: how many ranks to start instead, in words."""
    kind = config.model_type
    styles = set((config.base_model_tp_plan or {}).values())
    known = SPLIT.keys() <= styles <= SPLIT.keys() | WHOLE
    if not known or getattr(config, "quantization_config", None):
        raise UserError(f"{ranks} target ranks cannot share this {kind} model: it has no plan for "
                        "splitting its linear layers, or one for other layers too (experts, "
                        f"quantized ones); start {enough}")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(config, name, None) or 0
        if (torch.tensor(size) % ranks).any():  # some architectures list a size for every layer
            raise UserError(f"{ranks} target ranks cannot share this {kind} model evenly: their "
                            f"number must divide {size}, its {name}")


def load_sharded(path: str, config: PretrainedConfig, dtype: torch.dtype,
                 device: torch.device | str, group: dist.ProcessGroup) -> PreTrainedModel:
    """This process's share of a checkpoint (Hub id or folder, safetensors); no more of it is read.
    All of `group` call this, and later compute every pass together. Raises `UserError`."""
    check_shardable(config, group.size())
    with init_empty_weights():  # buffers, which no checkpoint need hold, are computed here
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    absent = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    try:
        files = checkpoint_files(path)
        for file in files:
            with safe_open(file, "pt") as stored:
                absent -= set(stored.keys())
        missing = set(absent)
        model.tie_weights(missing, recompute_mapping=False)  # what it ties is missing no longer
        if missing:
            raise ValueError(f"its files have no {min(missing)}, or call it something else; one "
                             "rank alone can load them")
        split(model, group)
        for file in files:
            weights = read_share(file, model, shapes, group.rank(), device)
            model.load_state_dict(weights, strict=False, assign=True)
    except (OSError, ValueError, SafetensorError) as problem:
        raise UserError(f"cannot load {path} in shares: {first_line(problem)}") from problem
    model.tie_weights(absent, recompute_mapping=False)
    with suppress(OSError):  # there need not be one
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model.to(device)


def split(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Cut the linear layers of a model without weights down to this process's share of them."""
    def share(parameter, dimension):
        parts = parameter.unflatten(dimension, (group.size(), -1))  # raises where they are unequal
        return nn.Parameter(parts.select(dimension, group.rank()))

    def add_up(layer, inputs, output):
        dist.all_reduce(output, group=group)

    for name, layer in model.base_model.named_modules():
        style = model.config.base_model_tp_plan.get(re.sub(r"\.\d+\b", ".*", name))
        if style in SPLIT:
            layer.weight = share(layer.weight, SPLIT[style])
        if style == "colwise" and layer.bias is not None:
            layer.bias = share(layer.bias, 0)
        if style == "rowwise":
            layer.register_forward_hook(add_up)
            if group.rank() > 0:
                layer.bias = None  # one rank adds it


def checkpoint_files(path: str) -> list[Path]:
    """The safetensors files of a checkpoint (Hub id or folder)."""
    folder = Path(path)
    index = "model.safetensors.index.json"
    if not folder.is_dir():
        folder = Path(snapshot_download(path, allow_patterns=["model*.safetensors", index]))
    if not (folder / index).exists():
        return [folder / "model.safetensors"]
    files = json.loads((folder / index).read_text())["weight_map"].values()
    return [folder / file for file in sorted(set(files))]


def read_share(path: Path, model: PreTrainedModel, shapes: dict[str, list[int]], rank: int,
               device: torch.device | str) -> dict[str, torch.Tensor]:
    """What a file holds of the weights of `model`, by name; `shapes`: the whole ones'. Raises
    ValueError where the file has another shape."""
    weights = {}
    wanted = model.state_dict()
    with safe_open(path, "pt") as file:
        for name in wanted.keys() & set(file.keys()):
            stored = file.get_slice(name)
            sizes = wanted[name].shape
            if stored.get_shape() != shapes[name]:
                raise ValueError(f"{name} is {stored.get_shape()}, not {shapes[name]}")
            window = [slice(rank * size, (rank + 1) * size) if size < whole else slice(None)
                      for size, whole in zip(sizes, shapes[name])]
            weights[name] = stored[tuple(window)].to(device, wanted[name].dtype)
    return weights
