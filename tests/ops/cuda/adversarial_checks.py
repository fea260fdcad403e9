"""Append, decode and prefill by the CUDA kernels of keys and values that are hard on them, on a GPU and emulated."""

from __future__ import annotations

import dataclasses

import torch

from kvant import recipes
from kvant.cache.finite import largest
from kvant.layout import Layout
from kvant.ops import LayerStore, PagedBatch, reference
from kvant.ops.cuda import append as cuda_append
from kvant.ops.cuda import decode as cuda_decode
from kvant.ops.cuda import levels
from kvant.ops.cuda import prefill as cuda_prefill
from tests.ops import adversarial
from tests.ops.adversarial import DIM, HEADS, PROMPT, STEP, TOKENS, Table, assert_close
from tests.ops.cuda.append_checks import beside_reference

Tensor = torch.Tensor


def check(name: str, dtype: str, device: str, every: int = 1, prefill: bool = True) -> None:
    """A prompt and a step of every sequence against the reference, which runs on the CPU and whose bytes are read."""
    layout = Layout.of(recipes.get(name), HEADS, DIM, dtype=dtype)
    limit = {"float32": 1e-3, "bfloat16": 4e-3, "float16": 1e-3}[
        dtype
    ]  # twice what all sequences together may be off by
    if name.startswith("turboquant"):
        limit += levels.CLOSE  # that levels as bytes may be off
    table = adversarial.table(getattr(torch, dtype), largest(layout), every)
    count, k, v, q = len(table.names), table.keys, table.values, table.queries()
    caches, seqs, (mine, theirs) = beside_reference(layout, count, count * layout.pages_for(TOKENS) + 1, device)
    scale, least = DIM**-0.5, smallest_scale(layout) * limit
    for first, last in ((0, PROMPT), (PROMPT, TOKENS)):
        new_k, new_v = k[:, first:last].flatten(0, 1), v[:, first:last].flatten(0, 1)
        batches = [cache.extend(own, [last - first] * count) for cache, own in zip(caches, seqs, strict=True)]
        if first and prefill:
            new_q = q.flatten(0, 1)
            wide = new_q.double(), new_k.double(), new_v.double()
            expected = reference.prefill(theirs, *wide, batches[1], scale=scale)
            found = cuda_prefill.prefill(
                mine, new_q.to(device), new_k.to(device), new_v.to(device), batches[0], scale=scale
            ).cpu()
            assert_close(table.names, found.unflatten(0, (-1, STEP)), expected.unflatten(0, (-1, STEP)), 4e-3, least)
        cuda_append.append(mine, new_k.to(device), new_v.to(device), batches[0])
        reference.append(theirs, new_k, new_v, batches[1])
        check_stored(table, mine, theirs, caches[1].batch(seqs[1]), last)
        mine.pages.copy_(theirs.pages)
        for side, overlay in theirs.overlays.items():
            mine.overlays[side].copy_(overlay)
    found = cuda_decode.decode(mine, q[:, -1].to(device), caches[0].batch(seqs[0]), scale=scale).cpu()
    expected = reference.decode(theirs, q[:, -1].double(), caches[1].batch(seqs[1]), scale=scale)
    assert_close(table.names, found, expected, limit, least)


def smallest_scale(layout: Layout) -> float:
    """Numbers below it are coded as 0, or as what rounding makes of it."""
    sides = ("key", "value")
    types = [getattr(torch, field.dtype) for side in sides for field in layout.fields(side) if field.kind == "meta"]
    return max((torch.finfo(x).tiny for x in types), default=0.0)


def check_stored(table: Table, mine: LayerStore, theirs: LayerStore, batch: PagedBatch, tokens: int) -> None:
    """Pages and windows are as close to what was appended as the reference's; halfway between two codes, either will do."""
    overlays = {side: overlay.cpu() for side, overlay in mine.overlays.items()}
    written = dataclasses.replace(theirs, pages=mine.pages.cpu(), overlays=overlays)
    for side, x in (("key", table.keys), ("value", table.values)):
        exact = theirs.stream(side).forward(x[:, :tokens].flatten(0, 1).double()).unflatten(0, (-1, tokens))
        found, expected = (reference.read(s, side, batch, batch.seq_lens)[:, :tokens] for s in (written, theirs))
        error, least = (found - exact).flatten(1).norm(dim=1), (expected - exact).flatten(1).norm(dim=1)
        slack = 2e-3 * exact.flatten(1).norm(dim=1) + smallest_scale(theirs.layout) + 1e-30
        wrong = (~(error <= 1.02 * least + slack)).nonzero().flatten().tolist()  # true for NaN
        listed = ", ".join(f"{table.names[i]} ({error[i]:.2e}, the reference {least[i]:.2e})" for i in wrong)
        assert not listed, f"{side}s of {len(wrong)} sequences are coded worse than by the reference: {listed}"
