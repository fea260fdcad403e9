"""Where a recipe's error is: by layer, by KV head and by length of context (as OSCAR's figures 2, 3 and 8 show it)."""

from __future__ import annotations

import dataclasses

METRICS = ("attention_kl", "key_error", "value_error", "logit_error", "output_error")


@dataclasses.dataclass(frozen=True)
class Profile:
    """Errors of every layer's attention, of the same queries, keys and values; names are those of `kvant eval --profile --json`.

    attention_kl  KL(full || recipe) of attention probabilities, mean over queries
    key_error, value_error  squared error of what a query reads, over its energy
    logit_error   squared error of q . k, over the variance of q . k; both without their mean, which the softmax cancels
    output_error  squared error of attention's output, over its energy
    """

    heads: dict[str, list[list[float]]]  # metric -> [layer][KV head]
    layers: dict[str, list[float]]  # metric -> [layer]
    lengths: list[int]  # upper ends of the buckets of context lengths, in tokens
    by_length: dict[str, list[list[float]]]  # metric -> [bucket][layer]
