from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvant.codecs.affine import Affine, magnitude_quantile
from kvant.codecs.base import DTYPES
from kvant.codecs.raw import Raw

SHAPES = [(1, 1, 64), (63, 3, 80), (129, 2, 96), (5, 8, 128), (2, 1, 256)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("meta", ["bfloat16", "float16"])
@pytest.mark.parametrize("zero", ["float", "integer"])
def test_error_is_at_most_half_a_step_and_what_rounding_the_scale_costs(
    shape: tuple[int, int, int], bits: int, meta: str, zero: str
) -> None:
    x = torch.randn(shape) * torch.logspace(-1, 1, shape[-1])
    codec = Affine(bits=bits, meta=meta, zero=zero)
    parts = codec.encode(x)
    assert parts["codes"].dtype == torch.uint8
    assert int(parts["codes"].max()) < 1 << bits
    scale = parts["scale"].float()[..., None, :].expand(*shape[:2], 1, 1).reshape(*shape[:2], 1)
    error = (codec.decode(parts) - x).abs() / scale
    # rounding the scale (and a float minimum) to 8 or 11 bits moves the ends of the range by this many steps
    ends = (1 << bits) * (2**-8 if meta == "bfloat16" else 2**-11)
    assert float(error.max()) <= 0.5 + (1.0 if zero == "integer" else 2 * ends)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_equations_3_and_4_of_saw_int4(bits: int) -> None:
    """The integer zero point, written out: s = (max - min) / (2^b - 1), z = round(-min / s), q = clip(round(x / s) + z)."""
    x = torch.randn(7, 2, 64)
    parts = Affine(bits=bits, zero="integer").encode(x)
    scale = parts["scale"].float()
    exact = (x.amax(-1) - x.amin(-1)) / (2**bits - 1)
    assert torch.equal(scale[..., 0], exact.to(torch.bfloat16).float())
    zero = torch.round(-x.amin(-1, keepdim=True) / scale)
    codes = (torch.round(x / scale) + zero).clamp(0, 2**bits - 1)
    assert torch.equal(parts["codes"].float(), codes)
    assert torch.equal(parts["zero"].float(), zero)
    assert torch.equal(Affine(bits=bits, zero="integer").decode(parts), (codes - zero) * scale)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups_are_coded_on_their_own(group: int) -> None:
    x = torch.randn(9, 2, 128)
    grouped = Affine(bits=2, group=group)
    alone = Affine(bits=2)
    found = grouped.decode(grouped.encode(x))
    for start in range(0, 128, group):
        part = x[..., start : start + group]
        assert torch.equal(found[..., start : start + group], alone.decode(alone.encode(part)))


def test_clip_is_the_quantile_of_the_whole_head_before_groups() -> None:
    x = torch.randn(50, 3, 128)
    limit = torch.quantile(x.abs(), 0.92, dim=-1, keepdim=True)
    torch.testing.assert_close(magnitude_quantile(x, 0.92), limit)
    clipped, plain = Affine(bits=2, group=32, clip=0.92), Affine(bits=2, group=32)
    expected = plain.encode(x.clamp(-limit, limit))
    found = clipped.encode(x)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


@given(st.integers(1, 40), st.sampled_from([8, 4, 3, 2]), st.integers(0, 2**31))
def test_a_token_is_coded_the_same_whatever_stands_beside_it(tokens: int, bits: int, seed: int) -> None:
    x = torch.randn(tokens, 2, 64, generator=torch.Generator().manual_seed(seed))
    codec = Affine(bits=bits, clip=0.96, group=32)
    whole = codec.encode(x)
    for name, part in whole.items():
        single = torch.cat([codec.encode(row[None])[name] for row in x])
        assert torch.equal(single, part)


@pytest.mark.parametrize("value", [0.0, 3.0, -2.5, 1e-30, 1e4])
def test_a_constant_vector_survives(value: float) -> None:
    x = torch.full((2, 1, 64), value)
    for zero in ("float", "integer"):
        found = Affine(bits=4, zero=zero).decode(Affine(bits=4, zero=zero).encode(x))
        torch.testing.assert_close(found, x, rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("meta", ["bfloat16", "float16"])
@pytest.mark.parametrize("search", [1, 3])
@pytest.mark.parametrize("level", [1.0, -1.0, 100.0, -4000.0])
@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-5, 1e-4, 1e-3, 1e-2])
def test_nearly_constant_vectors_survive_an_integer_zero(
    bits: int, meta: str, search: int, level: float, noise: float
) -> None:
    """Scale and zero point are rounded to their type."""
    x = level * (1 + noise * torch.randn(9, 2, 64))
    codec = Affine(bits=bits, meta=meta, search=search, zero="integer")
    step = (x.amax(-1) - x.amin(-1)) / ((1 << bits) - 1)
    off = 2 * abs(level) * torch.finfo(DTYPES[meta]).eps + 2 * step + 2 * torch.finfo(DTYPES[meta]).tiny
    error = (codec.decode(codec.encode(x)) - x).abs().amax(-1)
    assert bool((error <= off).all()), float((error / off).max())


def test_lower_bits_cost_more() -> None:
    x = torch.randn(100, 2, 128)
    errors = [float((Affine(bits=b).decode(Affine(bits=b).encode(x)) - x).square().mean()) for b in (8, 4, 3, 2)]
    assert errors == sorted(errors)
    assert errors[3] > 50 * errors[1] / 4, "two bits less are about sixteen times the error"


def test_raw_keeps_what_its_type_keeps() -> None:
    x = torch.randn(3, 2, 64)
    assert torch.equal(Raw("float32").decode(Raw("float32").encode(x)), x)
    assert torch.equal(Raw("bfloat16").decode(Raw("bfloat16").encode(x)), x.to(torch.bfloat16).float())
    assert Raw().bind(64, dtype="float32") == Raw("float32")


def test_a_group_that_does_not_divide_the_head_is_refused() -> None:
    with pytest.raises(ValueError, match="group must divide head_dim 80, got 64"):
        Affine(group=64).fields(80)
