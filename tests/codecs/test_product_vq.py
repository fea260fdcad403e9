from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvant import recipes
from kvant.codecs.product_vq import ProductVQ
from kvant.layout import Layout, StreamName
from kvant.recipe import Recipe, Stream

DIMS = [64, 80, 96, 128, 256]


def bound(spec: ProductVQ, head_dim: int, heads: int):  # type: ignore[no-untyped-def]
    return spec.bind(head_dim, {"codebooks": torch.randn(spec.book_shape(head_dim, heads)).half()})


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize(("dim", "bits"), [(2, 8), (4, 8), (4, 10), (4, 12), (8, 8), (8, 12), (2, 3)])
@pytest.mark.parametrize("books", ["layer", "head", "space"])
def test_every_index_is_that_of_the_nearest_centroid(head_dim: int, dim: int, bits: int, books: str) -> None:
    heads, tokens = 2, 7
    spec = ProductVQ(dim, bits, books)  # type: ignore[arg-type]
    codec = bound(spec, head_dim, heads)
    x = torch.randn(tokens, heads, head_dim)
    parts = codec.encode(x)
    indices = parts["indices"]
    assert indices.shape == (tokens, heads, head_dim // dim)
    decoded = codec.decode(parts)
    for head in range(heads):
        for space in range(head_dim // dim):
            book = codec.codebooks[head if books != "layer" else 0, space if books == "space" else 0]
            part = slice(space * dim, (space + 1) * dim)
            distance = (x[:, head, None, part].double() - book.double()).square().sum(-1)
            assert torch.equal(indices[:, head, space].long(), distance.argmin(-1))
            assert torch.equal(decoded[:, head, part], book[indices[:, head, space].long()].float())


def test_sixteen_bits_of_index() -> None:
    codec = bound(ProductVQ(8, 16), 64, 1)
    x = torch.randn(3, 1, 64)
    parts = codec.encode(x)
    distance = (x.reshape(-1, 1, 8).double() - codec.codebooks[0, 0].double()).square().sum(-1)
    assert torch.equal(parts["indices"].flatten().long(), distance.argmin(-1))
    assert int(parts["indices"].max()) > 1 << 12
    assert Layout.of(recipes.get("million-2:dim=8,bits=16"), 1, 64).bits_per_element() == 2


@given(
    st.sampled_from(DIMS),
    st.sampled_from([2, 4, 8]),
    st.integers(1, 16),
    st.integers(1, 40),
    st.sampled_from([16, 64, 128]),
    st.integers(0, 2**31),
)
def test_indices_of_every_width_survive_a_page(
    head_dim: int, dim: int, bits: int, tokens: int, page_tokens: int, seed: int
) -> None:
    """Any index that a codec may store comes back, and every byte has one owner; what does not fit is refused."""
    stream = Stream(ProductVQ(dim, bits))  # type: ignore[arg-type]
    recipe = Recipe("vq", stream, stream)
    planes = [width for width in (8, 4, 2, 1) if bits & width] + ([8] if bits == 16 else [])
    if any(head_dim // dim * width % 8 for width in planes):
        with pytest.raises(ValueError, match=f"indices of {bits} bits would share a byte"):
            Layout.of(recipe, 2, head_dim, page_tokens)
        return
    layout = Layout.of(recipe, 2, head_dim, page_tokens)
    random = torch.Generator().manual_seed(seed)
    shape = page_tokens, 2, head_dim // dim
    indices = torch.randint(0, 1 << bits, shape, generator=random).to(torch.uint8 if bits <= 8 else torch.int32)
    pages = torch.full((1, 2, layout.page_head_bytes), 0xFF, dtype=torch.uint8)
    owners = torch.zeros(layout.page_head_bytes, dtype=torch.int64)
    names: tuple[StreamName, StreamName] = ("key", "value")
    for name in names:
        offsets = torch.randperm(page_tokens, generator=random)
        data, places = layout.pack_tokens(name, {"indices": indices[offsets]}, offsets)
        for i in range(page_tokens):
            pages[0][:, places[i]] = data[i]
            owners[places[i]] += 1
    assert int(owners.max()) == 1
    for name in names:
        assert torch.equal(layout.unpack(name, pages)["indices"], indices)
    assert layout.bits_per_element() == pytest.approx(bits / dim, abs=16 * 8 * 8 / (2 * page_tokens * head_dim))


def test_indices_lie_in_plain_order_beside_codes_in_fragment_order() -> None:
    layout = Layout.of(recipes.get("saw-int4-kmeans"), 2, 128)
    assert layout.order == "fragment"
    index = [section for section in layout.sections if section.kind == "index"]
    assert [(s.stream, s.bits, s.nbytes) for s in index] == [("key", 8, 64), ("value", 8, 64)]
    _, places = layout.pack_tokens("key", _some_parts(layout, "key"), torch.arange(64))
    assert places[:, -1].tolist() == [index[0].offset + token for token in range(64)]


def _some_parts(layout: Layout, name: StreamName) -> dict[str, torch.Tensor]:
    dtypes = {"uint8": torch.uint8, "bfloat16": torch.bfloat16}
    return {f.name: torch.ones(64, layout.heads, f.width, dtype=dtypes[f.dtype]) for f in layout.fields(name)}


def test_no_tokens_have_no_indices() -> None:
    for books in ("layer", "head", "space"):
        codec = bound(ProductVQ(4, 12, books), 64, 3)  # type: ignore[arg-type]
        assert codec.encode(torch.zeros(0, 3, 64))["indices"].shape == (0, 3, 16)
        assert codec.decode({"indices": torch.zeros(0, 3, 16, dtype=torch.int32)}).shape == (0, 3, 64)


def test_codebook_bytes_are_what_the_codebooks_take() -> None:
    assert ProductVQ(4, 8).codebook_bytes(128, 8) == 2**8 * 4 * 2  # the paper's 2-bit codebook
    assert ProductVQ(8, 12).codebook_bytes(128, 8) == 2**12 * 8 * 2  # and its 1.5-bit one
    for books in ("layer", "head", "space"):
        spec = ProductVQ(4, 8, books)  # type: ignore[arg-type]
        assert bound(spec, 64, 3).codebooks.nbytes == spec.codebook_bytes(64, 3)


def test_what_does_not_fit_is_refused() -> None:
    for fields, message in (
        ({"dim": 3}, "dim must be 2, 4 or 8 channels, got 3"),
        ({"bits": 17}, "bits must be between 1 and 16, got 17"),
        ({"bits": 0}, "bits must be between 1 and 16, got 0"),
        ({"books": "token"}, "books must be layer, head or space, got 'token'"),
    ):
        with pytest.raises(ValueError, match=message):
            ProductVQ(**fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dim must divide head_dim 66, got 8"):
        ProductVQ(8, 12).fields(66)
    with pytest.raises(
        ValueError, match="does not fit head_dim 80: a token's 10 indices of 10 bits would share a byte"
    ):
        Layout.of(recipes.get("vecinfer-2:dim=8,bits=10"), 1, 80)


def test_codebooks_that_are_missing_or_of_another_shape_are_refused() -> None:
    spec = ProductVQ(4, 8, "head")
    with pytest.raises(ValueError, match="needs the codebooks that kvant calibrate fits"):
        spec.bind(64, {})
    for wrong in (
        torch.zeros(3, 1, 256, 8),
        torch.zeros(3, 16, 256, 4),
        torch.zeros(256, 4),
        torch.zeros(3, 1, 255, 4),
    ):
        with pytest.raises(ValueError, match="codebooks must be"):
            spec.bind(64, {"codebooks": wrong.half()})
    with pytest.raises(ValueError, match=r"codebooks must be torch.float16 .* got torch.float32"):
        spec.bind(64, {"codebooks": torch.zeros(3, 1, 256, 4)})
    assert spec.bind(64) is spec  # shapes alone need no tensors
