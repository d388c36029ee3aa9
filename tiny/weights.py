"""The weights of an enlarged checkpoint (enlarge.py). Every weight of the included model, h wide,
stands in the first rows and columns of one of the large model, H wide:

    all outputs to the residual stream are 0 beyond the first h, and of all further layers, heads
    and units; what reads only these zeros, or is multiplied by them, is random;
    a norm takes its mean of squares over H numbers, of which H - h are 0, so its weights are
    divided by sqrt(H / h), and its epsilon by H / h. For H = h 4^j that is exact in any type.

Heads keep their size. Up to eight of them share keys. The heads of the included model are the first
ones of the first groups.
"""
import json
import shutil
from argparse import Namespace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from cli.settings import TINY
from engine.errors import UserError, reported_as

READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # of the residual stream


def enlarged(config: PretrainedConfig, args: Namespace) -> PretrainedConfig:
    """Return the configuration of the large model. Raises `UserError` for sizes too small."""
    if args.layers < config.num_hidden_layers or args.intermediate_size < config.intermediate_size:
        raise UserError(f"--layers must be at least {config.num_hidden_layers}, and "
                        f"--intermediate-size {config.intermediate_size}: the included model's")
    heads = args.hidden_size // config.head_dim
    changes = dict(
        hidden_size=args.hidden_size, num_hidden_layers=args.layers, dtype=args.dtype,
        intermediate_size=args.intermediate_size, num_attention_heads=heads,
        num_key_value_heads=max(config.num_key_value_heads, heads // 8),
        rms_norm_eps=config.rms_norm_eps * config.hidden_size / args.hidden_size)
    return AutoConfig.for_model(**config.to_dict() | changes)


def place(name: str, large: torch.Tensor, small: torch.Tensor, config: PretrainedConfig) -> None:
    """Write a weight `[out, in]` or `[h]` into the first places of the `large` one. In attention a
    head of the included model becomes the first of a group that shares keys."""
    if "self_attn" in name:
        dimension = 1 if "o_proj" in name else 0
        small = small.unflatten(dimension, (-1, 1, config.head_dim))
        large = large.unflatten(dimension, (config.num_key_value_heads, -1, config.head_dim))
    large[tuple(map(slice, small.shape))] = small


def write_weights(folder: Path, weights: dict[str, torch.Tensor], config: PretrainedConfig) -> None:
    """Write each weight to a file of its own, so that memory holds one of the large model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    files = {}
    for name, weight in tqdm(list(model.named_parameters()), unit="file"):  # tied ones once
        files[name] = f"{name}.safetensors"
        large = torch.zeros(weight.shape, dtype=config.dtype)
        if any(reader in name for reader in READERS):
            large.uniform_(-0.02, 0.02)
        if name in weights:
            small = weights[name]
            if "norm" in name:
                small = (len(small) / config.hidden_size) ** 0.5 * small
            place(name, large, small, config)
        save_file({name: large}, folder / files[name], metadata={"format": "pt"})
    index = json.dumps({"metadata": {}, "weight_map": files})
    (folder / "model.safetensors.index.json").write_text(index, "utf-8")


def write_checkpoint(args: Namespace) -> None:
    """Write what the command asks for. Raises `UserError` if it cannot be written."""
    source = TINY / args.model
    config = enlarged(AutoConfig.from_pretrained(source), args)
    with reported_as(f"FOLDER '{args.folder}'"):
        shutil.copytree(source, args.folder, ignore=shutil.ignore_patterns("model*"))
        config.save_pretrained(args.folder)
        write_weights(args.folder, load_file(source / "model.safetensors"), config)
