"""Write a small Llama's function in a large body, as an ordinary checkpoint: natural acceptance at
realistic times.

    python tiny/enlarge.py 0.6b FOLDER      # then: python saguaro.py --target FOLDER

Why the function is unchanged. Each coordinate of the residual stream stands in the large one
n = (large width / small width) times, since what writes into it, embedding and output projections,
is repeated. Its root mean square is the same, so norms divide by what they divided by. What reads
from it, the vocabulary's projection included, is repeated too and sums n equal terms; the norms
before it have weights of 1/n. New layers, heads and feed-forward units have random weights but no
way out: their output projections are 0.

A head of s times the size uses as many places as before, at zero queries elsewhere. Scores are
divided by the root of the size: queries have weights of sqrt(s). The place in a head sets the
rotary frequency, theta^(-2i/size): coordinate i moves to s i. If n and sqrt(s) are powers of 2, as
with the embedded target (8 or 32, and 2), no weight is rounded, not even in bfloat16.
"""
import argparse
import copy
import os
import shutil
import sys
from pathlib import Path

import torch
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig,
                          PreTrainedModel)

BODIES = {"0.6b": dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16,
                       num_key_value_heads=8, head_dim=128, intermediate_size=3072),
          "8b": dict(hidden_size=4096, num_hidden_layers=34, num_attention_heads=32,
                     num_key_value_heads=8, head_dim=128, intermediate_size=14336)}
WRITERS = "o_proj", "down_proj"  # into the residual stream


def enlarged(old: LlamaConfig, **body) -> LlamaConfig:
    """The configuration of the large body. Exits where the small model does not fit into it."""
    if (old.model_type != "llama" or old.attention_bias or old.mlp_bias
            or old.rope_parameters["rope_type"] != "default"):
        sys.exit("--source must be a Llama without biases and without rotary scaling")
    new = copy.deepcopy(old)
    new.update(body)
    sizes = [(c.num_hidden_layers, c.intermediate_size, c.num_key_value_heads,
              c.num_attention_heads // c.num_key_value_heads) for c in (old, new)]
    if (new.hidden_size % old.hidden_size or new.head_dim % old.head_dim
            or any(small > large for small, large in zip(*sizes))):
        sys.exit("--source does not fit: a body needs multiples of its width and head size, and at "
                 "least its layers, feed-forward units, key heads and query heads per key head")
    return new


@torch.no_grad()
def enlarge(small: PreTrainedModel, **body) -> PreTrainedModel:
    """A model of the sizes `body` (see BODIES) with the logits, dtype and device of `small`."""
    old, new = small.config, enlarged(small.config, **body)
    copies, stretch = new.hidden_size // old.hidden_size, new.head_dim // old.head_dim
    with small.device:
        large = AutoModelForCausalLM.from_config(new, dtype=small.dtype).eval()
    large.generation_config = copy.deepcopy(small.generation_config)

    group, new_group = (c.num_attention_heads // c.num_key_value_heads for c in (old, new))
    heads = torch.arange(old.num_attention_heads)
    heads = heads // group * new_group + heads % group  # each stays with its key head
    lanes = stretch * torch.arange(old.head_dim // 2)
    lanes = torch.cat([lanes, lanes + new.head_dim // 2])
    queries = (new.head_dim * heads[:, None] + lanes).flatten()  # rows of the large projection
    keys = (new.head_dim * torch.arange(old.num_key_value_heads)[:, None] + lanes).flatten()
    units = torch.arange(old.intermediate_size)
    places = dict(q_proj=queries, k_proj=keys, v_proj=keys, o_proj=queries,
                  gate_proj=units, up_proj=units, down_proj=units)

    for name, weight in large.named_parameters():
        if name.split(".")[-2] in WRITERS + ("q_proj",):
            weight.zero_()
    for name, weight in small.named_parameters():
        kind, target = name.split(".")[-2], large.get_parameter(name)
        if kind in WRITERS:
            target[:, places[kind]] = weight.repeat(copies, 1)
        elif weight.ndim == 1:  # a norm
            target.copy_(weight.repeat(copies) / copies)
        else:
            scale = stretch ** 0.5 if kind == "q_proj" else 1.0
            target[places.get(kind, slice(None))] = scale * weight.repeat(1, copies)
    return large


def make_room(folder: Path, config: LlamaConfig, dtype: torch.dtype) -> None:
    """Make an empty `folder`. Exits where memory or disk cannot hold the large model."""
    if folder.is_file() or folder.is_dir() and any(folder.iterdir()):
        sys.exit(f"{folder} is not an empty folder: name a new one")
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        large = AutoModelForCausalLM.from_config(config, dtype=dtype)
    size = large.num_parameters() * dtype.itemsize
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name, room in ("memory", memory), ("free disk", shutil.disk_usage(folder).free):
        if size > room:
            sys.exit(f"the body takes {size / 1e9:.1f} GB, but there are only {room / 1e9:.1f} GB "
                     f"of {name}: try --dtype bfloat16 or a smaller body")


def main() -> None:
    parser = argparse.ArgumentParser(description="The same function in a larger body.")
    parser.add_argument("body", choices=BODIES)
    parser.add_argument("folder", type=Path, help="where to write the checkpoint")
    parser.add_argument("--source", type=Path, default=Path(__file__).parent / "target",
                        help="folder of a small Llama checkpoint (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    if not (args.source / "config.json").is_file():
        sys.exit(f"--source {args.source}: no such checkpoint; name a folder with a config.json")
    dtype, body = getattr(torch, args.dtype), BODIES[args.body]
    make_room(args.folder, enlarged(AutoConfig.from_pretrained(args.source), **body), dtype)
    AutoTokenizer.from_pretrained(args.source).save_pretrained(args.folder)

    torch.manual_seed(0)
    large = enlarge(AutoModelForCausalLM.from_pretrained(args.source, dtype=dtype), **body)
    large.save_pretrained(args.folder)
    count = large.num_parameters()
    print(f"{args.folder}: {count / 1e9:.2f}B parameters, {count * dtype.itemsize / 1e9:.1f} GB "
          f"in {args.dtype}")


if __name__ == "__main__":
    main()
