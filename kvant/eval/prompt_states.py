"""Prompts that are prefilled once and read by every recipe.

The attention of a prompt that is read in one pass is exact in every recipe: its tokens see each other unpacked. So keys, values and
the first logits are the same for all recipes, and long prompts cost their prefill once instead of once a recipe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from kvant.eval.padding import pad_rows

Tensor = torch.Tensor
GROUP_TOKENS = 16384  # tokens of one prefill, padding included; a longer prompt is prefilled alone
HOST_BUDGET = 2 << 30  # bytes of prompts that stay in memory on a CPU
DEVICE_SHARE = 0.35  # of the free memory of a GPU


@dataclasses.dataclass(frozen=True)
class PromptState:
    """What a prefill leaves of one prompt.

    keys_values  [layers, 2, heads, tokens, head_dim]
    logits       of the next token: [vocabulary]
    """

    keys_values: Tensor
    logits: Tensor

    @property
    def nbytes(self) -> int:
        return self.keys_values.nbytes + self.logits.nbytes


class PromptStates:
    """States of prompts by their index. They stay in memory up to `budget` bytes; those beyond it are computed again each time."""

    def __init__(self, model: Any, ids: Sequence[Sequence[int]], budget: int | None = None) -> None:
        self.model, self.ids = model, ids
        self._budget = memory_budget(model.device) if budget is None else budget
        self._held: dict[int, PromptState] = {}

    def of(self, wanted: Sequence[int]) -> dict[int, PromptState]:
        """The states of these prompts."""
        found = {i: self._held[i] for i in wanted if i in self._held}
        missing = sorted({i for i in wanted if i not in found}, key=lambda i: -len(self.ids[i]))
        for group in _groups(missing, self.ids):
            for i, state in zip(group, self._prefill(group), strict=True):
                found[i] = state
                if state.nbytes <= self._budget:
                    self._held[i] = state
                    self._budget -= state.nbytes
        return found

    @torch.inference_mode()
    def _prefill(self, group: Sequence[int]) -> list[PromptState]:
        """Prefills prompts together. Padding goes to the right, where causal attention does not see it: no mask is needed."""
        rows = [self.ids[i] for i in group]
        ids, _ = pad_rows(rows, 0, "right", self.model.device)
        ends = sorted({len(row) - 1 for row in rows})
        cache = DynamicCache()
        keep = torch.tensor(ends, device=self.model.device)
        logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=keep).logits
        out = []
        for at, row in enumerate(rows):
            parts = [x[at, :, : len(row)] for layer in cache.layers for x in (layer.keys, layer.values)]
            stacked = torch.stack(parts).unflatten(0, (len(cache.layers), 2))
            out.append(PromptState(stacked, logits[at, ends.index(len(row) - 1)].clone()))
        return out


def padded(states: Sequence[PromptState]) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of a batch, layer by layer, padded to the left: [batch, heads, columns, head_dim] each."""
    width = max(state.keys_values.shape[3] for state in states)
    first = states[0].keys_values
    for layer in range(len(first)):
        both = first.new_zeros(2, len(states), first.shape[2], width, first.shape[4])
        for row, state in enumerate(states):
            both[:, row, :, width - state.keys_values.shape[3] :] = state.keys_values[layer]
        yield both[0], both[1]


def memory_budget(device: torch.device) -> int:
    """Bytes that prompts may take."""
    return int(DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else HOST_BUDGET


def _groups(indices: Sequence[int], ids: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Prompts, longest first, in groups of at most GROUP_TOKENS tokens with their padding."""
    group: list[int] = []
    for i in indices:
        if group and (len(group) + 1) * len(ids[group[0]]) > GROUP_TOKENS:
            yield group
            group = []
        group.append(i)
    if group:
        yield group
