"""Append on a GPU against the bytes of the reference: steps, prompts, padding; and copies of rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvant import recipes
from kvant.bench.append import difference
from kvant.bench.synthetic import vectors
from kvant.cache import PagedCache
from kvant.layout import Layout
from kvant.ops import reference
from kvant.ops.cuda import append as cuda_append
from kvant.ops.cuda import copy_rows
from tests.conftest import make_layout
from tests.needs import gpu, needs_gpu
from tests.ops.cuda.append_checks import STEPS, assert_windows_close, beside_reference, check_fp8_windows, check_step
from tests.ops.cuda.filling import filled, parts_of_one


@pytest.mark.filterwarnings("ignore:.* is the plain torch reference:UserWarning")  # of group-wise recipes, prefill is
@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize(
    "name",
    [
        "int4",
        "saw-int4",
        "saw-int4-kv:seed=3",
        "int8",
        "int2:sink=5,recent=70",
        "int4:sink=5,recent=70,v.window_dtype=fp8",
        "oscar:group=32,sink=3,recent=20,v.window_dtype=fp8",
        "quarot-int2-win",
        "int4:k.bits=2",
        "int3",
        "saw-int4-kv:bits=3,sink=1,recent=20",
        "int4:k.bits=3,search=3,zero=float",
        "kvant-2:rope=post,k.bits=3/2/0,v.bits=3",
        "saw-int4-kv:order=16",
        "kvant-4-fast",
        "saw-hessian",
        "oscar:sink=3,recent=20",
        "int4:k.clip=0.6",
        "kvant-2",
        "kvant-2:rope=post,sink=0,recent=0",
        "kvant-2:rope_block=70,k.bits=4/4/0,v.bits=4",
        "kvant-3",
        "vecinfer-2",
        "vecinfer-4:k.bits=10",
        "million-2:books=head",
        "vecinfer-2:dim=2,bits=4",
        "vecinfer-2:dim=2,k.bits=3,v.bits=4",
        "vecinfer-2:dim=4,bits=6",
        "kivi-k2v2",
        "kivi-k4v4:k.group=16,k.flush=48,k.recent=7,v.recent=9,sink=5",
        "kitty-pro:sink=3",
        "kitty-pro:shift=false",
        "kivi-k2v2-sink:shift=false",
        "int4:group=32",
        "int2:group=64,sink=2,recent=5",
        "oscar:group=32,sink=3,recent=20",
        "saw-int4-kv:group=32",
        "int8:k.group=32,v.group=16,search=3",
        "saw-int4-kmeans",
        "saw-int4-kmeans-rot:sink=5,recent=70",
        "saw-int4-kmeans-rot:centroids=16,books=layer,zero=float,bits=2,group=32",
        "turboquant-4",
        "turboquant-3:sink=3,recent=20",
        "turboquant-2:v.bits=4",
        "million-2:books=space,bits=6",
        "vecinfer-4:v.books=space,v.bits=4",
    ],
)
@pytest.mark.parametrize("tile_rows", [1, 1 << 30])
def test_append_writes_what_the_reference_writes(
    name: str, dim: int, dtype: str, tile_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference runs on the CPU: on a GPU, torch divides by a number through its reciprocal."""
    monkeypatch.setattr(cuda_append, "TILE_ROWS", tile_rows)
    if name == "saw-hessian":
        name = next(n for n in recipes.names() if n.startswith("saw") and "hessian" in n)
    recipe, heads = recipes.get(name), 3
    if dim == 96 and "group=64" in name:
        with pytest.raises(ValueError, match="group must divide head_dim"):
            Layout.of(recipe, heads, dim, dtype=dtype)
        return
    layout = Layout.of(recipe, heads, dim, dtype=dtype)
    if dim == 256 and "v.group=16" in name:
        assert "16" in (cuda_append.refuse_layout(layout) or "")  # scales a token
        return
    three_bits = ("bits=3" in name and not layout.format("key").is_pq) or name.startswith(("int3", "turboquant-3"))
    if (
        (dim == 96 and (name.startswith("kvant-2") or three_bits))
        or (dim < 128 and "3/2/0" in name)
        or (dim == 96 and name == "kvant-3")
    ):
        assert cuda_append.refuse_layout(layout) is not None  # bands are no whole tiles, or lanes would share bytes
        return
    if dim % 64 and any(stream.scale_groups > 1 for stream in layout.formats.values()) and "kivi" not in name:
        assert cuda_append.refuse_layout(layout) is not None  # three or six scales
        return
    if dim == 64 and "group=64" in name:
        assert layout.format("key").scale_groups == 1
    caches, seqs, stores = beside_reference(layout, 3, 40, "cuda")
    assert caches[0].ops["append"].name == "cuda"
    for counts in ([130, 1, 64], [1, 1, 1], [5, 700, 2]):
        k, v = (vectors(sum(counts), heads, dim, "cpu", shift).to(getattr(torch, dtype)) for shift in (0.0, 0.4))
        cuda_append.append(stores[0], *parts_of_one(k.cuda(), v.cuda()), caches[0].extend(seqs[0], counts))
        reference.append(stores[1], k, v, caches[1].extend(seqs[1], counts))
    written = dataclasses.replace(stores[1], pages=stores[0].pages.cpu())
    assert float((written.pages != stores[1].pages).double().mean()) < 1e-4
    assert seqs[0][0].pages[0] == seqs[1][0].pages[0] == 0
    error, _ = difference(written, stores[1], layout.page_tokens)  # of a page that is full
    coarse = name.startswith(("kvant-2", "kvant-3", "turboquant"))  # one code of 2 bits is 0.01 of a page
    assert error < (2e-2 if coarse else 1e-3)
    for side in ("key", "value"):
        found, expected = (store.overlays[side].cpu() for store in stores)  # type: ignore[index]
        assert_windows_close(found, expected)


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("oscar:sink=3,recent=20", 128),
        ("oscar:per_head=true", 64),
        ("oscar:group=32,sink=3,recent=20", 128),
        ("saw-int4-hessian-kv", 96),
        ("kvant-4", 96),
        ("kvant-2", 128),
        ("kvant-2:rope_block=70", 64),
        ("kvant-2:rope=post,v.bits=4", 128),
        ("kvant-3", 128),
    ],
)
def test_tiles_are_multiplied_by_warpgroups_as_by_warps(
    name: str, dim: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many tiles, so that every CTA has several; the last ones are not full."""
    monkeypatch.setattr(cuda_append, "TILE_ROWS", 1)
    cache, seqs = filled(name, 4, 1, dim, dtype, [1, 40, 63], first=1013, spare=1200)
    store, counts = cache.stores[0], [20000, 7, 30001]
    k, v = (vectors(sum(counts), 4, dim, "cuda", shift).to(getattr(torch, dtype)) for shift in (0.0, 0.4))
    batch = cache.extend(seqs, counts)
    written = []
    for capability in (torch.cuda.get_device_capability(), (0, 0)):
        monkeypatch.setattr(cuda_append, "WARPGROUPS", capability)
        if capability != (0, 0) and capability != (9, 0):
            pytest.skip("only sm_90 multiplies by warpgroups")
        store.pages.fill_(0xFF)
        cuda_append.append(store, k, v, batch)
        written.append([store.pages.clone(), *(overlay.clone() for overlay in store.overlays.values())])
    assert bool((written[0][0] != 0xFF).any())
    assert float((written[0][0] != written[1][0]).double().mean()) < 2e-5
    for one, two in zip(written[0][1:], written[1][1:], strict=True):
        assert_windows_close(one, two, equal_nan=True)


@gpu
@needs_gpu
@pytest.mark.parametrize("sequences", [1, 15, 16, 17, 128])
@pytest.mark.parametrize(("name", "dim", "dtype", "page"), STEPS)
def test_a_step_is_appended_in_one_launch(
    name: str, dim: int, dtype: str, page: int | None, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_step(name, dim, dtype, page, sequences, monkeypatch)


@gpu
@needs_gpu
@pytest.mark.parametrize("tile_rows", [1, 1 << 30])
def test_padding_slots_write_nothing(tile_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_append, "TILE_ROWS", tile_rows)
    cache = PagedCache(make_layout("int2:sink=2,recent=3", 2, 64, dtype="bfloat16"), 1, 4, "cuda")
    batch = cache.extend([cache.new()], [5])
    batch = batch._replace(slot_mapping=torch.full_like(batch.slot_mapping, -1))
    store = cache.stores[0]
    store.pages.fill_(0xFF)
    for overlay in store.overlays.values():
        overlay.fill_(float("nan"))
    cuda_append.append(store, *torch.randn(2, 5, 2, 64, device="cuda", dtype=torch.bfloat16), batch)
    assert bool((store.pages == 0xFF).all())
    assert bool(store.overlays["key"].isnan().all())


@gpu
@needs_gpu
@pytest.mark.parametrize("tile_rows", [1, 1 << 30])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_windows_of_values_as_fp8(dtype: str, tile_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_append, "TILE_ROWS", tile_rows)
    check_fp8_windows(dtype, "cuda")


@gpu
@needs_gpu
def test_rows_of_windows_are_copied_where_somebody_wants_them() -> None:
    x = torch.randn(5, 9, 68, 2, 128, device="cuda").bfloat16()
    expected = x.clone()
    expected[:, 5], expected[2, 6, :4] = x[:, 3], x[2, 1, :4]
    copy_rows.copy_rows(x, *torch.tensor([[3, 7], [5, 8]], device="cuda"))  # the last row is nobody's
    copy_rows.copy_rows(x[2:3], *torch.tensor([[1], [6]], device="cuda"), 4)
    assert torch.equal(x, expected)
