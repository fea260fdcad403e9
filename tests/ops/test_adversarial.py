"""Append, decode and prefill on a CPU of keys and values that are hard on a codec or on a kernel."""

from __future__ import annotations

import pytest
import torch

from kvant.cache import NotFinite, PagedCache
from kvant.ops import choose, reference
from kvant.ops.cpu import library
from kvant.ops.cpu.decode import decode
from kvant.ops.cpu.prefill import prefill
from tests.calibrate.synthetic import rope_of
from tests.codes import assert_same_codes
from tests.conftest import make_layout
from tests.fitted import made_up_tensors
from tests.ops import adversarial
from tests.ops.adversarial import DIM, HEADS, PROMPT, STEP, TOKENS

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=f"nothing compiled: {library.missing()}")


@pytest.fixture(params=range(len(library.kinds())), ids=library.kinds())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(library, "isa", lambda: request.param)
    return library.kinds()[request.param]


def caches_of(name: str, dtype: str) -> list[PagedCache]:
    """Two empty ones: the first is appended to by the reference, the second by the compiled operation."""
    layout = make_layout(name, HEADS, DIM, dtype=dtype, device="cpu")
    ropes = [rope_of(DIM)] if layout.recipe.wants_rope else None
    tensors = {0: made_up_tensors(layout.recipe, HEADS, DIM)}
    caches = [PagedCache(layout, 1, tensors=tensors, ropes=ropes, implementation="reference") for _ in range(2)]
    caches[1].ops["append"] = choose("append", layout, "cpu", "cpu")
    return caches


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", adversarial.RECIPES)
def test_adversarial_tensors(name: str, dtype: str, isa: str) -> None:
    caches, single = caches_of(name, dtype), dtype == "float32"
    table = adversarial.table(getattr(torch, dtype), caches[0].largest)
    seqs, store = [[cache.new() for _ in table.names] for cache in caches], caches[0].stores[0]
    k, v, q = table.keys, table.values, table.queries()
    for first, last in ((0, PROMPT), (PROMPT, TOKENS)):
        new_k, new_v = k[:, first:last].flatten(0, 1), v[:, first:last].flatten(0, 1)
        batches = [cache.extend(own, [last - first] * len(own)) for cache, own in zip(caches, seqs, strict=True)]
        if first:
            new_q = q.flatten(0, 1)
            wide = new_q.double(), new_k.double(), new_v.double()
            expected = reference.prefill(store, *wide, batches[0], scale=DIM**-0.5).unflatten(0, (-1, STEP))
            found = prefill(store, new_q, new_k, new_v, batches[0], scale=DIM**-0.5).unflatten(0, (-1, STEP))
            adversarial.assert_close(table.names, found, expected, 1e-5 if single else 5e-3)
        for cache, batch in zip(caches, batches, strict=True):
            cache.append(0, new_k, new_v, batch)
    wrong = []
    for i, what in enumerate(table.names):
        try:
            assert_same_codes(caches[1], caches[0], (seqs[1][i], seqs[0][i]), k[i], v[i])
        except AssertionError as error:
            wrong.append(f"{what}: {error}")
    assert not wrong, "\n".join(wrong)
    batch = caches[0].batch(seqs[0])
    expected = reference.decode(store, q[:, -1].double(), batch, scale=DIM**-0.5)
    adversarial.assert_close(
        table.names, decode(store, q[:, -1], batch, scale=DIM**-0.5), expected, 2e-3 if single else 5e-3
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["saw-int4", "kivi-k2v2"])
def test_numbers_that_cannot_be_held_are_refused(name: str, dtype: str) -> None:
    """By the reference's cache and by the compiled append; nothing is written."""
    caches = caches_of(name, dtype)
    table = adversarial.table(getattr(torch, dtype), caches[0].largest)
    assert ("all around 1e20" in table.refused) == (dtype == "float16" or name == "kivi-k2v2")
    for cache in caches:
        seq = cache.new()
        for x in table.refused.values():
            batch, before = cache.extend([seq], [TOKENS]), cache.stores[0].pages.clone()
            with pytest.raises(NotFinite, match="expected finite numbers up to"):
                cache.append(0, torch.zeros_like(x), x, batch)
            assert torch.equal(cache.stores[0].pages, before)
