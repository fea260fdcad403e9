"""Prefill in blocks against the reference: history of every length, windows, soft caps, and blocks smaller than the history."""

from __future__ import annotations

import pytest
import torch

from kvant.cache import PagedCache
from kvant.ops import blocked, reference
from tests.calibrate.synthetic import rope_of
from tests.conftest import make_layout, relative_error
from tests.fitted import made_up_tensors

NAMES = ["full", "saw-int4-kv", "int2:sink=5,recent=0", "int2:sink=0,recent=70", "saw-int4:sink=3,recent=70,k.recent=9"]
NAMES += ["kvant-2", "kvant-2:rope=post", "kvant-4-fast", "oscar:sink=3,recent=20"]


def check(name: str, history: int, fresh: int, device: str, limit: float, **options: float | int | None) -> None:
    layout = make_layout(name, 2, 64, dtype="float32")
    ropes = [rope_of(64)] if layout.recipe.wants_rope else None
    cache = PagedCache(layout, 1, device=device, tensors={0: made_up_tensors(layout.recipe, 2, 64)}, ropes=ropes)
    seqs = [cache.new(), cache.new()]
    counts = [history, history // 3]
    if history:
        k, v = torch.randn(2, sum(counts), 2, 64, device=device)
        reference.append(cache.stores[0], k, v, cache.extend(seqs, counts))
    q = torch.randn(2 * fresh + 1, 6, 64, device=device)
    k, v = torch.randn(2, 2 * fresh + 1, 2, 64, device=device)
    batch = cache.extend(seqs, [fresh, fresh + 1])
    expected = reference.prefill(cache.stores[0], q.double(), k.double(), v.double(), batch, scale=0.2, **options)  # type: ignore[arg-type]
    found = blocked.prefill(cache.stores[0], q, k, v, batch, scale=0.2, **options)  # type: ignore[arg-type]
    assert relative_error(found, expected) < limit


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("history", "fresh"), [(0, 5), (1, 1), (150, 37), (700, 130)])
def test_blocks_are_the_whole(name: str, history: int, fresh: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "BLOCK_TOKENS", 128)
    monkeypatch.setattr(blocked, "QUERY_BLOCK", 50)
    check(name, history, fresh, "cpu", 1e-5)


@pytest.mark.parametrize(("softcap", "sliding_window"), [(None, 40), (5.0, None), (5.0, 70), (None, 1), (None, 129)])
def test_soft_cap_and_sliding_window(
    softcap: float | None, sliding_window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "BLOCK_TOKENS", 64)
    for name in ("quarot-int2-win", "kvant-2", "kvant-4-fast"):
        check(name, 500, 33, "cpu", 1e-5, softcap=softcap, sliding_window=sliding_window)


def test_what_is_better_served_elsewhere_is_refused() -> None:
    assert blocked.refuse(make_layout("int4"), torch.device("cpu")) is not None
    assert "groups" in (blocked.refuse(make_layout("kivi-k2v2"), torch.device("cuda")) or "")
    assert blocked.refuse(make_layout("saw-int4"), torch.device("cuda")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings(
    "ignore:.* is the plain torch reference:UserWarning"
)  # a cache says so of what it would take
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("history", "fresh"), [(0, 5), (1, 1), (150, 37), (5000, 130)])
def test_fused_attention_is_the_reference(name: str, history: int, fresh: int) -> None:
    check(name, history, fresh, "cuda", 2e-3)
