"""Tiny models whose keys have a large constant part, as those of Qwen2 and Qwen2.5 have, and a tokenizer for them."""

from __future__ import annotations

from typing import Any

import torch

from tests.engines.test_hf import make_model


class Bytes:
    """A tokenizer whose tokens are bytes."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


def make_biased(bias: float, vocab_size: int = 256) -> Any:
    """A Qwen2 whose key biases are large in the channels that RoPE rotates slowly; its answers hang on all of its context."""
    model = make_model("qwen2", vocab_size=vocab_size, max_position_embeddings=512, rope_theta=1e6)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in model.model.layers:
            own = layer.self_attn.k_proj.bias.view(2, 64)
            own[:, 24:32] += bias * torch.randn(2, 8, generator=generator)
            own[:, 56:] += bias * torch.randn(2, 8, generator=generator)
    return model
