"""The compiled operations against the reference: every instruction set of this machine, one and two threads, poisoned memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvant import recipes
from kvant.cache import PagedCache
from kvant.ops import choose, reference
from kvant.ops.cpu import append as cpu_append
from kvant.ops.cpu import decode as cpu_decode
from kvant.ops.cpu import library, plan, structures
from kvant.ops.cpu.append import append
from kvant.ops.cpu.decode import decode, decode_with_lse
from kvant.ops.cpu.prefill import prefill
from kvant.ops.registry import NOT_BUILT
from kvant.ops.types import LayerStore, PagedBatch, one_sequence
from tests.calibrate.synthetic import rope_of
from tests.codes import assert_same_codes
from tests.conftest import make_layout, relative_error
from tests.fitted import made_up_tensors
from tests.ops.cuda.append_checks import FP8_WINDOW, fp8_numbers

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=f"nothing compiled: {library.missing()}")

TOKENWISE = [
    "full",
    "int8",
    "int4",
    "int3",
    "int2",
    "int4:group=16",
    "int8:group=32",
    "saw-int4",
    "saw-int4-kv",
    "saw-int4-kv:seed=3",
    "oscar:recent=20,sink=3",
]
TOKENWISE += [
    "int2:k.recent=70,v.recent=9",
    "quarot-int2-win",
    "kvant-4-fast",
    "kvant-4-fast:sink=4",
    "kvant-2",
    "kvant-2:rope=post",
    "kvant-2:search=9",
]
TOKENWISE += [
    "vecinfer-2",
    "vecinfer-4:sink=3",
    "million-2",
    "vecinfer-3:k.bits=9,v.bits=9",
    "vecinfer-1.5:k.bits=6,v.bits=3",
    "kvant-2:k.bits=3,v.bits=4",
    "int3:zero=float,meta=float16",
]
TOKENWISE += [
    "turboquant-4",
    "turboquant-3",
    "turboquant-2:sink=2",
    "saw-int4-kmeans",
    "saw-int4-kmeans-rot:centroids=300",
    "saw-int4-kmeans:centroids=1",
]
GROUPWISE = [
    "kivi-k2v2",
    "kivi-k4v2-sink",
    "kivi-k2v2:k.group=16,k.flush=32,k.recent=7,v.recent=9,sink=5",
    "kitty",
    "kitty-pro",
    "squat",
]


@pytest.fixture(params=range(len(library.kinds())), ids=library.kinds())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(library, "isa", lambda: request.param)
    return library.kinds()[request.param]


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def cache_of(name: str, heads: int = 2, dim: int = 64, first: int = 0, **options: object) -> PagedCache:
    layout = make_layout(name, heads, dim, dtype="float32", device="cpu", **options)
    rope = rope_of(dim)
    ropes = [type(rope)(rope.inv_freq, first)] if layout.recipe.wants_rope else None
    return PagedCache(
        layout, 1, tensors={0: made_up_tensors(layout.recipe, heads, dim)}, ropes=ropes, implementation="reference"
    )


def filled(name: str, lengths: list[int], heads: int = 2, dim: int = 64, group: int = 3, **options: int) -> PagedCache:
    cache = cache_of(name, heads, dim, **options)
    seqs = [cache.new() for _ in lengths]
    k, v = torch.randn(2, sum(lengths), heads, dim)
    cache.append(0, k, v, cache.extend(seqs, lengths), torch.randn(sum(lengths), heads * group, dim))
    return cache


def check(cache: PagedCache, group: int, limit: float = 2e-3, **options: float | int | None) -> torch.Tensor:
    layout, batch = cache.layout, cache.batch(cache.sequences)
    q = torch.randn(len(cache.sequences), layout.heads * group, layout.head_dim)
    settings = {"scale": layout.head_dim**-0.5} | options
    expected = reference.decode(cache.stores[0], q.double(), batch, **settings)  # type: ignore[arg-type]
    found = decode(cache.stores[0], q, batch, **settings)  # type: ignore[arg-type]
    assert relative_error(found, expected) < limit
    return found


@pytest.mark.parametrize("name", TOKENWISE + GROUPWISE)
def test_decode_of_every_recipe(name: str, isa: str) -> None:
    check(filled(name, [1, 63, 300, 700]), 3)


def test_torchs_default_dtype_does_not_matter(isa: str) -> None:
    """Servers set it to the model's. Scratch memory is float32 all the same; a thread's own is made anew."""
    cache = filled("saw-int4", [1, 63, 300, 700])
    batch, store, scale = cache.batch(cache.sequences), cache.stores[0], 64**-0.5
    q, new = torch.randn(4, 6, 64), torch.randn(3, 6, 64)
    more = cache.extend(cache.sequences[:1], [3])
    k, v = torch.randn(2, 3, 2, 64)

    def outputs() -> tuple[torch.Tensor, ...]:
        library._WORKSPACE.floats = torch.empty(0, dtype=torch.float32)
        out = decode(store, q, batch, scale=scale), prefill(store, new, k, v, more, scale=scale)
        assert library._WORKSPACE.floats.dtype == torch.float32
        return out

    expected = outputs()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = outputs()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_a_batch_that_kernels_cannot_read_is_not_read() -> None:
    cache = filled("int4", [300, 200])
    batch = cache.batch(cache.sequences)
    wide = torch.cat((batch.block_table, batch.block_table), 1)
    for wrong in (
        batch._replace(block_table=wide[:, : wide.shape[1] // 2]),
        batch._replace(seq_lens=batch.seq_lens.int()),
    ):
        with pytest.raises(AssertionError):
            decode(cache.stores[0], torch.randn(2, 6, 64), wrong, scale=0.125)


@pytest.mark.parametrize("group", [1, 2, 4, 5, 8, 16])
@pytest.mark.parametrize("dim", [32, 96, 128, 256])
def test_decode_of_every_shape(group: int, dim: int, isa: str) -> None:
    for name in ("full", "saw-int4", "int2:sink=2,recent=5", "kvant-2", "int4:group=32"):
        check(filled(name, [130, 67], heads=1, dim=dim, group=group), group)


@pytest.mark.parametrize("name", ["million-2", "million-3:k.bits=11,v.bits=10", "million-1.5:k.bits=3,v.bits=12"])
def test_the_first_of_equal_centroids_is_taken(name: str, isa: str) -> None:
    """Every centroid is there twice, or nearly, close together or far apart: what single precision cannot tell is compared in double."""
    caches = twins(name)
    for cache in caches:
        for stream in (cache.stores[0].key, cache.stores[0].value):
            books = stream.codec.codebooks  # type: ignore[attr-defined]
            books.copy_(torch.randn(books.shape, generator=torch.Generator().manual_seed(0)))
            count = books.shape[2]
            books[:, :, 1 : count // 2 : 2] = books[:, :, 0 : count // 2 : 2]
            books[:, :, count // 2 :] = books[:, :, : count // 2]
            books[:, :, 3::4, 0] *= 1 + 2**-10
    append_both(caches, *torch.randn(2, 40, 2, 64))


@pytest.mark.parametrize("page", [16, 32, 128])
def test_decode_of_other_pages(page: int, isa: str) -> None:
    for name in ("full", "saw-int4", "int2", "kvant-2", "vecinfer-2", "kivi-k2v2:k.group=16,k.flush=16"):
        check(filled(name, [page - 1, page, 3 * page + 1], page_tokens=page), 3)


@pytest.mark.parametrize(("softcap", "sliding_window"), [(None, 40), (5.0, None), (5.0, 70), (None, 1), (None, 600)])
def test_decode_with_soft_cap_and_sliding_window(softcap: float | None, sliding_window: int | None) -> None:
    for name in ("full", "saw-int4", "kvant-2", "kvant-4-fast", "quarot-int2-win", "kivi-k2v2-sink"):
        check(filled(name, [5, 600]), 2, softcap=softcap, sliding_window=sliding_window)


def test_decode_from_another_first_position() -> None:
    for first in (1, 255, 256, 1000):
        check(filled("kvant-2", [1, 255, 513], first=first), 3)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dim", [2, 34, 72, 80, 128])
def test_unquantized_pages_of_every_type(stored: str, dim: int, isa: str) -> None:
    """Append, decode and prefill; some head dims are no multiple of a vector. The sums are of floats: nothing but their order differs."""
    name = f"full:dtype={stored}"
    cache = filled(name, [1, 130, 67], dim=dim, group=5)
    check(cache, 5, limit=1e-5)
    check(cache, 5, limit=1e-5, sliding_window=70)
    append_both(twins(name, heads=3, dim=dim), *torch.randn(2, 100, 3, dim))
    batch = cache.extend(cache.sequences, [2, 1, 3])
    q, (k, v) = torch.randn(6, 10, dim), torch.randn(2, 6, 2, dim)
    expected = reference.prefill(cache.stores[0], q.double(), k.double(), v.double(), batch, scale=0.125)
    assert relative_error(prefill(cache.stores[0], q, k, v, batch, scale=0.125), expected) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_windows_of_values_as_fp8(dtype: str, isa: str) -> None:
    layout = make_layout(FP8_WINDOW, dtype=dtype, device="cpu")
    cache = PagedCache(layout, 1, implementation="cpu")
    v = fp8_numbers(dtype).clamp(-4096, 4096)  # what a cache of a float16 model takes
    cache.append(0, torch.randn(64, 2, 64).to(v.dtype), v, cache.extend([cache.new()], [64]))
    expected = v.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    found = cache.stores[0].overlays["value"][cache.sequences[0].overlay_row]
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    store, q = cache.stores[0], torch.randn(1, 6, 64)
    wanted = reference.decode(store, q.double(), cache.batch(cache.sequences), scale=0.125)
    assert relative_error(decode(store, q, cache.batch(cache.sequences), scale=0.125), wanted) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_in_16_bits(dtype: torch.dtype) -> None:
    cache = filled("saw-int4", [100])
    batch, q = cache.batch(cache.sequences), torch.randn(1, 6, 64).to(dtype)
    expected = reference.decode(cache.stores[0], q.double(), batch, scale=0.125)
    found = decode(cache.stores[0], q, batch, scale=0.125)
    assert found.dtype == dtype
    assert relative_error(found, expected) < 5e-3


def test_log_sum_exp() -> None:
    cache = filled("full", [200, 3])
    batch, q = cache.batch(cache.sequences), torch.randn(2, 6, 64)
    keys = reference.read(cache.stores[0], "key", batch, batch.seq_lens)
    for b, n in enumerate((200, 3)):
        scores = torch.einsum("hgd,nhd->hgn", q[b].view(2, 3, 64), keys[b, :n]) * 0.125
        lse = decode_with_lse(cache.stores[0], q, batch, scale=0.125)[1][b]
        torch.testing.assert_close(lse, scores.logsumexp(-1).flatten())


def test_limbs_of_a_matrix() -> None:
    """As native/arm_matrix.h reads them: [heads, columns / 8, rows / 4, high and low, 8 columns, 4 rows]."""
    matrix = torch.randn(2, 48, 48) * torch.logspace(-3, 3, 48)[:, None] * torch.logspace(2, -2, 48)
    limbs, scales = cpu_decode.matrix_limbs(matrix)
    integers = 256 * limbs[:, :, :, 0].double() + limbs[:, :, :, 1]
    found = integers.permute(0, 2, 4, 1, 3).reshape(2, 48, 48) * scales[:, 0, :, None] * scales[:, 1, None]
    assert limbs.dtype == torch.int8
    assert relative_error(found, matrix) < 5e-5
    size = matrix.abs() / scales[:, 0, :, None] / scales[:, 1, None]  # of the integers
    assert size.max() < 32640
    assert ((found - matrix).abs() <= 0.51 * scales[:, 0, :, None] * scales[:, 1, None]).all()


@pytest.mark.few(9)
@pytest.mark.parametrize("name", TOKENWISE + GROUPWISE)
def test_threads_do_not_show(name: str, two_threads: None) -> None:
    cache = filled(name, [1200, 700, 40])
    batch, q = cache.batch(cache.sequences), torch.randn(3, 6, 64)
    found = decode(cache.stores[0], q, batch, scale=0.125)
    torch.set_num_threads(1)
    assert torch.equal(decode(cache.stores[0], q, batch, scale=0.125), found)


@pytest.mark.parametrize("name", ["full", "saw-int4", "oscar:recent=20,sink=3", "kvant-2", "kivi-k2v2"])
def test_a_sequence_is_cut_by_its_own_length_alone(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_decode, "SPLIT_TOKENS", 64)
    monkeypatch.setattr(cpu_decode, "LONGEST_SPLIT", 256)
    lengths = [4100, 1030, 1000, 3]
    assert [cpu_decode.split_tokens(n) for n in lengths] == [256, 128, 64, 64]
    cache = filled(name, lengths, heads=1)
    check(cache, 3, limit=5e-4)
    batch, q = cache.batch(cache.sequences), torch.randn(4, 3, 64)
    found = decode(cache.stores[0], q, batch, scale=0.125)
    for b in range(4):
        assert torch.equal(decode(cache.stores[0], q[b : b + 1], one_sequence(batch, b), scale=0.125), found[b : b + 1])


def test_without_an_openmp_runtime_threads_are_started(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled("kvant-2", [1200])
    batch, q = cache.batch(cache.sequences), torch.randn(1, 6, 64)
    found = decode(cache.stores[0], q, batch, scale=0.125)
    monkeypatch.setattr(library, "parallel", lambda: 0)
    assert torch.equal(decode(cache.stores[0], q, batch, scale=0.125), found)


def test_what_lies_beyond_a_sequence_does_not_show() -> None:
    for name in ("full", "saw-int4", "kvant-2", "kivi-k2v2", "vecinfer-2"):
        cache = filled(name, [77])
        batch, q = cache.batch(cache.sequences), torch.randn(1, 6, 64)
        found = decode(cache.stores[0], q, batch, scale=0.125)
        cache.extend(cache.sequences, [200])  # poisoned pages behind it, and its own page as it was
        assert torch.equal(decode(cache.stores[0], q, batch, scale=0.125), found)


@pytest.mark.parametrize("name", ["saw-int4", "kvant-2", "vecinfer-2"])
def test_nothing_of_an_earlier_call_is_read_stale(name: str, two_threads: None) -> None:
    """Decode remembers what it computed from the last batch: here the next call differs in one thing."""
    cache = filled(f"{name}:sink=4,recent=4", [1300, 70], page_tokens=64)
    other = filled("int4:group=16,sink=4,recent=4", [1300, 70], page_tokens=64)  # another size of operands
    batch, q = cache.batch(cache.sequences), torch.randn(2, 6, 64)

    def check(batch: PagedBatch, q: torch.Tensor, store: LayerStore = cache.stores[0]) -> None:
        expected = reference.decode(store, q.double(), batch, scale=0.125)
        found = decode(store, q, batch, scale=0.125)
        assert found.dtype == q.dtype and relative_error(found, expected) < (2e-3 if q.dtype == torch.float32 else 1e-2)

    check(batch, q)
    check(batch, torch.randn(2, 6, 64))
    check(batch, q.bfloat16())
    check(batch, torch.randn(2, 4, 64))  # another number of query heads
    check(batch, torch.randn(2, 64, 6).mT)
    check(batch, q, other.stores[0])
    check(batch, q)
    check(cache.batch(cache.sequences[::-1]), q)
    for lengths in ([20, 70], [1290, 9], [600, 70]):  # fewer splits, then more: as StaticBatch changes lengths
        short = torch.tensor(lengths)
        batch.seq_lens.copy_(short)
        for ring_start in batch.ring_start.values():
            ring_start.copy_(short)  # tokens that are recent now are read from pages
        check(batch, q.bfloat16())
        check(batch, q)
        check(batch, q.bfloat16())  # the next lengths come after these alone
    batch.block_table.copy_(batch.block_table.flip(0))
    batch.seq_lens.fill_(60)
    check(batch, q)
    check(one_sequence(batch, 1), q[1:])
    check(batch, q)
    torch.set_num_threads(1)
    check(batch, q)
    for wrong in (torch.randn(2, 5, 64), torch.randn(2, 6, 32), torch.randn(3, 6, 64), q.double()):
        with pytest.raises(ValueError, match="queries"):
            decode(cache.stores[0], wrong, batch, scale=0.125)
    check(batch, q)


def test_several_queries_of_a_remembered_batch() -> None:
    cache = filled("saw-int4", [300, 70])
    batch, q = cache.batch(cache.sequences), torch.randn(4, 6, 64)
    for some in (q[::2], q, q, q[::2]):  # one or two queries of a sequence
        expected = reference.decode(cache.stores[0], some.double(), batch, scale=0.125)
        assert relative_error(decode(cache.stores[0], some, batch, scale=0.125), expected) < 2e-3
        batch.seq_lens.sub_(1)


# --- append ----------------------------------------------------------------------------------------------------------


def twins(name: str, heads: int = 2, dim: int = 64, **options: int) -> tuple[PagedCache, PagedCache]:
    state = torch.random.get_rng_state()
    one = cache_of(name, heads, dim, **options)
    torch.random.set_rng_state(state)  # the same calibrated tensors
    two = cache_of(name, heads, dim, **options)
    two.ops["append"] = choose("append", two.layout, "cpu", "cpu")
    return one, two


def append_both(caches: tuple[PagedCache, PagedCache], k: torch.Tensor, v: torch.Tensor) -> None:
    """One sequence, by the reference and by the compiled operation: the same bytes."""
    seqs = [cache.new() for cache in caches]
    for cache, seq in zip(caches, seqs, strict=True):
        cache.append(0, k, v, cache.extend([seq], [len(k)]))
    assert_same_codes(caches[1], caches[0], (seqs[1], seqs[0]), k, v)


@pytest.mark.parametrize("name", TOKENWISE + [name for name in GROUPWISE if name != "squat"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_append_writes_what_the_reference_writes(name: str, dtype: torch.dtype, isa: str) -> None:
    caches = twins(name)
    seqs = [[cache.new() for _ in range(3)] for cache in caches]
    given: list[list[torch.Tensor]] = [[], [], []]
    for counts in ([5, 0, 130], [1, 1, 1], [70, 300, 2]):
        fresh = torch.randn(2, sum(counts), 2, 64).to(dtype) * 3
        for cache, own in zip(caches, seqs, strict=True):
            cache.append(0, *fresh, cache.extend(own, counts))
        for tokens, part in zip(given, fresh.split(counts, 1), strict=True):
            tokens.append(part)
    for i, tokens in enumerate(given):
        assert_same_codes(caches[1], caches[0], (seqs[1][i], seqs[0][i]), *torch.cat(tokens, 1))


@pytest.mark.parametrize("dim", [32, 96, 128, 256])
def test_append_of_every_head_dim(dim: int) -> None:
    for name in ("full", "saw-int4-kv", "oscar", "kvant-2", "kvant-4-fast", "int3"):
        append_both(twins(name, heads=3, dim=dim), *torch.randn(2, 100, 3, dim))


def test_append_where_keys_are_turned_back_further_than_before() -> None:
    """The 64 blocks of 256 positions that rotates are first made for end inside of what is appended."""
    caches = twins("kvant-2", heads=1, dim=32)
    seqs = [cache.new() for cache in caches]
    counts = [16370, 1, 30]
    fresh = torch.randn(2, sum(counts), 1, 32)
    for part in fresh.split(counts, 1):
        for cache, seq in zip(caches, seqs, strict=True):
            cache.append(0, *part, cache.extend([seq], [part.shape[1]]))
    assert_same_codes(caches[1], caches[0], (seqs[1], seqs[0]), *fresh)


@pytest.mark.parametrize("name", ["saw-int4", "kvant-2", "kivi-k2v2", "vecinfer-2"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -70.0])
def test_append_of_a_number_beyond_the_limit_writes_nothing(name: str, number: float, isa: str) -> None:
    _, cache = twins(name)
    store, seq = cache.stores[0], cache.new()
    k, v = torch.randn(2, 200, 2, 64)
    append = cache.ops["append"].run
    assert append(store, k, v, cache.extend([seq], [200]), limit=64.0) is True
    for side in range(2):
        batch = cache.extend([seq], [100])
        before = [store.pages.clone(), *(x.clone() for x in store.overlays.values())]
        fresh = torch.randn(2, 100, 2, 64)
        fresh[side, 93, 1, 63] = number
        assert append(store, *fresh, batch, limit=64.0) is False
        for x, y in zip(before, [store.pages, *store.overlays.values()], strict=True):
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        batch.slot_mapping[93] = -1  # padding may hold anything
        assert append(store, *fresh, batch, limit=64.0) is True


def test_append_takes_what_the_model_gives() -> None:
    """Heads before tokens, as in [batch, heads, tokens, head_dim]."""
    k, v = torch.randn(2, 2, 50, 64)
    append_both(twins("saw-int4"), k.transpose(0, 1), v.transpose(0, 1))


def test_padding_slots_write_nothing() -> None:
    cache = twins("saw-int4:sink=2,recent=4")[1]
    seq = cache.new()
    batch = cache.extend([seq], [20])
    before = [x.clone() for x in (cache.stores[0].pages, *cache.stores[0].owned)]
    k, v = torch.randn(2, 20, 2, 64)
    append(cache.stores[0], k, v, batch._replace(slot_mapping=torch.full((20,), -1)))
    for old, new in zip(before, (cache.stores[0].pages, *cache.stores[0].owned), strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


@given(
    scale=st.floats(1e-30, 1e28),
    kind=st.sampled_from(["zeros", "constant", "one large", "normal"]),
    name=st.sampled_from(
        ["int4", "int2:meta=float16", "oscar", "kvant-2:rope=post", "int8", "int4:zero=float,search=5"]
    ),
)
def test_append_of_odd_numbers(scale: float, kind: str, name: str) -> None:
    x = {
        "zeros": torch.zeros(64),
        "constant": torch.ones(64),
        "one large": torch.eye(64)[3],
        "normal": torch.randn(64),
    }[kind]
    caches = twins(name)
    scale = min(scale, caches[0].largest / 8)
    k = (x * scale).expand(3, 2, 64).contiguous()
    append_both(caches, k, -k)


@pytest.mark.parametrize("count", [2, 16, 100, 500, 4096])
def test_the_nearest_centroid_is_the_nearest(count: int, isa: str) -> None:
    bits = max(1, count.bit_length() - 1)
    caches = twins(f"million-2:bits={bits}")
    for cache in caches:  # many that are nearly alike
        for stream in (cache.stores[0].key, cache.stores[0].value):
            books = stream.codec.codebooks  # type: ignore[attr-defined]
            books[:, :, 1::2] = (books[:, :, ::2].float() * (1 + 1e-3)).half()
    append_both(caches, *torch.randn(2, 200, 2, 64))


# --- prefill -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENWISE + GROUPWISE)
@pytest.mark.parametrize(("softcap", "sliding_window"), [(None, None), (5.0, None), (None, 50)])
def test_prefill_of_every_recipe(name: str, softcap: float | None, sliding_window: int | None) -> None:
    cache = filled(name, [300, 1, 70])
    seqs = [*cache.sequences, cache.new()]
    counts = [40, 3, 1, 9]
    batch = cache.extend(seqs, counts)
    q, (k, v) = torch.randn(53, 6, 64), torch.randn(2, 53, 2, 64)
    options = {"scale": 0.125, "softcap": softcap, "sliding_window": sliding_window}
    expected = reference.prefill(cache.stores[0], q.double(), k.double(), v.double(), batch, **options)  # type: ignore[arg-type]
    found = prefill(cache.stores[0], q, k, v, batch, **options)  # type: ignore[arg-type]
    assert relative_error(found, expected) < 1e-5


# --- what is served ----------------------------------------------------------------------------------------------------


def test_structures_are_those_of_the_header() -> None:
    found = library.module()
    assert not isinstance(found, str)
    kinds = (structures.Stream, structures.Batch, structures.Decode, structures.Append, structures.Read)
    assert found.sizes() == tuple(ctypes.sizeof(kind) for kind in kinds)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("int4", {"order": "plain"}, "order lanes, and this layout's is plain"),
        ("int4", {"order": "fragment"}, "order lanes, and this layout's is fragment"),
        ("int4", {"head_dim": 320}, "head dims up to 256, got 320"),
        ("gear", {}, "LowRank"),
        ("zipcache", {}, "Salient"),
        ("squat-pre", {}, "unrotated one by one"),
        ("kvant-2:levels=lloyd", {}, "of the keys are from a table"),
    ],
)
def test_layouts_are_refused_with_a_reason(name: str, options: dict[str, object], reason: str) -> None:
    layout = make_layout(name, 2, **({"head_dim": 64, "device": "cpu"} | options))  # type: ignore[arg-type]
    assert reason in (plan.refuse_layout(layout) or "")
    assert reason in (plan.refuse(layout, torch.device("cpu")) or "")


@pytest.mark.parametrize("name", ["million-2:k.rope=block", "saw-int4-kmeans:k.rope=block"])
def test_one_table_of_centroids_does_not_serve_turned_queries(name: str) -> None:
    layout = make_layout(name, 2, head_dim=64, device="cpu")
    assert plan.refuse(layout, torch.device("cpu")) is None
    assert "one table of products with centroids" in (cpu_decode.refuse(layout, torch.device("cpu")) or "")
    assert choose("decode", layout, torch.device("cpu")).name != "cpu"


def test_nothing_is_offered_on_a_gpu() -> None:
    layout = make_layout("int4", device="cpu")
    assert plan.refuse(layout, torch.device("cuda")) == "it runs on CPUs, not on cuda"
    assert plan.refuse(layout, torch.device("cpu")) is None


def test_the_engine_takes_them() -> None:
    for name in TOKENWISE:
        layout = make_layout(name, device="cpu")
        assert [choose(op, layout, "cpu").name for op in ("append", "decode", "prefill")] == ["cpu"] * 3
    layout = make_layout("squat", device="cpu")
    assert "learns from queries" in (cpu_append.refuse(layout, torch.device("cpu")) or "")
    assert choose("decode", layout, "cpu").name == "cpu"


def test_bad_input_is_refused() -> None:
    cache = filled("int4", [5])
    batch = cache.batch(cache.sequences)
    with pytest.raises(
        ValueError, match="queries must be \\[sequences, a multiple of 2 heads, 64\\], got \\[1, 3, 64\\]"
    ):
        decode(cache.stores[0], torch.randn(1, 3, 64), batch, scale=1.0)
    with pytest.raises(ValueError, match="queries must be float32, bfloat16, float16, got torch.int64"):
        decode(cache.stores[0], torch.zeros(1, 2, 64, dtype=torch.int64), batch, scale=1.0)
    keys = torch.zeros(1, 2, 64, dtype=torch.float64)
    with pytest.raises(ValueError, match="keys must be float32, bfloat16, float16, got torch.float64"):
        append(cache.stores[0], keys, keys, cache.extend(cache.sequences, [1]))


def test_an_instruction_set_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library.isa.cache_clear()
    monkeypatch.setenv(library.ISA, "generic")
    assert library.kinds()[library.isa()] == "generic"
    library.isa.cache_clear()
    monkeypatch.setenv(library.ISA, "abacus")
    with pytest.raises(ValueError, match="KVANT_CPU_ISA must be one of .*generic, got 'abacus'"):
        library.isa()
    library.isa.cache_clear()


def test_every_recipe_is_served_or_refused_by_name() -> None:
    """What is left to the reference is known."""
    refused = {name for name in recipes.names() if plan.refuse_layout(make_layout(name, device="cpu"))}
    assert refused == {"gear", "gear-l", "squat-pre", "zipcache"}


def test_a_missing_compiled_part_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "module", lambda: f"{NOT_BUILT} is missing (no such file)")
    layout = make_layout("int4", device="cpu")
    with pytest.warns(
        RuntimeWarning, match="decode of recipe int4 on cpu is the plain torch reference.*compiled part is missing"
    ):
        assert choose("decode", layout, "cpu").name == "reference"
    with pytest.raises(ValueError, match="nothing can decode recipe int4 on cpu: cpu: its compiled part is missing"):
        choose("decode", layout, "cpu", "cpu")


def test_a_compiled_part_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = library.module()
    assert not isinstance(found, str)

    class Older:
        kinds, sizes = found.kinds, found.sizes

    monkeypatch.setattr(library.importlib, "import_module", lambda name: Older)
    assert "older or newer than its sources" in library.module.__wrapped__()
