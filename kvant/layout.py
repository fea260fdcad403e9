"""Where every number lies in a page: the only byte arithmetic of the package.

A page holds `page_tokens` tokens of all KV heads of one layer. One (page, head) is one run of bytes:

    key codes | value codes | key scales and zeros | value scales and zeros | indices      each section 16-byte aligned

Codes of 1, 2, 4 or 8 bits lie in their section as a little-endian bit stream; other widths are split into such planes
(3 = 2 + 1). Which code comes first is the layout's order, a permutation of (token, channel):

plain     token after token, channel after channel.
fragment  the order in which the lanes of a warp feed the tensor core (keys mma.m16n8k32 of bytes, values mma.m16n8k16), so
          that a lane's share of a tile of 16 tokens is contiguous and needs no shuffle. Keys: the low half of a word holds
          even channels, the high half odd ones;
          lane (g, t) holds tokens g and g + 8, channels t * D/4 onwards. Values: the halves hold two neighbouring tokens of one
          channel; lane (g, t) holds token pairs t and t + 4, channels g * D/8 onwards. Where a token's channels have several
          scales, that holds for the channels of each: of values, 16 rows of a product then have one scale, of keys the 32
          channels that a product sums. Scales lie in the same lanes' order: those of tokens g, g + 8, g + 16, ... are
          neighbours. Dot products do not care in which order channels lie, so this costs nothing anywhere else. Every byte
          belongs to one token, so appending reads nothing. Of what a
          group of tokens shares, the scales of all channels lie together, then the minima.

lanes     the order in which a CPU's dot-product instructions read: four bytes that one 32-bit lane sums lie together. A byte
          holds the codes of channels that are width / (codes a byte) apart, so that a mask and a shift give neighbours.
          Keys: a tile of 16 tokens, four bytes of each token in turn; lanes are tokens. Values: four tokens, byte after byte;
          lanes are channels. Scales of a page's tokens are neighbours.

Indices of centroids are read by lookups, not by dot products: they lie in plain order always.

Fragment order is the default on GPUs, lanes on CPUs. Both need widths whose lanes own whole bytes; where a recipe does not fit,
the layout is plain and says so.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from typing import Literal

import torch

from kvant.codecs import DTYPES, Field, Parts, StreamFormat
from kvant.recipe import MixedRecipe, Recipe

Tensor = torch.Tensor
StreamName = Literal["key", "value"]
Order = Literal["fragment", "lanes", "plain"]
Places = Literal["fragment", "lanes", "plain", "apart"]  # of one section

VERSION = 1
ALIGN = 16
PAGE_TOKENS = 64


def planes(bits: int) -> tuple[tuple[int, int], ...]:
    """Splits a code into planes of 8, 4, 2 or 1 bits: ((width, shift), ...), low bits first."""
    out, shift = [], 0
    for width in (8, 4, 2, 1):
        while bits - shift >= width:
            out.append((width, shift))
            shift += width
    return tuple(out)


def fragment_refusal(width: int, bits: int, page_tokens: int, stream: StreamName = "value") -> str | None:
    """Why codes of this width do not fit fragment order, or None where they do. Of keys, a lane's share of a token may be one byte
    of a plane."""
    if page_tokens % 16:
        return f"a page of {page_tokens} tokens is not a whole number of 16-token tiles"
    if width % 16:
        return f"{width} channels are not a whole number of 16-channel tiles"
    for plane, _ in planes(bits):
        if width * plane % 64 and not (stream == "key" and bits in (2, 3) and width * plane == 32):
            return f"{width} channels of {plane} bits leave a lane with part of a byte"
    return None


def lanes_refusal(width: int, bits: int, page_tokens: int, stream: StreamName = "value") -> str | None:
    """Why codes of this width do not fit the order of lanes, or None where they do."""
    if page_tokens % 16:
        return f"a page of {page_tokens} tokens is not a whole number of 16-token tiles"
    for plane, _ in planes(bits):
        if width * plane % 32:
            return f"{width} channels of {plane} bits are not a whole number of 32-bit lanes"
    return None


def code_places(stream: StreamName, order: Places, page_tokens: int, width: int, bits: int, groups: int = 1) -> Tensor:
    """Place of every code in its plane's stream of codes: int64 [page_tokens, width]; `groups` of channels have a scale each."""
    token = torch.arange(page_tokens)[:, None]
    channel = torch.arange(width)[None, :]
    if order in ("plain", "apart"):
        return token * width + channel
    if order == "lanes":
        per_byte = 8 // bits
        count = width // per_byte  # bytes of a token
        slot, byte = channel // count, channel % count
        if stream == "key":
            where = token // 16 * 16 * count + byte // 4 * 64 + token % 16 * 4 + byte % 4
        else:
            where = token // 4 * 4 * count + byte * 4 + token % 4
        return where * per_byte + slot
    per_half = 16 // bits  # codes in one half of a 32-bit word
    words = 2 * (width // 8) // per_half  # words a lane holds of a tile
    tile, inside = token // 16, token % 16
    if stream == "key":
        row, g = inside // 8, inside % 8
        group, share = width // groups, width // groups // 4  # channels of a group, and of a lane of it
        t, rest = channel % group // share, channel // group * share + channel % share
        pair, half = rest // 2, rest % 2
        if words == 0:  # a byte of a lane's token: its even channels, then its odd ones
            return (((tile * 8 + g) * 4 + t) * 16 + row * 8 + half * 4) // bits + pair
        if groups > 1:  # registers 2m and 2m + 1 of a lane, which one product takes, hold its elements 8m to 8m + 7
            per_byte = 8 // bits
            register, byte = rest // 8 * 2 + pair % 2, pair % 4 // 2
            pair = register // per_byte * 2 * per_byte + byte * per_byte + register % per_byte
        place = row * (width // 8) + pair
    else:
        pair, half = inside // 2, inside % 2
        second, t = pair // 4, pair % 4
        group, share = width // groups, width // groups // 8  # channels of a group, and of a lane of it
        g, element = channel % group // share, channel // group * share + channel % share
        place = second * (width // 8) + element
    word, slot = place // per_half, place % per_half
    return (((tile * 8 + g) * 4 + t) * words + word) * (2 * per_half) + half * per_half + slot


def meta_places(order: Places, page_tokens: int, groups: int, names: int) -> Tensor:
    """Place of every scale or zero in its section: int64 [page_tokens, groups, names]. A token's scale and zero are
    neighbours, but not in the order of lanes; groups of channels lie one after another. "apart" is a row's scales, then its
    zeros."""
    token = torch.arange(page_tokens)[:, None, None]
    group = torch.arange(groups)[None, :, None]
    name = torch.arange(names)[None, None, :]
    if order == "plain":
        return (token * groups + group) * names + name
    if order == "apart":
        return (token * names + name) * groups + group
    if order == "lanes":
        return (group * names + name) * page_tokens + token
    tile, row, g = token // 16, token % 16 // 8, token % 8
    lane = g * (page_tokens // 8) + tile * 2 + row
    return (group * page_tokens + lane) * names + name


@dataclasses.dataclass(frozen=True)
class Section:
    """A run of bytes inside a run: one plane of a field of codes, or fields of 16-bit numbers side by side."""

    stream: StreamName
    names: tuple[str, ...]
    kind: Literal["code", "index", "meta", "raw"]
    bits: int
    shift: int  # of this plane inside its code
    rows: int  # rows a page: one per token, or per group of tokens
    width: int  # elements a row and name
    dtype: str
    offset: int
    groups: int = 1  # of channels with a scale each, where the order of the codes looks at them

    @property
    def nbytes(self) -> int:
        return self.rows * self.width * len(self.names) * self.bits // 8


@dataclasses.dataclass(frozen=True)
class Layout:
    """Bytes of a page for one recipe, number of heads and head dim. Build it with `Layout.of`."""

    recipe: Recipe
    heads: int
    head_dim: int
    page_tokens: int
    order: Order
    dtype: str  # the model's
    order_reason: str = ""
    align: int = ALIGN  # a (page, head) has a multiple of so many bytes, itself a multiple of ALIGN

    @staticmethod
    def of(
        recipe: Recipe,
        heads: int,
        head_dim: int,
        page_tokens: int | None = None,
        order: Order | None = None,
        dtype: str = "bfloat16",
        device: torch.device | str = "cuda",
    ) -> Layout:
        """The layout of a recipe; without `order`, the one for the device where it fits and plain where it does not; without
        `page_tokens`, 64, or one group where the recipe's groups are longer."""
        if isinstance(recipe, MixedRecipe):
            raise ValueError(f"layers of recipe {recipe.name} have different layouts: use Layouts.of")
        group = max(stream.codec.group_tokens for stream in recipe.streams.values())
        page_tokens = page_tokens or max(PAGE_TOKENS, group)
        if heads < 1 or head_dim < 1:
            raise ValueError(f"heads and head_dim must be positive, got {heads} and {head_dim}")
        if page_tokens not in (16, 32, 64, 128):
            raise ValueError(f"page_tokens must be 16, 32, 64 or 128, got {page_tokens}")
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if order not in (None, "fragment", "lanes", "plain"):
            raise ValueError(f"order must be fragment, lanes or plain, got {order!r}")
        if page_tokens % group:
            raise ValueError(
                f"page_tokens must be a multiple of the recipe's group of {group} tokens, got {page_tokens}"
            )
        fields: list[Field] = []
        codes: list[tuple[StreamName, Field]] = []
        for name, stream in recipe.streams.items():
            for transform in stream.transforms:
                transform.check(head_dim)
            if stream.corrector is not None:
                stream.corrector.check_dim(head_dim)
            own = stream.codec.bind(head_dim, dtype=dtype).fields(head_dim)
            fields += own
            codes += [(name, field) for field in own if field.kind == "code"]
        for field in fields:
            alone = field.kind == "index" or (field.kind == "code" and field.tokens == 1)
            if alone and any(field.width * plane % 8 for plane, _ in planes(field.bits)):
                what = "indices" if field.kind == "index" else "codes"
                raise ValueError(
                    f"recipe {recipe.name} does not fit head_dim {head_dim}: a token's {field.width} {what} of {field.bits} "
                    "bits would share a byte with another token's"
                )
        wanted: Order = order or ("lanes" if torch.device(device).type == "cpu" else "fragment")
        refusal = lanes_refusal if wanted == "lanes" else fragment_refusal
        refusals = [refusal(field.width, field.bits, page_tokens, name) for name, field in codes]
        reason = next(filter(None, refusals), "") if codes else "the recipe stores no codes"
        if order not in (None, "plain") and reason:
            raise ValueError(f"recipe {recipe.name} does not fit {order} order: {reason}")
        chosen: Order = order or ("plain" if reason else wanted)
        return Layout(recipe, heads, head_dim, page_tokens, chosen, dtype, reason if chosen == "plain" else "")

    # --- sizes -----------------------------------------------------------------------------------------------------

    def fields(self, stream: StreamName) -> tuple[Field, ...]:
        codec = self.recipe.streams[stream].codec.bind(self.head_dim, dtype=self.dtype)
        return codec.fields(self.head_dim)

    @functools.cached_property
    def formats(self) -> dict[StreamName, StreamFormat]:
        """The stored form of each stream: what kernels for this layout are made from."""
        return {
            name: stream.codec.bind(self.head_dim, dtype=self.dtype).format(self.head_dim)
            for name, stream in self.recipe.streams.items()
        }

    def format(self, stream: StreamName) -> StreamFormat:
        """The stored form of a stream, as its codec describes it."""
        return self.formats[stream]

    def scale_groups(self, stream: StreamName) -> int:
        """Groups of channels that the order of a stream's codes keeps together: those that have a scale of their own, if each is
        a whole number of the channels that share a product: 16 of values, 32 of keys, whose lanes must also own whole words."""
        if self.order != "fragment":
            return 1
        widths = {field.width for field in self.fields(stream) if field.kind == "meta" and field.tokens == 1}
        codes = {
            (field.width, field.bits) for field in self.fields(stream) if field.kind == "code" and field.tokens == 1
        }
        if len(widths) != 1 or len(codes) != 1:
            return 1
        groups, (width, bits) = widths.pop(), codes.pop()
        if stream == "key" and (len(planes(bits)) > 1 or width * bits % 128):
            return 1
        return groups if width % ((32 if stream == "key" else 16) * groups) == 0 else 1

    @functools.cached_property
    def sections(self) -> tuple[Section, ...]:
        out: list[Section] = []
        offset = 0

        def add(stream: StreamName, names: tuple[str, ...], field: Field, bits: int, shift: int) -> None:
            nonlocal offset
            section = Section(
                stream,
                names,
                field.kind,
                bits,
                shift,
                self.page_tokens // field.tokens,
                field.width,
                field.dtype,
                offset,
                self.scale_groups(stream) if field.kind == "code" else 1,
            )
            out.append(section)
            offset += -(-section.nbytes // ALIGN) * ALIGN

        streams: tuple[StreamName, StreamName] = ("key", "value")
        for stream in streams:
            for field in self.fields(stream):
                if field.kind == "raw":
                    add(stream, (field.name,), field, field.bits, 0)
                elif field.kind == "code":
                    for bits, shift in planes(field.bits):
                        add(stream, (field.name,), field, bits, shift)
        for stream in streams:
            shapes: dict[tuple[int, int, str], list[Field]] = {}
            for field in self.fields(stream):
                if field.kind == "meta":
                    shapes.setdefault((field.width, field.tokens, field.dtype), []).append(field)
            for group in shapes.values():
                add(stream, tuple(field.name for field in group), group[0], group[0].bits, 0)
        for stream in streams:
            for field in self.fields(stream):
                if field.kind == "index":
                    for bits, shift in planes(field.bits):
                        add(stream, (field.name,), field, bits, shift)
        return tuple(out)

    @functools.cached_property
    def page_head_bytes(self) -> int:
        """Bytes of one (page, head)."""
        last = self.sections[-1]
        return -(-(last.offset + last.nbytes) // self.align) * self.align

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one layer, all heads."""
        return self.heads * self.page_head_bytes

    @property
    def overlay_dtype(self) -> str:
        """Type of tokens kept in full precision: the model's, if it has 16 bits; what a server would hold otherwise."""
        return self.dtype if DTYPES[self.dtype].itemsize == 2 else "bfloat16"

    def window_dtype(self, stream: StreamName) -> torch.dtype:
        """Type in which the overlay holds a stream: `overlay_dtype`, or fp8 where the window says so."""
        return torch.float8_e4m3fn if self.is_fp8_window(stream) else DTYPES[self.overlay_dtype]

    def is_fp8_window(self, stream: StreamName) -> bool:
        return self.recipe.streams[stream].window.window_dtype == "fp8"

    def window_token_bytes(self, stream: StreamName) -> int:
        """Bytes of a token of a stream in the overlay, all heads."""
        return self.heads * self.head_dim * self.window_dtype(stream).itemsize

    def overlay_tokens(self, stream: StreamName) -> int:
        """Tokens of a sequence that the overlay holds of a stream."""
        window = self.recipe.streams[stream].window
        return window.sink + window.ring

    def state_shape(self, stream: StreamName) -> tuple[int, ...] | None:
        """Float32 numbers that a head of a sequence holds for the stream's corrector; None where it has none."""
        spec = self.recipe.streams[stream]
        return None if spec.corrector is None else spec.corrector.state_shape(self.head_dim, spec.window.ring)

    @property
    def overlay_bytes(self) -> int:
        """Bytes of a sequence's windows, and of what correctors remember for it, in one layer."""
        windows = sum(self.overlay_tokens(name) * self.window_token_bytes(name) for name in self.recipe.streams)
        states = (self.state_shape("key"), self.state_shape("value"))
        remembered = sum(math.prod(shape) for shape in states if shape is not None)
        return windows + self.heads * 4 * remembered

    @property
    def sink_bytes(self) -> int:
        """Bytes of a sequence's sinks in the overlay, in one layer."""
        return sum(s.window.sink * self.window_token_bytes(name) for name, s in self.recipe.streams.items())

    def pages_for(self, tokens: int) -> int:
        """Pages of a sequence of that many tokens."""
        return -(-max(0, tokens - self.recipe.origin) // self.page_tokens)

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes of a sequence in one layer: whole pages and windows."""
        return self.pages_for(tokens) * self.page_bytes + self.overlay_bytes

    def bits_per_element(self, tokens: int | None = None) -> float:
        """Bits per cached number, everything counted: of a full page, or of a sequence of that many tokens."""
        if tokens is None:
            return 8 * self.page_head_bytes / (2 * self.page_tokens * self.head_dim)
        if tokens < 1:
            raise ValueError(f"tokens must be positive, got {tokens}")
        return 8 * self.sequence_bytes(tokens) / (2 * tokens * self.heads * self.head_dim)

    def digest(self, artifact: str = "", model: str = "") -> str:
        """Names what the stored bytes mean; anything with another digest is refused, never read. `artifact` is the digest of
        the calibrated tensors, `model` the fingerprint of the model, where they are known."""
        data = [
            VERSION,
            self.recipe.digest,
            artifact,
            model,
            self.heads,
            self.head_dim,
            self.page_tokens,
            self.order,
            self.dtype,
        ]
        if self.scale_groups("value") > 1 or any(self.section_places(s) == "apart" for s in self.sections):
            data.append("arranged for groups")
        if self.recipe.key.raw_window and self.overlay_tokens("key"):
            data.append("windows of raw keys")
        if self.align != ALIGN:
            data.append(f"aligned to {self.align}")
        if self.scale_groups("key") > 1:
            data.append("keys arranged for groups")
        return hashlib.sha256(json.dumps(data).encode()).hexdigest()

    # --- packing ---------------------------------------------------------------------------------------------------

    def stream_sections(self, stream: StreamName, per_token: bool) -> list[Section]:
        return [s for s in self.sections if s.stream == stream and (s.rows == self.page_tokens) == per_token]

    def section_places(self, section: Section) -> Places:
        """The order of one section: what tokens share has its own."""
        if section.rows == self.page_tokens:
            return self.order
        return "apart" if self.order == "fragment" else "plain"

    def pack_tokens(self, stream: StreamName, parts: Parts, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """The bytes that tokens own in their runs, and where: uint8 [tokens, heads, n], int64 [tokens, n].

        `offsets` are the tokens' places inside their pages. Fields that several tokens share are packed by `pack_shared`.
        """
        chunks, places = [], []
        for section in self.stream_sections(stream, per_token=True):
            gather, where = _token_tables(section, self.order, self.page_tokens, str(offsets.device))
            chunks.append(_section_bytes(section, parts, gather[offsets]))
            places.append(where[offsets])
        return torch.cat(chunks, -1), torch.cat(places, -1)

    def pack_shared(self, stream: StreamName, parts: Parts, groups: Tensor) -> tuple[Tensor, Tensor]:
        """As `pack_tokens`, for the fields that a group of tokens shares; `groups` are places of groups in their pages."""
        chunks, places = [], []
        for section in self.stream_sections(stream, per_token=False):
            gather, where = _token_tables(section, self.section_places(section), section.rows, str(groups.device))
            chunks.append(_section_bytes(section, parts, gather[groups]))
            places.append(where[groups])
        if not chunks:
            heads = next(iter(parts.values())).shape[1]
            return groups.new_zeros(len(groups), heads, 0, dtype=torch.uint8), groups.new_zeros(len(groups), 0)
        return torch.cat(chunks, -1), torch.cat(places, -1)

    def unpack(self, stream: StreamName, runs: Tensor) -> Parts:
        """Parts of whole pages: uint8 [pages, heads, page_head_bytes] -> name: [pages * rows, heads, width]."""
        pages, heads, nbytes = runs.shape
        assert nbytes == self.page_head_bytes, (nbytes, self.page_head_bytes)
        parts: Parts = {}
        for section in self.sections:
            if section.stream != stream:
                continue
            places = _places(section, self.section_places(section), self.page_tokens, str(runs.device))
            data = runs[..., section.offset : section.offset + section.nbytes]
            if section.kind in ("code", "index"):
                codes = _codes(data, section.bits)[..., places.flatten()]
                codes = codes.reshape(pages, heads, section.rows, section.width)
                if section.dtype != "uint8":
                    codes = codes.to(getattr(torch, section.dtype))
                name = section.names[0]
                parts[name] = parts[name] | codes << section.shift if name in parts else codes << section.shift
            else:
                numbers = data.contiguous().view(DTYPES[section.dtype])[..., places.flatten()]
                numbers = numbers.reshape(pages, heads, section.rows, section.width, len(section.names))
                for index, name in enumerate(section.names):
                    parts[name] = numbers[..., index]
        return {
            name: part.permute(0, 2, 1, 3).reshape(-1, heads, part.shape[-1])  # [pages, heads, rows, width] -> tokens
            for name, part in parts.items()
        }


@functools.lru_cache(maxsize=512)
def _places(section: Section, order: Places, page_tokens: int, device: str) -> Tensor:
    """Place of every element in its section: [rows, width] for codes, [rows, width, names] otherwise."""
    if section.kind in ("code", "index"):
        order = "plain" if section.kind == "index" else order
        return code_places(section.stream, order, section.rows, section.width, section.bits, section.groups).to(device)
    if section.kind == "raw":
        order = "plain"
    return meta_places(order, section.rows, section.width, len(section.names)).to(device)


@functools.lru_cache(maxsize=512)
def _token_tables(section: Section, order: Places, page_tokens: int, device: str) -> tuple[Tensor, Tensor]:
    """For each row of a section: its elements in the order of their places [rows, n], and its bytes in the run [rows, m]."""
    places = _places(section, order, page_tokens, "cpu").reshape(section.rows, -1)
    sorted_places, gather = places.sort(dim=-1)
    if section.bits >= 8:
        size = section.bits // 8
        where = (sorted_places[..., None] * size + torch.arange(size)).flatten(1)
    else:
        per_byte = 8 // section.bits
        where = sorted_places[:, ::per_byte] // per_byte
        whole = sorted_places.reshape(section.rows, -1, per_byte) == (where * per_byte)[..., None] + torch.arange(
            per_byte
        )
        assert whole.all(), f"a byte of {section.names} is shared by tokens in {order} order"
    return gather.to(device), (where + section.offset).to(device)


def _section_bytes(section: Section, parts: Parts, gather: Tensor) -> Tensor:
    """Bytes of one section, a row per token: uint8 [rows, heads, n]; `gather` is [rows, elements]."""
    first = parts[section.names[0]]
    rows, heads = first.shape[:2]
    if section.kind in ("code", "index"):
        codes = first.gather(-1, gather[:, None, :].expand(rows, heads, -1))
        codes = (codes >> section.shift).to(torch.uint8) & ((1 << section.bits) - 1)
        codes = codes.reshape(rows, heads, -1, 8 // section.bits)
        shifts = torch.arange(0, 8, section.bits, device=codes.device, dtype=torch.uint8)
        return (codes << shifts).sum(-1, dtype=torch.uint8)
    numbers = torch.stack([parts[name] for name in section.names], -1).reshape(rows, heads, -1)
    numbers = numbers.gather(-1, gather[:, None, :].expand(rows, heads, -1))
    return numbers.contiguous().view(torch.uint8)


def _codes(data: Tensor, bits: int) -> Tensor:
    """The little-endian stream of codes in bytes: uint8 [..., n] -> uint8 [..., n * 8 / bits]."""
    if bits == 8:
        return data
    shifts = torch.arange(0, 8, bits, device=data.device, dtype=torch.uint8)
    return (data[..., None] >> shifts & ((1 << bits) - 1)).flatten(-2)


def describe(layout: Layout) -> list[dict[str, object]]:
    """The sections of a run as a table, for people and for kernels that want constants."""
    return [
        {
            "stream": s.stream,
            "names": "+".join(s.names),
            "bits": s.bits,
            "rows": s.rows,
            "width": s.width,
            "offset": s.offset,
            "bytes": s.nbytes,
        }
        for s in layout.sections
    ]


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    if count < 1024:
        return f"{count:.0f} B"
    power = min(4, int(math.log(count, 1024)))
    return (
        f"{count / 1024**power:.{0 if count / 1024**power >= 100 else 1}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
    )
