"""Tests of enlarged checkpoints: an included model, at the cost of a larger one."""
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from cli.launch import exit_status
from cli.settings import TINY
from testing.shared import assert_close
from tiny import enlarge

TOKENS = 31 * torch.arange(1, 60)[None] % 2048
SMALL = dict(hidden_size=512, layers=24, intermediate_size=360)


def write(folder, monkeypatch, **choices) -> int:
    """The exit status of the command."""
    words = []
    for name, value in (SMALL | choices).items():
        words += ["--" + name.replace("_", "-"), str(value)]
    monkeypatch.setattr(sys, "argv", ["enlarge.py", str(folder), *words])
    return exit_status(enlarge.main)


@pytest.mark.parametrize("groups, choices", (
    (4, dict(hidden_size=128, intermediate_size=352)), (4, dict(layers=26)),
    (8, dict(model="draft", hidden_size=2048, layers=4))))
def test_logits_are_those_of_the_included_model(groups, choices, tmp_path, monkeypatch):
    """Of its own size; with more layers and units, and heads that share keys; with more keys."""
    assert write(tmp_path / "large", monkeypatch, dtype="float64", **choices) == 0
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
              for folder in (TINY / choices.get("model", "target"), tmp_path / "large")]
    config = models[1].config
    sizes = SMALL | choices
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (
        sizes["hidden_size"], sizes["layers"], sizes["intermediate_size"])
    assert config.num_key_value_heads == groups
    with torch.inference_mode():
        expected, logits = [model(TOKENS, use_cache=False).logits for model in models]
    assert_close(logits, expected, 1e-12)
    *_, last = models[1].model.layers
    for weight in (last.self_attn.q_proj.weight[-1], last.mlp.up_proj.weight[-1]):
        assert weight.std() > 0, "read and multiplied as any other"
