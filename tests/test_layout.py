from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvant import recipes
from kvant.layout import Layout, code_places, fragment_refusal, human_bytes, lanes_refusal, meta_places, planes
from tests.conftest import make_layout

HEAD_DIMS = [64, 80, 96, 128, 192, 256]
UNCALIBRATED = [name for name in recipes.names() if not recipes.get(name).calibrated]
TOKENWISE = [n for n in UNCALIBRATED if not any(s.groupwise for s in recipes.get(n).streams.values())]


def test_planes_are_powers_of_two_that_add_up() -> None:
    for bits in range(1, 17):
        split = planes(bits)
        assert sum(width for width, _ in split) == bits
        assert all(width in (1, 2, 4, 8) for width, _ in split)
        assert [shift for _, shift in split] == [sum(w for w, _ in split[:i]) for i in range(len(split))]


@pytest.mark.parametrize("bits", [4, 2])
def test_fragment_order_of_keys_is_what_the_tensor_core_reads(bits: int) -> None:
    """Written out for head_dim 128 and 64-token pages: lane (g, t) of tile i holds tokens 16 i + g and 16 i + g + 8, channels
    32 t onwards; pair e of channels lies in word e // (16 / bits), its two channels in the halves of the word."""
    places = code_places("key", "fragment", 64, 128, bits)
    per_half, words = 16 // bits, 16 * bits // 16
    for tile in range(4):
        for g in range(8):
            for t in range(4):
                base = ((tile * 8 + g) * 4 + t) * 2 * words
                for row in range(2):
                    for e in range(16):
                        word = base + row * words + e // per_half
                        for half in range(2):
                            bit = 32 * word + 16 * half + bits * (e % per_half)
                            assert places[tile * 16 + row * 8 + g, 32 * t + 2 * e + half] * bits == bit


@pytest.mark.parametrize("bits", [4, 2])
def test_fragment_order_of_values_is_what_the_tensor_core_reads(bits: int) -> None:
    """Lane (g, t) holds token pairs t and t + 4 of a tile, channels 16 g onwards; the halves of a word are the two tokens."""
    places = code_places("value", "fragment", 64, 128, bits)
    per_half, words = 16 // bits, 16 * bits // 16
    for tile in range(4):
        for g in range(8):
            for t in range(4):
                base = ((tile * 8 + g) * 4 + t) * 2 * words
                for second in range(2):
                    for e in range(16):
                        word = base + second * words + e // per_half
                        for half in range(2):
                            bit = 32 * word + 16 * half + bits * (e % per_half)
                            token = tile * 16 + (second * 4 + t) * 2 + half
                            assert places[token, 16 * g + e] * bits == bit


def test_scales_lie_in_lane_order() -> None:
    places = meta_places("fragment", 64, 1, 2)
    for token in range(64):
        tile, row, g = token // 16, token % 16 // 8, token % 8
        assert places[token, 0, 0] == 2 * (8 * g + 2 * tile + row)
        assert places[token, 0, 1] == places[token, 0, 0] + 1


@given(
    st.sampled_from(["key", "value"]),
    st.sampled_from([16, 32, 64, 128]),
    st.sampled_from([16, 32, 48, 64, 80, 96, 128, 192, 256]),
    st.sampled_from([1, 2, 4, 8]),
)
def test_orders_are_permutations_in_which_tokens_own_bytes(stream: str, page: int, width: int, bits: int) -> None:
    for order, refusal in (("fragment", fragment_refusal), ("lanes", lanes_refusal)):
        if refusal(width, bits, page, stream) is None:  # type: ignore[operator]
            check_order(order, stream, page, width, bits)


def check_order(order: str, stream: str, page: int, width: int, bits: int) -> None:
    places = code_places(stream, order, page, width, bits)  # type: ignore[arg-type]
    assert sorted(places.flatten().tolist()) == list(range(page * width))
    owner = torch.full((page * width * bits // 8,), -1)
    for token in range(page):
        for byte in (places[token] * bits // 8).unique().tolist():
            assert owner[byte] in (-1, token), f"byte {byte} is shared"
            owner[byte] = token


@pytest.mark.parametrize(("width", "bits", "plane"), [(16, 2, 2), (32, 3, 1)])
def test_a_lane_may_have_one_byte_of_a_key(width: int, bits: int, plane: int) -> None:
    """A byte has a quarter of the channels of one token; those of tokens g and g + 8 of a lane are neighbours."""
    assert fragment_refusal(width, bits, 64, "key") is None and fragment_refusal(width, bits, 64, "value") is not None
    assert fragment_refusal(width, 1, 64, "key") is not None
    check_order("fragment", "key", 64, width, plane)
    places = code_places("key", "fragment", 64, width, plane) * plane
    for token in range(64):
        lane = (token // 16 * 8 + token % 8) * 4 + torch.arange(width) // (width // 4)
        assert torch.equal(places[token] // 8, 2 * lane + token % 16 // 8)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_sixteen_rows_of_a_product_have_one_scale(groups: int) -> None:
    """Values whose channels have several scales: rows g and g + 8 of the k-th product of lane g are elements 2 k and 2 k + 1."""
    width, bits = 128, 2
    places = code_places("value", "fragment", 64, width, bits, groups)
    assert sorted(places.flatten().tolist()) == list(range(64 * width))
    token = places[0]  # lanes g * 4, elements in their order
    words = width // 8 * 2 * bits // 32 * 2
    lane, rest = token // (words * 16), token % (words * 16)
    element = rest // 16 * 8 + rest % 8
    assert lane.unique().tolist() == [4 * g for g in range(8)]
    for k in range(width // 16):
        assert ((torch.arange(width) * groups // width)[element // 2 == k]).unique().numel() == 1


def test_what_a_group_shares_lies_apart_in_fragment_order() -> None:
    for device, order in (("cuda", "apart"), ("cpu", "plain")):
        layout = make_layout("kivi-k2v2", 2, 64, device=device)
        (section,) = (s for s in layout.sections if s.rows != layout.page_tokens)
        assert layout.section_places(section) == order
    assert meta_places("apart", 2, 3, 2)[1].tolist() == [[6, 9], [7, 10], [8, 11]]
    layouts = [make_layout(name, 2, 64) for name in ("kivi-k2v2", "kivi-k2v2:v.group=0", "int2")]
    assert [layout.scale_groups("value") for layout in layouts] == [2, 1, 1]
    assert layouts[0].scale_groups("key") == 1


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", TOKENWISE)
@pytest.mark.parametrize("page_tokens", [16, 32, 64, 128])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_is_packed_token_by_token_is_unpacked(name: str, head_dim: int, page_tokens: int, device: str) -> None:
    layout = make_layout(name, heads=3, head_dim=head_dim, page_tokens=page_tokens, device=device)
    runs = torch.full((2, 3, layout.page_head_bytes), 0xFF, dtype=torch.uint8)
    tokens = torch.randperm(2 * page_tokens)
    expected = {}
    for stream in ("key", "value"):
        codec = layout.recipe.streams[stream].codec.bind(head_dim)
        expected[stream] = codec.encode(torch.randn(2 * page_tokens, 3, head_dim))
        shuffled = {field: part[tokens] for field, part in expected[stream].items()}
        data, places = layout.pack_tokens(stream, shuffled, tokens % page_tokens)
        for row, token in enumerate(tokens.tolist()):
            for head in range(3):
                runs[token // page_tokens, head, places[row]] = data[row, head]
    for stream in ("key", "value"):
        found = layout.unpack(stream, runs)
        assert found.keys() == expected[stream].keys()
        for field, part in expected[stream].items():
            assert torch.equal(found[field], part), (stream, field)


@pytest.mark.parametrize("order", ["plain", "fragment", "lanes"])
def test_orders_hold_the_same_numbers_in_the_same_space(order: str) -> None:
    layout = make_layout("int4", order=order)
    assert layout.order == order
    assert layout.page_head_bytes == 64 * (64 + 4 + 4)


@pytest.mark.parametrize(
    ("name", "head_dim", "bits"),
    [
        ("full", 64, 16),
        ("int8", 128, 8.25),
        ("int4", 64, 4.5),
        ("int4", 128, 4.25),
        ("int3", 128, 3.25),
        ("int2", 64, 2.5),
        ("int2", 128, 2.25),
        ("int2:group=32", 128, 3.0),
        ("saw-int4", 256, 4.125),
        ("quarot-int2", 128, 2.25),
    ],
)
def test_bits_per_element_are_counted(name: str, head_dim: int, bits: float) -> None:
    assert make_layout(name, head_dim=head_dim).bits_per_element() == bits


def test_bits_at_a_context_count_windows_and_open_pages() -> None:
    layout = make_layout("quarot-int2-win", heads=1, head_dim=128)
    pages, windows = 2.25 * 1024 * 256, 320 * 256 * 16
    assert layout.bits_per_element(1024) == pytest.approx((pages + windows) / (1024 * 256))
    assert make_layout("int4").bits_per_element(1) == 64 * 4.5
    assert make_layout("full", dtype="float32").bits_per_element() == 32


def test_sections_are_aligned_and_do_not_overlap() -> None:
    for name in recipes.names():
        for head_dim in (64, 128):
            layout = make_layout(name, head_dim=head_dim)
            end = 0
            for section in layout.sections:
                assert section.offset % 16 == 0
                assert section.offset >= end
                end = section.offset + section.nbytes
            assert end <= layout.page_head_bytes < end + 16
            assert layout.page_bytes == 2 * layout.page_head_bytes


def test_plain_order_is_named_where_fragment_does_not_fit() -> None:
    layout = make_layout("int2", head_dim=80)
    assert (layout.order, layout.order_reason) == ("plain", "80 channels of 2 bits leave a lane with part of a byte")
    assert make_layout("int2", head_dim=128).order == "fragment"
    with pytest.raises(ValueError, match="recipe int2 does not fit fragment order: 80 channels of 2 bits"):
        make_layout("int2", head_dim=80, order="fragment")


def test_digest_names_everything_that_decides_bytes() -> None:
    base = {"recipe": "int4", "heads": 2, "head_dim": 64, "page_tokens": 64, "order": "fragment", "dtype": "bfloat16"}
    changes = [{}, {"recipe": "saw-int4"}, {"heads": 3}, {"head_dim": 128}, {"page_tokens": 32}, {"order": "plain"}]
    digests = {make_layout(**{**base, **change}).digest() for change in changes}  # type: ignore[arg-type]
    digests.add(make_layout(**base).digest("another artifact"))  # type: ignore[arg-type]
    assert len(digests) == len(changes) + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_tokens": 48}, "page_tokens must be 16, 32, 64 or 128, got 48"),
        ({"heads": 0}, "heads and head_dim must be positive"),
        ({"order": "random"}, "order must be fragment, lanes or plain"),
        ({"dtype": "int8"}, "dtype must be one of float32"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_layout("int4", **options)  # type: ignore[arg-type]


def test_a_head_dim_that_a_recipe_cannot_take_is_refused() -> None:
    with pytest.raises(ValueError, match="order must be a power of two that divides head_dim 96"):
        Layout.of(recipes.get("saw-int4:order=64"), 2, 96)


def test_human_bytes() -> None:
    assert [human_bytes(n) for n in (3, 1536, 250 * 1024**2, 1.5 * 1024**4)] == ["3 B", "1.5 KiB", "250 MiB", "1.5 TiB"]


def test_the_order_of_lanes_is_what_dot_products_read() -> None:
    keys = code_places("key", "lanes", 32, 64, 4)
    # a 32-bit lane holds four neighbouring channels of a token in its low halves of bytes, and those 32 further on in the high
    assert [int(keys[0, c]) // 8 for c in (0, 1, 2, 3, 32, 35)] == [0] * 6
    assert [int(keys[t, 0]) // 8 for t in (0, 1, 15, 16)] == [0, 1, 15, 16 * 8]
    values = code_places("value", "lanes", 32, 64, 4)
    # a lane holds a byte of each of four tokens
    assert [int(values[t, 0]) // 2 for t in range(5)] == [0, 1, 2, 3, 4 * 32]
    assert [int(values[0, c]) // 8 for c in (0, 1, 31, 32)] == [0, 1, 31, 0]


def test_on_a_cpu_the_order_is_lanes_where_it_fits() -> None:
    assert make_layout("int2", head_dim=64, device="cpu").order == "lanes"
    layout = make_layout("int2", head_dim=40, device="cpu")
    assert (layout.order, layout.order_reason) == (
        "plain",
        "40 channels of 2 bits are not a whole number of 32-bit lanes",
    )
    with pytest.raises(ValueError, match="recipe int2 does not fit lanes order: 40 channels of 2 bits"):
        make_layout("int2", head_dim=40, order="lanes")
