"""Which layouts the CUDA kernels can read, as statements about stored formats: a reason why not, or None."""

from __future__ import annotations

import torch

from kvant.codecs.format import ScaleKind, StreamFormat
from kvant.layout import Layout, StreamName
from kvant.ops.cuda import nvrtc
from kvant.ops.cuda.books import codebook_bytes, head_book_bytes, residual_bytes
from kvant.ops.cuda.device import shared_memory
from kvant.ops.cuda.geometry import least_shared_bytes
from kvant.ops.fused import refuse_rope

MAX_HEAD_DIM = 256
MAX_ROTATED_DIM = 128  # channels of keys that are rotated when they are read
MAX_BOOSTED = 64  # boosted channels: a lane holds the high bits of a token's share of them in one word
MAX_SCALE_GROUPS = 8  # groups of channels of a token's values that have a scale each
MOST_SHARED = 227 * 1024  # bytes of shared memory that a CTA has on any GPU
MAX_CENTROIDS = 256  # of whole head vectors
LEVEL_BITS = frozenset((2, 3, 4))  # widths of codes that are places in a table of levels
GROUP_TILES: dict[StreamName, int] = {"key": 32, "value": 16}  # channels that share a product, and so a scale
INDEX_BITS = (3, 4, 6, 8, 9, 10, 12)  # widths of the indices of product quantization
INDEX_LANES: dict[StreamName, int] = {"key": 4, "value": 8}  # lanes that share the sub-vectors of a token


def refuse(layout: Layout, device: torch.device) -> str | None:
    """Why the decode kernel cannot serve a layout on a device, or None."""
    reason = refuse_machine(device, refuse_layout(layout))
    if reason is not None:
        return reason
    needed, there = least_shared_bytes(layout), shared_memory(device)[0]
    if needed <= there:
        return None
    books = sum(codebook_bytes(layout) + residual_bytes(layout))
    what = f"two pages of {layout.page_head_bytes} bytes a head"
    if books:
        what = f"codebooks of {books} bytes and two pages"
    return f"{what} are more than this GPU's shared memory holds: {needed} bytes with all that a thread block needs, of {there}"


def refuse_machine(device: torch.device, reason: str | None) -> str | None:
    """Why no kernel runs on a device; else the given reason, for which its layout is refused, if there is one."""
    if device.type != "cuda":
        return f"it runs on CUDA devices, not on {device.type}"
    reason = reason or nvrtc.missing()
    if reason is None and torch.cuda.get_device_capability(device) < (8, 0):
        reason = "it needs a GPU of compute capability 8.0 or newer"
    return reason


def refuse_layout(layout: Layout) -> str | None:
    """The part of `refuse` that does not look at the machine."""
    key, dim = layout.format("key"), layout.head_dim
    pq = all(stream.is_pq for stream in layout.formats.values())
    for name, stream in layout.formats.items():
        if stream.is_pq:
            reason = _refuse_indices(stream, name) if pq else f"of both streams, only the {name}s are vector-quantized"
        elif stream.is_tokenwise:
            reason = _refuse_tokenwise(layout, stream, name, key.is_channelwise)
        elif stream.is_residual and not key.is_channelwise:
            reason = _refuse_residual(stream, name) or _refuse_tokenwise(layout, stream, name, False)
        elif name == "key" and stream.is_channelwise:
            reason = None
        else:
            reason = f"it reads token-wise affine codes and keys coded per channel, and the {name}s are coded by {stream.codec}"
        if reason is not None:
            return reason
    if layout.order != "fragment" and not pq:
        return f"it reads pages in fragment order: {layout.order_reason or 'the layout is plain'}"
    if not key.is_channelwise and layout.recipe.key.window != layout.recipe.value.window.in_model_dtype:
        return "keys and values have different windows"
    if pq and layout.is_fp8_window("value"):
        return "beside indices of centroids it reads windows of values in 16 bits, and theirs are fp8"
    if dim > MAX_HEAD_DIM:
        return f"head_dim {dim} is more than {MAX_HEAD_DIM}"
    if layout.recipe.key.effective_rope_block and any(stream.is_residual for stream in layout.formats.values()):
        return "it reads residuals of centroids beside keys that are stored rotated, and theirs are unrotated by RoPE blocks"
    return _refuse_channelwise(layout) if key.is_channelwise else refuse_rope(layout)


def _refuse_tokenwise(layout: Layout, stream: StreamFormat, name: StreamName, channelwise_keys: bool) -> str | None:
    """Why codes with scales per token cannot be read. Values beside channel-wise keys are looked at by `_refuse_channelwise`."""
    if not stream.uniform:
        reason = _refuse_levels(layout, stream, name, channelwise_keys)
        if reason is not None:
            return reason
    if stream.scale_groups > 1 and not (channelwise_keys and name == "value"):
        reason = _refuse_groups(layout, stream, name)
        if reason is not None:
            return reason
    if name == "key" and stream.mean_flag:
        return "it reads keys that keep their mean, and theirs may be taken off token by token"
    if name == "value" and len(stream.bands) > 1:
        return "it reads values of one width, and they have bands"
    return None


def _refuse_levels(layout: Layout, stream: StreamFormat, name: StreamName, channelwise_keys: bool) -> str | None:
    """Why codes that are places in a table of levels cannot be read."""
    if len(stream.bands) > 1 or stream.mean_flag:
        return f"it reads one table of levels, and the {name}s have bands or means"
    if stream.widths - LEVEL_BITS:
        return f"it reads tables of 4, 8 or 16 levels, and that of the {name}s has {1 << max(stream.widths)}"
    if channelwise_keys:
        return f"beside keys that are coded per channel it reads evenly spaced levels, and those of the {name}s are not"
    if name == "key" and layout.recipe.key.effective_rope_block:
        return "it reads evenly spaced levels of keys that are unrotated by RoPE blocks, and theirs are not"
    return None


def _refuse_residual(stream: StreamFormat, name: StreamName) -> str | None:
    """Why an index of a centroid of the whole head vector, and codes of the residual, cannot be read."""
    assert stream.codebook is not None and stream.scales is not None
    if stream.codebook.centroids > MAX_CENTROIDS:
        return f"it holds at most {MAX_CENTROIDS} centroids a head in shared memory, and the {name}s have {stream.codebook.centroids}"
    if stream.scales.axis != "token":
        return f"it reads residuals with scales per token, and those of the {name}s are per channel"
    return None


def _refuse_groups(layout: Layout, stream: StreamFormat, name: StreamName) -> str | None:
    """Why several scales a token cannot be read."""
    groups, tile = stream.scale_groups, GROUP_TILES[name]
    assert stream.scales is not None
    if stream.scales.kind is ScaleKind.ALONE:
        return f"it reads one scale alone a token, and the {name}s have {groups}"
    if groups > MAX_SCALE_GROUPS:
        return f"it reads at most {MAX_SCALE_GROUPS} scales a token, and the {name}s have {groups}"
    if layout.order == "fragment" and layout.scale_groups(name) != groups:
        return f"it reads scales of a multiple of {tile} channels of 2, 4 or 8 bits, and the {name}s have {groups} others a token"
    if name == "key" and layout.recipe.key.effective_rope_block:
        return f"it reads one scale a token of keys that are unrotated by RoPE blocks, and they have {groups}"
    return None


def _refuse_channelwise(layout: Layout) -> str | None:
    """Why keys with one scale per channel of a group of tokens, or the values beside them, cannot be read."""
    key, value, dim = layout.format("key"), layout.format("value"), layout.head_dim
    assert key.scales is not None and value.scales is not None
    if layout.recipe.key.rope == "block":
        return "it rotates keys that are coded per channel one by one, and they are stored unrotated by blocks"
    if layout.recipe.key.rope == "pre":
        if layout.recipe.key.transforms:
            return "it rotates keys that are coded per channel as they are stored, and they are transformed"
        if dim > MAX_ROTATED_DIM:
            return f"it rotates keys of at most {MAX_ROTATED_DIM} channels, and they have {dim}"
        if key.boosted:
            return f"it rotates keys of one width, and {key.boosted} channels are boosted"
    if key.group_tokens < 16:
        return f"it reads groups of at least 16 tokens, and those of the keys have {key.group_tokens}"
    if dim % 32:
        return f"it reads keys that are coded per channel in tiles of 32 channels, and the head dim is {dim}"
    if key.scales.dtype != "float16":
        return f"it reads the scales of channels as float16, and they are {key.scales.dtype}"
    if key.boosted > MAX_BOOSTED:
        return f"it reads the high bits of at most {MAX_BOOSTED} channels, and {key.boosted} are boosted"
    for name, stream in layout.formats.items():
        if 3 in stream.widths and dim % 64:
            return f"it reads codes of 3 bits of a multiple of 64 channels, and the {name}s have {dim}"
    groups = value.scale_groups
    if groups == 1:
        return None
    if value.scales.dtype != "float16" or value.scales.kind is not ScaleKind.MIN:
        return "of values with several scales it reads scales and minima as float16, and theirs are others"
    if groups > MAX_SCALE_GROUPS or layout.scale_groups("value") != groups:
        return f"it reads at most {MAX_SCALE_GROUPS} scales a token, each of a multiple of 16 channels, and the values have {groups}"
    return None


def _refuse_indices(stream: StreamFormat, name: StreamName) -> str | None:
    """Why indices of product quantization cannot be read."""
    book, lanes = stream.codebook, INDEX_LANES[name]
    assert book is not None
    if book.bits > max(INDEX_BITS):
        size = 2 * book.dim * book.centroids
        return f"it holds a codebook of a head in shared memory, and one of the {name}s takes {size} bytes"
    if book.bits not in INDEX_BITS:
        return f"it reads indices of 3, 4, 6, 8, 9, 10 or 12 bits, and those of the {name}s have {book.bits}"
    if head_book_bytes(book) > MOST_SHARED:
        return f"it holds the codebooks of a head in shared memory, and those of the {name}s take {head_book_bytes(book)} bytes"
    if book.vectors % lanes or stream.head_dim % 32:
        return f"the {book.vectors} sub-vectors of the {name}s cannot be shared evenly by {lanes} lanes"
    return None
