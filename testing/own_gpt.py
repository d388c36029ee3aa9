"""A model that is not transformers': any module that is called as theirs are."""
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import GenerationConfig, PretrainedConfig
from transformers.modeling_outputs import CausalLMOutput


class OwnGPT(torch.nn.Module):
    """A transformer of one layer, written by hand; untrained."""

    def __init__(self, vocab_size: int = 40, width: int = 32, heads: int = 4):
        super().__init__()
        torch.manual_seed(0)
        self.config = PretrainedConfig(vocab_size=vocab_size, max_position_embeddings=64)
        self.generation_config = GenerationConfig()
        self.dtype = torch.float64
        self.heads = heads
        self.embedding = torch.nn.Embedding(vocab_size, width)
        self.positions = torch.nn.Embedding(64, width)
        self.in_proj = torch.nn.Linear(width, 3 * width)
        self.out_proj = torch.nn.Linear(width, width)
        self.double()

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embedding

    def forward(self, input_ids, position_ids, attention_mask, past_key_values, **_):
        x = self.embedding(input_ids) + self.positions(position_ids)
        parts = self.in_proj(3 * x).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        key, value = past_key_values.update(key, value, 0)
        attended = scaled_dot_product_attention(query, key, value, attention_mask)
        x = x + self.out_proj(attended.transpose(1, 2).flatten(2))
        logits = x @ self.embedding.weight.T
        return CausalLMOutput(logits=logits)
