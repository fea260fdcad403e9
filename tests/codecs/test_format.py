"""A stream's format says what its fields and its sections of a page say, and what decoding does."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvant import recipes
from kvant.codecs import ScaleKind, StreamFormat
from kvant.codecs.affine import Affine
from kvant.codecs.banded import Banded
from kvant.codecs.boosted import Boosted
from kvant.codecs.lloyd_max import LloydMax
from kvant.layout import Layout
from kvant.recipe import Recipe, Stream

HEAD_DIMS = [64, 80, 96, 128, 192, 256]
STREAMS = [(name, stream) for name in recipes.names() for stream in ("key", "value")]


def layout_of(name: str, head_dim: int) -> Layout:
    try:
        return Layout.of(recipes.get(name), 2, head_dim)
    except ValueError as refusal:
        pytest.skip(str(refusal))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("name", "stream"), STREAMS)
def test_a_format_agrees_with_the_fields_and_sections_that_are_placed(name: str, stream: str, head_dim: int) -> None:
    layout = layout_of(name, head_dim)
    found = layout.format(stream)  # type: ignore[arg-type]
    fields = {field.name: field for field in layout.fields(stream)}  # type: ignore[arg-type]
    assert hash(found) == hash(dataclasses.replace(found)) and found.head_dim == head_dim
    assert found.group_tokens == layout.recipe.streams[stream].codec.group_tokens  # type: ignore[index]
    described = set(found.extras) | ({"high", "index"} if found.boosted else set())

    end = 0
    for band in found.bands:  # they cover the channels
        assert band.first == end and band.width > 0
        end = band.end
        assert bool(band.field) == bool(band.bits)
        assert len(band.levels) in (0, 1 << band.bits)
    assert end == (head_dim if found.bands else 0)

    sections = [section for section in layout.sections if section.stream == stream]
    for band in found.stored_bands:
        field = fields[band.field]
        assert (field.kind, field.bits, field.width, field.tokens) == ("code", band.bits, band.width, 1)
        planes = [section for section in sections if section.names == (band.field,)]
        assert sum(plane.bits for plane in planes) == band.bits
        assert {plane.width for plane in planes} == {band.width}
        described.add(band.field)

    if found.scales is not None:
        scales = found.scales
        assert len(scales.fields) == (1 if scales.kind is ScaleKind.ALONE else 2)
        each = scales.groups * (head_dim if scales.axis == "channel" else 1)
        for entry in scales.fields:
            assert (fields[entry].kind, fields[entry].dtype) == ("meta", scales.dtype)
            assert fields[entry].width * scales.tokens == each * fields[entry].tokens
        assert [s.names for s in sections if s.kind == "meta" and s.names[0] == "scale"] in ([], [scales.fields])
        described |= {*scales.fields}

    if found.codebook is not None:
        book = found.codebook
        assert book.dim * book.vectors == head_dim
        if book.field:
            field = fields[book.field]
            assert (field.kind, field.bits, field.width, field.tokens) == ("index", book.bits, book.vectors, 1)
            assert book.centroids <= 1 << book.bits
            described.add(book.field)
    if found.boosted:
        assert fields["high"].width == found.boosted and fields["index"].width == head_dim
    if found.is_raw:
        (field,) = fields.values()
        assert (field.kind, field.dtype, field.width) == ("raw", found.raw_dtype, head_dim)
        described.add(field.name)
    assert described == fields.keys()
    kinds = (found.is_raw, found.is_pq, found.is_residual, found.is_tokenwise, found.is_channelwise)
    assert sum(kinds) == (0 if found.extras else 1)


@pytest.mark.parametrize(
    "codec",
    [
        Affine(bits=2, group=32),
        Affine(bits=4, zero="integer"),
        Affine(bits=3),
        Banded(weighted=False),
        Banded(bits="4/2/1", levels="lloyd", weighted=False),
        LloydMax(bits=3),
    ],
)
def test_decoding_is_what_the_format_says(codec: Affine | Banded | LloydMax) -> None:
    """x = scale * level(code) + offset."""
    torch.manual_seed(0)
    bound = codec.bind(64, {})
    parts = bound.encode(torch.randn(5, 2, 64))
    found = codec.format(64)
    assert found.scales is not None and found.is_tokenwise
    scale = parts[found.scales.fields[0]].float().abs().repeat_interleave(64 // found.scale_groups, -1)
    out = torch.zeros(5, 2, 64)
    for band in found.stored_bands:
        codes = parts[band.field].float()
        level = torch.tensor(band.levels)[codes.long()] if band.levels else band.step * codes + band.lowest
        out[..., band.first : band.end] = scale[..., : band.width] * level if found.scale_groups == 1 else scale * level
    if found.scales.kind is not ScaleKind.ALONE:
        offset = parts[found.scales.fields[1]].float().repeat_interleave(64 // found.scale_groups, -1)
        out += offset if found.scales.kind is ScaleKind.MIN else -scale * offset
    assert torch.allclose(bound.decode(parts), out, atol=1e-5)


def test_a_layout_binds_the_models_type_and_keeps_the_format() -> None:
    layout = Layout.of(recipes.get("full"), 1, 64, dtype="float16")
    assert layout.format("key").raw_dtype == "float16"
    assert layout.format("key") is layout.format("key")


def test_what_is_chosen_when_encoding_is_in_the_format_and_layers_numbers_are_not() -> None:
    calibrated = Affine(bits=2, clip=0.0, search=4)
    bound = calibrated.bind(64, {"clip": torch.tensor(0.96)})
    assert calibrated.format(64) == bound.format(64)
    assert bound.format(64).encoding.clip and bound.format(64).encoding.search == 4
    assert bound.tensors.clip == pytest.approx(0.96)
    keys = Banded(flag=True).format(64)
    assert keys.mean_flag and keys.encoding.weighted and keys.encoding.unbiased


def test_formats_tell_groups_of_channels_from_groups_of_tokens() -> None:
    found: list[StreamFormat] = [Affine(group=16).format(64), Boosted().format(64)]
    assert [f.scale_groups for f in found] == [4, 1]
    assert [f.group_tokens for f in found] == [1, 128]
    recipe = Recipe("test", key=Stream(Affine()), value=Stream(Affine(bits=2, group=16)))
    layout = Layout.of(recipe, 1, 64)
    assert layout.scale_groups("value") == layout.format("value").scale_groups == 4
