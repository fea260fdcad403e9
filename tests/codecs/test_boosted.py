from __future__ import annotations

import pytest
import torch

from kvant.codecs.boosted import Boosted
from kvant.layout import Layout
from kvant.recipes import get


def unpacked_quantizer(x: torch.Tensor, boosted: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixed precision without any packing, one channel of one head at a time: x is [tokens, channels] of one group."""
    strength = x.double().abs().mean(0)
    strongest = sorted(range(x.shape[1]), key=lambda c: (-float(strength[c]), c))[:boosted]
    codes, out = torch.zeros(x.shape, dtype=torch.int64), torch.zeros(x.shape)
    for c in range(x.shape[1]):
        top = 15 if c in strongest else 3
        low = x[:, c].min().half().float()
        scale = ((x[:, c].max() - low) / top).clamp_min(torch.finfo(torch.float16).tiny).half().float()
        codes[:, c] = ((x[:, c] - low) / scale).round().clamp(0, top).long()
        out[:, c] = codes[:, c] * scale + low
    return codes, out


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", ["kitty", "kitty-pro"])
def test_a_packed_page_reconstructs_the_codes_of_an_unpacked_quantizer(name: str, head_dim: int) -> None:
    recipe = get(name)
    codec = recipe.key.codec
    assert isinstance(codec, Boosted)
    layout = Layout.of(recipe, 2, head_dim)
    assert layout.page_tokens == 128, "the group is the page"
    x = torch.randn(256, 2, head_dim) * torch.rand(head_dim).exp() + torch.randn(head_dim)
    parts = codec.encode(x)
    runs = torch.full((2, 2, layout.page_head_bytes), 0xFF, dtype=torch.uint8)
    at = torch.arange(256)
    for data, places, pages in (
        (*layout.pack_tokens("key", parts, at % 128), at // 128),
        (*layout.pack_shared("key", parts, torch.zeros(2, dtype=torch.int64)), torch.arange(2)),
    ):
        runs[pages[:, None, None], torch.arange(2)[None, :, None], places[:, None, :]] = data
    back = layout.unpack("key", runs)
    found = codec.decode(back)
    boosted = codec.boosted(head_dim)
    assert boosted == head_dim * (0.125 if name == "kitty" else 0.25)
    for page in range(2):
        for head in range(2):
            own = x[128 * page : 128 * (page + 1), head]
            codes, expected = unpacked_quantizer(own, boosted)
            low = back["codes"][128 * page : 128 * (page + 1), head].long()
            index = back["index"][page, head].long()
            high = back["high"][128 * page : 128 * (page + 1), head].long()
            assert sorted(index[index < boosted].tolist()) == list(range(boosted)), "every row belongs to one channel"
            for c in range(head_dim):
                whole = low[:, c] + 4 * high[:, index[c]] if index[c] < boosted else low[:, c]
                assert torch.equal(whole, codes[:, c])
            torch.testing.assert_close(found[128 * page : 128 * (page + 1), head], expected, rtol=0, atol=0)


def test_a_page_has_no_mask_and_two_bits_everywhere() -> None:
    layout = Layout.of(get("kitty"), 1, 128)
    sections = {"+".join(s.names): s for s in layout.sections if s.stream == "key"}
    assert {name: (s.bits, s.rows, s.width) for name, s in sections.items()} == {
        "codes": (2, 128, 128),
        "high": (2, 128, 16),
        "index": (8, 1, 128),
        "scale+min": (16, 1, 128),
    }
    bits = 2 + 2 * 16 / 128 + 8 / 128 + 2 * 16 / 128  # codes, high bits, index, scale and minimum
    values = 2 + 2 * 16 / 128
    assert layout.bits_per_element() == (bits + values) / 2


def test_poisoned_parts_decode_without_a_fault() -> None:
    codec = Boosted(boost=0.25, group=32)
    parts = {f.name: torch.full((32 // f.tokens, 1, f.width), 255, dtype=torch.uint8) for f in codec.fields(64)}
    parts |= {name: torch.full((1, 1, 64), float("nan"), dtype=torch.float16) for name in ("scale", "min")}
    assert codec.decode(parts).shape == (32, 1, 64)


def test_ties_are_broken_by_the_channel() -> None:
    codec = Boosted(boost=0.125, group=16)
    x = torch.ones(16, 1, 64) * torch.tensor([1.0, -1.0]).repeat(32)
    assert codec.encode(x)["index"][0, 0].tolist() == [*range(8), *[8] * 56]


@pytest.mark.parametrize(("changes", "message"), [({"boost": 0.0}, "boost must be"), ({"boost": 1.1}, "boost must be")])
def test_mistakes_are_named(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Boosted(**changes)  # type: ignore[arg-type]


def test_odd_head_dims_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim must be a multiple of 4 and at most 256, got 66"):
        Boosted().fields(66)
    assert Boosted().boosted(80) == 12, "rounded up to whole bytes a token"
