"""Decode of a block of tokens at once against decode one by one, on the real pages."""

from __future__ import annotations

import pytest
import torch

from kvant import recipes
from kvant.cache import PagedCache
from kvant.rope import Rope
from tests.conftest import make_layout, relative_error

NAMES = [name for name in recipes.names() if not recipes.get(name).calibrated]


@pytest.mark.few(6)
@pytest.mark.parametrize("name", [*NAMES, "int2:sink=3,recent=10", "saw-int4:k.recent=20,v.recent=50"])
@pytest.mark.parametrize("sliding_window", [None, 90])
def test_replay_is_decode_one_by_one(name: str, sliding_window: int | None) -> None:
    heads, group, dim, scale = 2, 3, 64, 0.2
    layout = make_layout(name, heads, dim, dtype="float32")
    # what a corrector learns until its first group is coded depends on how the tokens come: it has coded one before
    prompts, new = [150, 64 if layout.recipe.wants_queries else 5, 40], 100
    ropes = [Rope(1e4 ** -(torch.arange(0, dim, 2) / dim))] if layout.recipe.wants_rope else None
    k, v = torch.randn(3, 250, heads, dim), torch.randn(3, 250, heads, dim)
    q = torch.randn(3, 250, heads * group, dim)
    outs = []
    for steps in ([new], [1] * new, [37, 63]):
        cache = PagedCache(layout, layers=1, ropes=ropes)
        seqs = [cache.new() for _ in prompts]
        batch = cache.extend(seqs, prompts)
        first = [torch.cat([x[i, :n] for i, n in enumerate(prompts)]) for x in (k, v, q)]
        cache.append(0, first[0], first[1], batch, first[2])
        at, out = 0, []
        for count in steps:
            batch = cache.extend(seqs, [count] * 3)
            part = [torch.cat([x[i, n + at : n + at + count] for i, n in enumerate(prompts)]) for x in (k, v, q)]
            if count == 1:
                cache.append(0, part[0], part[1], batch, part[2])
                found = cache.decode(0, part[2], batch, scale=scale, sliding_window=sliding_window)
            else:
                found = cache.replay(0, part[2], part[0], part[1], batch, scale=scale, sliding_window=sliding_window)
            out.append(found.view(3, count, heads * group, dim))
            at += count
        outs.append(torch.cat(out, 1))
    assert torch.isfinite(outs[1]).all()
    assert relative_error(outs[0], outs[1]) < 1e-5
    assert relative_error(outs[2], outs[1]) < 1e-5
