"""Tensor parallelism (Shoeybi et al. 2019, Megatron-LM): a target that several processes share.

Transformer blocks are two linear maps, and between them what works head by head or unit by unit:

    B f(A x) = sum over ranks r of  B_r f(A_r x)    A_r: some rows of A, B_r: as many columns of B

so each process keeps its rows of every A ("colwise") and its columns of every B ("rowwise"), and
one all-reduce after every B adds the parts up. The architecture's `config.base_model_tp_plan` says
which layers these are. Other known layers take and give whole activations, and stay whole.
"""
import re
import weakref

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from engine.errors import UserError

SPLIT = {"colwise": 0, "rowwise": 1}  # the dimension of a weight `[out, in]` that is shared out
WHOLE = {"colwise_gather_output", "rowwise_split_input", "replicated_with_grad_allreduce",
         "embedding_rowwise"}


def check_shardable(config: PretrainedConfig, ranks: int) -> None:
    """Raise `UserError` for a model that `ranks` processes cannot share; nothing is loaded."""
    family = config.model_type
    text = config.get_text_config()
    styles = set((text.base_model_tp_plan or {}).values())
    known = SPLIT.keys() <= styles <= SPLIT.keys() | WHOLE
    if not known or getattr(config, "quantization_config", None):
        raise UserError(f"{ranks} target ranks cannot share this {family} model: it has no plan "
                        "for splitting its linear layers, or one for other layers too (experts, "
                        "quantized ones); start one target rank")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(text, name, None) or 0
        if (torch.tensor(size) % ranks).any():  # some architectures list a size for every layer
            raise UserError(f"{ranks} target ranks cannot share this {family} model evenly: their "
                            f"number must divide {size}, its {name}")


def fingerprint(model: PreTrainedModel) -> int:
    """Return a number that is another one for other weights, on every machine: the sum of their
    bits, read as numbers of 16 bits."""
    total = 0
    for weight in model.parameters():
        total += int(weight.detach().flatten().view(torch.int16).sum())
    return total


def split(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Cut the linear layers of a whole model down to this process's share. The layers meet in the
    group, but do not hold it: PyTorch does, until it is left."""
    group_of_layers = weakref.ref(group)

    def share(parameter, dimension):
        parts = parameter.data.unflatten(dimension, (group.size(), -1))
        return nn.Parameter(parts.select(dimension, group.rank()).clone())  # frees the whole

    @torch.compiler.disable  # ranks meet here, whatever each of them has compiled
    def add_up(layer, inputs, output):
        dist.all_reduce(output, group=group_of_layers())

    plan = model.config.get_text_config().base_model_tp_plan
    for name, layer in model.get_decoder().named_modules():
        style = plan.get(re.sub(r"\.\d+\b", ".*", name))
        if style in SPLIT:
            layer.weight = share(layer.weight, SPLIT[style])
        if style == "colwise" and layer.bias is not None:
            layer.bias = share(layer.bias, 0)
        if style == "rowwise":
            layer.register_forward_hook(add_up)
            if group.rank() > 0:
                layer.bias = None  # one rank adds it
