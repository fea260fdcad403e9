"""Whether stored codes are right, number by number, on a machine that adds in any order.

Two computations that add the same numbers in another order differ in the last bits of the sum. A code can then differ only where
the number lies within that rounding of the middle between two levels, a 16-bit scale only where its exact value lies within it
of the middle between two 16-bit numbers, an index only where two centroids are equally near. That is what is asserted here: the
numbers are computed in float64, `off` is how far single precision may have taken each of them from there, and a stored code
must be one that a number within that distance has. Codes are checked against the scale that is stored beside them.

All errors are bounds, not estimates: a sum of n terms in single precision is off by at most n * UNIT times the sum of their magnitudes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from kvant.cache import PagedCache, Sequence
from kvant.codecs import DTYPES, BoundCodec
from kvant.codecs.affine import LARGEST_ZERO, NARROWEST, Affine, magnitude_quantile
from kvant.codecs.banded import STEPS, STRETCH, BoundBanded
from kvant.codecs.base import Parts
from kvant.codecs.boosted import Boosted
from kvant.codecs.channel import Channel
from kvant.codecs.lloyd_max import LloydMax
from kvant.codecs.product_vq import BoundProductVQ
from kvant.codecs.raw import Raw
from kvant.codecs.residual_kmeans import BoundResidualKMeans
from kvant.layout import StreamName
from kvant.ops.reference import overlay_index
from kvant.ops.types import BoundStream

Tensor = torch.Tensor
UNIT = 2.0**-24  # what rounding to single precision takes of a number, at most
DOUBLE = 2.0**-50  # some roundings to double precision
STEPS_OF_A_TRANSFORM = (
    16  # roundings a number passes through: rope 3, smoothing 1, eight passes of a Hadamard transform and its scale
)


def allowed(found: Tensor, quantize: Callable[[Tensor], Tensor], number: Tensor, off: Tensor | float) -> Tensor:
    """Whether `found` is the code of a number within `off` of this one. Quantizing keeps order, so the ends of that range decide."""
    found = found.double()
    return (found >= quantize(number - off).double()) & (found <= quantize(number + off).double())


def _rounded(dtype: torch.dtype, least: float = -float("inf")) -> Callable[[Tensor], Tensor]:
    """To a 16-bit type, between its limits; `least` is for a scale."""
    top = torch.finfo(dtype).max
    return lambda x: x.clamp(max(least, -top), top).to(dtype)


def _in_codes(top: Tensor | float) -> Callable[[Tensor], Tensor]:
    top = torch.as_tensor(top, dtype=torch.float64)
    return lambda x: torch.minimum(x.round().clamp_min(0), top)


def correct(codec: BoundCodec, parts: Parts, x: Tensor, off: Tensor) -> Tensor:
    """Whether every stored code of vectors x, float64 [tokens, heads, head_dim], may be what it is: bool [tokens, heads].

    off  [tokens, heads, head_dim or 1]: how far rounding may have taken the numbers from x before they were coded.
    """
    off = off.expand_as(x)
    if isinstance(codec, Raw):
        return allowed(parts["values"], lambda y: y.to(parts["values"].dtype), x, off).all(-1)
    if isinstance(codec, LloydMax):
        return _lloyd_max(codec, parts, x, off)
    if isinstance(codec, Affine):
        return _affine(codec, parts, x, off)
    if isinstance(codec, BoundBanded):
        return _banded(codec, parts, x, off)
    if isinstance(codec, BoundProductVQ):
        return _product_vq(codec, parts, x, off)
    if isinstance(codec, BoundResidualKMeans):
        return _residual(codec, parts, x, off)
    if isinstance(codec, Channel | Boosted):
        return _channelwise(codec, parts, x, off)
    raise AssertionError(f"nobody has said which codes of {type(codec).__name__} are right")


def _lloyd_max(codec: LloydMax, parts: Parts, x: Tensor, off: Tensor) -> Tensor:
    dtype = DTYPES[codec.meta]
    norm, levels = x.norm(dim=-1, keepdim=True), codec.levels(x.shape[-1]).double()
    slack = off.norm(dim=-1, keepdim=True) + 2 * UNIT * norm
    good = allowed(parts["norm"], _rounded(dtype), norm, slack)
    divisor = parts["norm"].double().clamp_min(torch.finfo(dtype).tiny)
    unit, edges = x / divisor, (levels[1:] + levels[:-1]) / 2
    codes = allowed(parts["codes"], lambda y: torch.bucketize(y, edges), unit, off / divisor + 2 * UNIT * unit.abs())
    return good.all(-1) & codes.all(-1)


def _affine(codec: Affine, parts: Parts, x: Tensor, off: Tensor) -> Tensor:
    tokens, heads, dim = x.shape
    if codec.clip < 1.0:
        limit = magnitude_quantile(x, codec.clip)  # moves by no more than the numbers do
        off = torch.maximum(off, off.amax(-1, keepdim=True) + 4 * UNIT * limit)
        x = x.clamp(-limit, limit)
    groups = codec.groups(dim)
    x, off, codes = (y.reshape(tokens, heads, groups, -1) for y in (x, off, parts["codes"].double()))
    scale, more = parts["scale"].double(), parts["min" if codec.zero == "float" else "zero"].double()
    low, high = x.amin(-1), x.amax(-1)
    wide = off.amax(-1) + 4 * UNIT * torch.maximum(low.abs(), high.abs())
    ranges = [(low, high, off.amax(-1))]
    for i in range(1, codec.search):
        reach = (high - low) / 2 * (1.0 - (1.0 - NARROWEST) * i / (codec.search - 1))
        ranges.append(((high + low) / 2 - reach, (high + low) / 2 + reach, wide))
    good = torch.stack([_affine_range(codec, codes, scale, more, x, off, *each) for each in ranges])
    if codec.search > 1:  # none of the other ranges is clearly better
        slack = off.amax(-1) + 8 * UNIT * (x.abs().amax(-1) + wide)
        least = torch.stack([_affine_error(codec, x, off, *each).amax(0) for each in ranges]).amin(0)
        own = (_affine_values(codec, codes, scale, more) - x).square().sum(-1)
        good = good & (own <= least + _loose(own, x.shape[-1], slack) + _loose(least, x.shape[-1], slack))
    return good.any(0).all(-1)


def _loose(squares: Tensor, n: int, slack: Tensor) -> Tensor:
    """How far a sum of n squares is off where each number is off by `slack`."""
    return 2 * (squares * n).sqrt() * slack + n * slack.square() + 2 * n * UNIT * squares


def _affine_values(codec: Affine, codes: Tensor, scale: Tensor, more: Tensor) -> Tensor:
    if codec.zero == "float":
        return codes * scale[..., None] + more[..., None]
    return (codes - more[..., None]) * scale[..., None]


def _affine_range(
    codec: Affine,
    codes: Tensor,
    scale: Tensor,
    more: Tensor,
    x: Tensor,
    off: Tensor,
    low: Tensor,
    high: Tensor,
    wide: Tensor,
) -> Tensor:
    """Whether groups [..., channels] may have been coded so for a range: bool [...]."""
    dtype, top = DTYPES[codec.meta], (1 << codec.bits) - 1
    start = more if codec.zero == "float" else low
    step, loose = (high - start) / top, (2 * wide + 4 * UNIT * (high.abs() + start.abs())) / top
    if codec.zero == "integer":
        step, loose = torch.maximum(step, low.abs() / LARGEST_ZERO), torch.maximum(loose, wide / LARGEST_ZERO)
    good = allowed(scale, _rounded(dtype, torch.finfo(dtype).tiny), step, loose)
    number = x / scale[..., None]
    slack = off / scale[..., None] + 4 * UNIT * number.abs()
    if codec.zero == "float":
        good &= allowed(more, _rounded(dtype), low, wide)
        shift = more[..., None] / scale[..., None]
        fits = allowed(codes, _in_codes(top), number - shift, slack + 4 * UNIT * shift.abs())
    else:
        zero = -low / scale
        whole = lambda y: y.round().clamp(-LARGEST_ZERO, LARGEST_ZERO).to(dtype)  # noqa: E731
        good &= allowed(more, whole, zero, wide / scale + 4 * UNIT * zero.abs())
        fits = allowed(codes, lambda y: (y.round() + more[..., None]).clamp(0, top), number, slack)
    return good & fits.all(-1)


def _affine_error(codec: Affine, x: Tensor, off: Tensor, low: Tensor, high: Tensor, wide: Tensor) -> Tensor:
    """Squared errors that a range may leave: its scale and minimum may each have been rounded either way."""
    dtype, top = DTYPES[codec.meta], (1 << codec.bits) - 1
    out = []
    for a, b in itertools.product((-1, 1), repeat=2):
        start = _rounded(dtype)(low + a * wide).double() if codec.zero == "float" else low
        slack = (2 * wide + 4 * UNIT * (high.abs() + start.abs())) / top
        step = (high - start) / top + b * slack
        step = step if codec.zero == "float" else torch.maximum(step, low.abs() / LARGEST_ZERO)
        scale = _rounded(dtype, torch.finfo(dtype).tiny)(step).double()
        if codec.zero == "float":
            more, codes = start, _in_codes(top)((x - start[..., None]) / scale[..., None])
        else:
            near = -low / scale + a * (wide / scale + 4 * UNIT * (low / scale).abs())
            more = near.round().clamp(-LARGEST_ZERO, LARGEST_ZERO).to(dtype).double()
            codes = ((x / scale[..., None]).round() + more[..., None]).clamp(0, top)
        out.append((_affine_values(codec, codes, scale, more) - x).square().sum(-1))
    return torch.stack(out)


def _banded(codec: BoundBanded, parts: Parts, x: Tensor, off: Tensor) -> Tensor:
    spec, dtype, dim = codec.spec, DTYPES[codec.spec.meta], x.shape[-1]
    assert spec.levels == "uniform"
    weights = codec._weights(x.device).double()
    stored = parts["scale"].double()
    options = []  # every scale that may have been tried: numbers, their rounding, scale, least and largest error, sign
    limit = torch.full_like(stored, float("inf"))  # that the error of the chosen one does not exceed
    for sign, taken in ((1.0, None), (-1.0, codec.mean)):
        if sign < 0 and taken is None:
            continue
        y = x if taken is None else x - taken.double()
        slack = off + (0 if taken is None else UNIT * y.abs())
        own = torch.cat([y[..., at] for _, at, _ in codec.bands], -1)
        n, rms = own.shape[-1], own.square().mean(-1, keepdim=True).sqrt()
        loose = slack.amax(-1, keepdim=True) + 2 * n * UNIT * rms
        for factor in codec.factors:
            largest = torch.zeros_like(stored)
            for side in (-1, 1):
                near = (rms + side * loose) * factor
                scale = _rounded(dtype, torch.finfo(dtype).tiny)(near).double()
                error = torch.zeros_like(stored)
                rounding = torch.zeros_like(stored)
                for _, at, bits in codec.bands:
                    missed, cost = y[..., at] - scale * _levels(_codes(y[..., at], scale, bits), bits), weights[:, at]
                    each = slack[..., at] + 4 * UNIT * (y[..., at].abs() + missed.abs())
                    error += (missed.square() * cost).sum(-1, keepdim=True)
                    rounding += ((2 * missed.abs() * each + each.square()) * cost).sum(-1, keepdim=True)
                rounding += 2 * dim * UNIT * error
                options.append((y, slack, scale, error - rounding, sign))
                largest = torch.maximum(largest, error + rounding)
            limit = torch.minimum(limit, largest)
    good = torch.zeros_like(stored, dtype=torch.bool)
    for y, slack, scale, least, sign in options:
        fits = (least <= limit) & (stored.sign() == sign)
        reached, parted, moved = (torch.zeros_like(stored) for _ in range(3))
        for name, at, bits in codec.bands:
            number = y[..., at] / scale / STEPS[bits] + ((1 << bits) - 1) / 2
            near = slack[..., at] / scale / STEPS[bits] + 4 * UNIT * (number.abs() + 8)
            found = parts[name].double()
            fits &= allowed(found, _in_codes((1 << bits) - 1), number, near).all(-1, keepdim=True)
            terms = weights[:, at] * y[..., at] * _levels(found, bits)
            reached += terms.sum(-1, keepdim=True)
            parted += terms.abs().sum(-1, keepdim=True)
            moved += (weights[:, at] * slack[..., at] * _levels(found, bits).abs()).sum(-1, keepdim=True)
        wanted, rounding = scale, 2 * UNIT * scale
        if spec.unbiased:
            squares = (weights * y.square()).sum(-1, keepdim=True)
            product = (reached * scale).clamp_min(torch.finfo(torch.float32).tiny)
            stretch = squares / product
            share = 2 * dim * UNIT * (1 + parted * scale / product) + moved * scale / product
            share = share + 2 * (weights * slack * y.abs()).sum(-1, keepdim=True) / squares.clamp_min(1e-300)
            wanted = scale * stretch.clamp(*STRETCH)
            rounding = wanted * torch.where(stretch > 2 * STRETCH[1], 4 * UNIT, share + 4 * UNIT)
        fits &= allowed(stored.abs(), _rounded(dtype, torch.finfo(dtype).tiny), wanted, rounding)
        good |= fits
    return good[..., 0]


def _codes(band: Tensor, scale: Tensor, bits: int) -> Tensor:
    top = (1 << bits) - 1
    return (band / scale / STEPS[bits] + top / 2).round().clamp(0, top)


def _levels(codes: Tensor, bits: int) -> Tensor:
    return STEPS[bits] * (codes - ((1 << bits) - 1) / 2)


def _nearest(x: Tensor, off: Tensor, book: Tensor, index: Tensor) -> Tensor:
    """Whether no centroid of a book [count, d] is nearer to vectors [n, d] than those at `index` [n], and none before it is the same."""
    out = []
    for y, slack, own in zip(x.split(512), off.split(512), index.split(512), strict=True):
        taken = book[own]
        gap = (y @ book.T - book.square().sum(-1) / 2) - (y * taken - taken.square() / 2).sum(-1, keepdim=True)
        apart = (book[None] - taken[:, None]).abs()
        loose = (apart * slack[:, None]).sum(-1) + DOUBLE * len(book[0]) * (
            y.abs() @ book.abs().T + taken.square().sum(-1, keepdim=True) + 1
        )
        same = (apart.amax(-1) == 0) & (torch.arange(len(book)) < own[:, None])
        out.append(((gap <= loose) & ~same).all(-1))
    return torch.cat(out)


def _product_vq(codec: BoundProductVQ, parts: Parts, x: Tensor, off: Tensor) -> Tensor:
    tokens, heads, _ = x.shape
    books, d = codec.codebooks.double(), codec.spec.dim
    x, off, indices = x.unflatten(-1, (-1, d)), off.unflatten(-1, (-1, d)), parts["indices"].long()
    good = torch.ones(tokens, heads, dtype=torch.bool)
    for head, space in itertools.product(range(heads), range(x.shape[2])):
        book = books[head % books.shape[0], space % books.shape[1]]
        good[:, head] &= _nearest(x[:, head, space], off[:, head, space], book, indices[:, head, space])
    return good


def _residual(codec: BoundResidualKMeans, parts: Parts, x: Tensor, off: Tensor) -> Tensor:
    tokens, heads, _ = x.shape
    index = parts["index"].long() if codec.spec.centroids > 1 else torch.zeros(tokens, heads, 1, dtype=torch.int64)
    good = torch.ones(tokens, heads, dtype=torch.bool)
    for head in range(heads):
        book = codec.book[head % len(codec.book)].double()
        good[:, head] = _nearest(x[:, head], off[:, head], book, index[:, head, 0])
    rest = x - codec._centroid(index).double()
    return good & _affine(codec.spec.residual, parts, rest, off + UNIT * rest.abs())


def _channelwise(codec: Channel | Boosted, parts: Parts, x: Tensor, off: Tensor) -> Tensor:
    """Whole groups of tokens; one that is wrong makes all of its tokens wrong."""
    tokens, heads, dim = x.shape
    group = codec.group_tokens
    x, off, codes = (y.reshape(-1, group, heads, dim) for y in (x, off, parts["codes"].double()))
    good = torch.ones(tokens // group, heads, dtype=torch.bool)
    top: Tensor | float = float((1 << codec.bits) - 1) if isinstance(codec, Channel) else 3.0
    if isinstance(codec, Boosted):
        index, count = parts["index"].long(), codec.boosted(dim)
        chosen = index < count
        good &= (index == torch.where(chosen, chosen.cumsum(-1) - 1, min(count, 255))).all(-1) & (
            chosen.sum(-1) == count
        )
        strength, loose = x.abs().sum(1), off.sum(1) + DOUBLE * group * x.abs().sum(1)
        weakest = (strength + loose).masked_fill(~chosen, float("inf")).amin(-1)
        good &= (strength - loose).masked_fill(chosen, -float("inf")).amax(-1) <= weakest
        high = torch.cat((parts["high"].double(), torch.zeros_like(parts["high"][..., :1]).double()), -1)
        high = high.reshape(-1, group, heads, count + 1)
        codes = codes + 4 * high.gather(-1, index.clamp_max(count)[:, None].expand(-1, group, -1, -1))
        top = torch.where(chosen, 15.0, 3.0).double()
    dtype = DTYPES[codec.meta]
    scale, low = parts["scale"].double(), parts["min"].double()
    most = off.amax(1)
    good &= allowed(low, _rounded(dtype), x.amin(1), most).all(-1)
    step = (x.amax(1) - low) / top
    good &= allowed(scale, _rounded(dtype, torch.finfo(dtype).tiny), step, most / top + 4 * UNIT * step.abs()).all(-1)
    number = (x - low[:, None]) / scale[:, None]
    fits = allowed(
        codes,
        _in_codes(top if isinstance(top, float) else top[:, None]),
        number,
        off / scale[:, None] + 4 * UNIT * number.abs(),
    )
    return (good[:, None] & fits.all(-1)).reshape(tokens, heads)


# --- caches ----------------------------------------------------------------------------------------------------------


def stored_numbers(stream: BoundStream, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """What a stream is to store of x at these positions, in float64; and how far single precision may be off."""
    exact = stream.stored(x.double(), position)
    heads, dim = x.shape[1:]
    basis = torch.eye(dim, dtype=torch.float64)[:, None].expand(-1, heads, -1)
    matrix = stream._forward(basis) - stream._forward(torch.zeros_like(basis))  # [dim, heads, dim]
    gain = torch.linalg.matrix_norm(matrix.transpose(0, 1), 2)  # that a transform makes an error longer by, at most
    size = exact.norm(dim=-1, keepdim=True) + (gain * x.double().norm(dim=-1))[..., None]
    changed = stream.transforms or stream.rope is not None
    return exact, size * (STEPS_OF_A_TRANSFORM * UNIT if changed else 0.0)


def assert_same_codes(
    found: PagedCache, expected: PagedCache, seqs: tuple[Sequence, Sequence], k: Tensor, v: Tensor
) -> None:
    """Two caches to which the same tokens were appended, [tokens, heads, head_dim] each, hold the same bytes of a sequence, but
    where the rounding of a sum decides: see `correct`."""
    mine, theirs = seqs
    assert mine.length == theirs.length == len(k)
    streams: dict[StreamName, Tensor] = {"key": k, "value": v}
    for name, x in streams.items():
        stream, layout = found.stores[0].stream(name), found.layout
        n, origin, window = len(k), layout.recipe.origin, stream.spec.window
        exact, off = stored_numbers(stream, x.float(), torch.arange(n))
        rounded = layout.window_dtype(name)
        held = torch.tensor([p for p in range(n) if p < window.sink or p >= n - window.ring], dtype=torch.int64)
        if len(held):
            rows = overlay_index(window, held)
            one, two = (
                cache.stores[0].overlays[name][e.overlay_row, rows] for cache, e in ((found, mine), (expected, theirs))
            )
            good = (one == two) | allowed(one, _rounded(rounded), exact[held], off[held])
            assert bool(good.all()), (
                f"{name}s in full precision: {int((~good).sum())} numbers differ by more than rounding"
            )
        if stream.spec.groupwise:
            assert not stream.transforms and stream.rope is None, (
                "a group is coded from what its tail holds: 16-bit numbers"
            )
            exact = exact.to(rounded).double()
        last = window.packed_end(n) if stream.spec.groupwise else n
        if last <= origin:
            continue
        parts = [
            layout.unpack(name, cache.stores[0].pages[torch.tensor(e.pages)])
            for cache, e in ((found, mine), (expected, theirs))
        ]
        first = (window.sink if stream.spec.groupwise else origin) - origin
        shared = {f.name: f.tokens for f in layout.fields(name)}
        own, other = (
            {f: y[first // shared[f] : (last - origin) // shared[f]] for f, y in each.items()} for each in parts
        )
        at = slice(first + origin, last)
        assert_same_parts(stream.codec, own, other, exact[at], off[at], f"{name}s")


def assert_same_parts(
    codec: BoundCodec, found: Parts, expected: Parts, x: Tensor, off: Tensor, what: str = "codes"
) -> None:
    """The codes of vectors x, [tokens, heads, head_dim], are those expected, or those that rounding explains: see `correct`."""
    group, heads = codec.group_tokens, x.shape[1]
    same = torch.ones(len(x) // group, heads, dtype=torch.bool)
    for field, codes in found.items():
        same &= (codes == expected[field]).flatten(2).all(-1).reshape(len(same), -1, heads).all(1)
    differ = (~same.all(-1)).nonzero().flatten()
    if not len(differ):
        return
    tokens = (differ[:, None] * group + torch.arange(group)).flatten()
    rows = {field: differ if len(codes) == len(same) else tokens for field, codes in found.items()}
    good = correct(codec, {field: codes[rows[field]] for field, codes in found.items()}, x[tokens], off[tokens])
    wrong = (~same.repeat_interleave(group, 0)[tokens] & ~good).nonzero().tolist()
    assert not wrong, f"{what}: no rounding explains tokens and heads {[(int(tokens[t]), h) for t, h in wrong[:8]]}"
