"""Attention: what each token sees, layer by layer, and how heads that share keys attend to it."""
import torch
from transformers import PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

FEW_TOKENS = 64  # tokens a row; on a GPU passes of more do not attend by `matrix_products`


# ---- masks ----

FIRST_SEEN = {  # the first position that is seen from each of `positions`, by the type of a layer
    "full_attention": lambda positions, config: 0 * positions,
    "sliding_attention": lambda positions, config: positions - config.sliding_window + 1,
    "chunked_attention": lambda positions, config: (
        positions - positions % config.attention_chunk_size)}


def layer_types(config: PretrainedConfig) -> set[str]:
    """Return the types of a model's layers. A text configuration that names none has one."""
    only = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return set(getattr(config, "layer_types", None) or [only])


def attention_mask(config: PretrainedConfig, positions: torch.Tensor, visible: torch.Tensor,
                   dtype: torch.dtype) -> torch.Tensor | dict[str, torch.Tensor]:
    """Return what tokens at `positions` `[B, n]` see of the slots that are `visible` `[B, n,
    slots]`: 0 or -inf, `[B, 1, n, slots]`. If layers are of several types, return a dictionary with
    a mask for each. All is done on the device, so that a CUDA graph can capture it."""
    held = visible.cumsum(-1, dtype=torch.int32) - 1
    masks = {}
    for layer_type in layer_types(config):
        first_seen = FIRST_SEEN[layer_type](positions, config)  # [B, n]
        seen = visible & (held >= first_seen[..., None])        # [B, n, slots]
        mask = torch.where(seen, 0.0, -torch.inf).to(dtype)
        masks[layer_type] = mask[:, None]
    return masks if len(masks) > 1 else masks[layer_type]


# ---- what attends ----

def grouped_attention(module, query, key, value, attention_mask=None, **options):
    """Attend as `sdpa` does, queries `[B, heads, n, d]` to keys and values `[B, groups, slots, d]`,
    each shared by several heads (Ainslie et al. 2023), under a mask `[B, 1, n, slots]`. Returns
    `[B, n, heads, d]`, and None for the weights. `sdpa` copies keys and values for every head,
    which behind a long text takes longer than the rest of a pass. Here the queries of heads that
    share keys are rows of one head. On a CPU many rows are faster in PyTorch's kernel that shares
    keys itself, and copies no mask."""
    rows, heads, n, size = query.shape
    groups = key.shape[1]
    on_gpu = query.device.type == "cuda"
    by_products = on_gpu and n <= FEW_TOKENS
    worth_it = by_products or heads > groups
    if not worth_it or not is_ours(attention_mask, options):
        return sdpa(module, query, key, value, attention_mask, **options)
    as_rows = on_gpu or n < 16
    if as_rows:
        query = query.reshape(rows, groups, -1, size)
        attention_mask = attention_mask.repeat(1, 1, heads // groups, 1)
    scale = options.get("scaling") or size ** -0.5
    if by_products:
        output = matrix_products(query, key, value, attention_mask, scale)
    else:
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attention_mask, scale=scale, enable_gqa=not as_rows)
    return output.reshape(rows, heads, n, -1).transpose(1, 2).contiguous(), None


def is_ours(mask: torch.Tensor | None, options: dict) -> bool:
    """Return whether a mask is one of `attention_mask`, the same for all heads, and nothing else is
    asked: all models of transformers in this process attend here, also another program's."""
    if mask is None or not mask.is_floating_point() or mask.shape[1] != 1:
        return False
    return options.get("position_bias") is None and not options.get("dropout")


def matrix_products(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor,
                    scale: float) -> torch.Tensor:
    """Attend by two batched products and a softmax, in float32 or wider. For few queries a GPU is
    faster so: PyTorch's memory-efficient kernel, which takes a mask, keeps few of its processors
    busy. Shapes are query `[B, groups, m, d]`, key and value `[B, groups, slots, d]`, and mask
    `[B, 1, m, slots]`. Returns `[B, groups, m, d]`."""
    wide = {} if query.dtype.itemsize > 2 else {"out_dtype": torch.float32}
    scores = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).mT, **wide)
    scores = scores.unflatten(0, query.shape[:2]) * scale + mask
    return scores.softmax(-1).to(value.dtype) @ value


ALL_ATTENTION_FUNCTIONS["sdpa"] = grouped_attention  # once, since other threads may be in a pass
