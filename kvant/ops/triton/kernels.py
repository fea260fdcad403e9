"""The kernels. A page's bytes are addressed by the formulas of kvant.layout.code_places and meta_places, written out."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _code_index(b_token, b_channel, IS_KEY: tl.constexpr, FRAGMENT: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """Place of codes in their section's stream of codes."""
    if not FRAGMENT:
        return b_token * D + b_channel
    per_half = 16 // BITS
    words = 2 * (D // 8) // per_half
    tile, inside = b_token // 16, b_token % 16
    if IS_KEY:
        g, t = inside % 8, b_channel // (D // 4)
        rest = b_channel % (D // 4)
        half, place = rest % 2, inside // 8 * (D // 8) + rest // 2
    else:
        pair, half = inside // 2, inside % 2
        g, t = b_channel // (D // 8), pair % 4
        place = pair // 4 * (D // 8) + b_channel % (D // 8)
    word, slot = place // per_half, place % per_half
    return (((tile * 8 + g) * 4 + t) * words + word) * (2 * per_half) + half * per_half + slot


@triton.jit
def _meta_index(b_token, FRAGMENT: tl.constexpr, PAGE: tl.constexpr):
    if not FRAGMENT:
        return b_token
    return b_token % 8 * (PAGE // 8) + b_token // 16 * 2 + b_token % 16 // 8


@triton.jit
def _number(p_run, b_offset, m_there, TYPE: tl.constexpr):
    """16-bit floats at byte offsets, as float32."""
    low = tl.load(p_run + b_offset, mask=m_there, other=0).to(tl.uint32)
    high = tl.load(p_run + b_offset + 1, mask=m_there, other=0).to(tl.uint32)
    if TYPE == 0:
        return ((high << 24) | (low << 16)).to(tl.float32, bitcast=True)
    return ((high << 8) | low).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _read(
    p_run,
    b_token,
    b_channel,
    m_token,
    m_channel,
    IS_KEY: tl.constexpr,
    FRAGMENT: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    META_OFFSET: tl.constexpr,
    META_TYPE: tl.constexpr,
    INTEGER_ZERO: tl.constexpr,
):
    """Tokens of a page as numbers: float32 [tokens, channels]; zero where they are not there."""
    bit = _code_index(b_token[:, None], b_channel[None, :], IS_KEY, FRAGMENT, D, BITS) * BITS
    m_there = m_token[:, None] & m_channel[None, :]
    byte = tl.load(p_run + OFFSET + bit // 8, mask=m_there, other=0).to(tl.int32)
    code = ((byte >> (bit % 8)) & ((1 << BITS) - 1)).to(tl.float32)
    o_meta = META_OFFSET + _meta_index(b_token, FRAGMENT, PAGE) * 4
    scale = _number(p_run, o_meta, m_token, META_TYPE)
    zero = _number(p_run, o_meta + 2, m_token, META_TYPE)
    if INTEGER_ZERO:
        x = (code - zero[:, None]) * scale[:, None]
    else:
        x = code * scale[:, None] + zero[:, None]
    return tl.where(m_there, x, 0.0)


@triton.jit
def _attend(b_q, b_k, b_v, m_token, b_m, b_l, b_acc, scale, cap, SOFTCAP: tl.constexpr):
    """One block of tokens by a running softmax, in powers of e."""
    s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale  # [heads, tokens]
    if SOFTCAP:
        s = cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * s / cap)))
    s = tl.where(m_token[None, :], s, -1e30)
    top = tl.maximum(b_m, tl.max(s, 1))
    p = tl.where(m_token[None, :], tl.exp(s - top[:, None]), 0.0)
    fade = tl.exp(b_m - top)
    b_acc = b_acc * fade[:, None] + tl.dot(p, b_v, input_precision="ieee")
    return top, b_l * fade + tl.sum(p, 1), b_acc


@triton.jit
def decode(
    p_q,
    p_pages,
    p_table,
    p_lengths,
    p_owners,
    p_sinks,
    p_exact_key,
    p_exact_value,
    p_window_key,
    p_window_value,
    p_out,
    p_m,
    p_l,
    scale,
    cap,
    window,
    table_width,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    RUN: tl.constexpr,
    SPLITS: tl.constexpr,
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
    RING: tl.constexpr,
    WINDOW_TOKENS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FRAGMENT: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_OFFSET: tl.constexpr,
    KEY_META_OFFSET: tl.constexpr,
    KEY_META_TYPE: tl.constexpr,
    KEY_INTEGER_ZERO: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    VALUE_META_OFFSET: tl.constexpr,
    VALUE_META_TYPE: tl.constexpr,
    VALUE_INTEGER_ZERO: tl.constexpr,
):
    """Attention of one (sequence, head) over one of SPLITS parts of its tokens: outputs, not divided, and m and l of the softmax."""
    b, h, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.load(p_lengths + b)
    low = tl.where(window > 0, tl.maximum(n - window, 0), 0)
    sinks = tl.zeros_like(n)
    recent = n
    if WINDOW_TOKENS > 0:
        sinks = tl.minimum(tl.load(p_sinks + b), n)
        ring_start = tl.maximum(tl.load(p_exact_key + b), tl.load(p_exact_value + b))
        frontier = tl.minimum(n, SINK) + tl.maximum(n - SINK - RECENT, 0)
        recent = tl.minimum(tl.maximum(tl.maximum(frontier, ring_start), SINK), n)
    first = tl.maximum(sinks, low)

    b_row, b_channel, b_token = tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, PAGE)
    m_channel = b_channel < D
    m_q = (b_row < GROUP)[:, None] & m_channel[None, :]
    b_q = tl.load(p_q + ((b * HEADS + h) * GROUP + b_row[:, None]) * D + b_channel[None, :], mask=m_q, other=0.0)
    b_m = tl.full([ROWS], -1e30, tl.float32)
    b_l = tl.zeros([ROWS], tl.float32)
    b_acc = tl.zeros([ROWS, BLOCK_D], tl.float32)

    begin, end = first // PAGE, tl.where(first < recent, (recent + PAGE - 1) // PAGE, first // PAGE)
    each = (end - begin + SPLITS - 1) // SPLITS
    i = begin + split * each
    end = tl.minimum(i + each, end)
    while i < end:  # not a range: the interpreter cannot count to a tensor
        page = tl.load(p_table + b * table_width + i)
        p_run = p_pages + (page * HEADS + h) * RUN
        position = i * PAGE + b_token
        m_token = (position >= first) & (position < recent)
        b_k = _read(
            *(p_run, b_token, b_channel, m_token, m_channel, True, FRAGMENT, PAGE, D, KEY_BITS, KEY_OFFSET),
            *(KEY_META_OFFSET, KEY_META_TYPE, KEY_INTEGER_ZERO),
        )
        b_v = _read(
            *(p_run, b_token, b_channel, m_token, m_channel, False, FRAGMENT, PAGE, D, VALUE_BITS, VALUE_OFFSET),
            *(VALUE_META_OFFSET, VALUE_META_TYPE, VALUE_INTEGER_ZERO),
        )
        b_m, b_l, b_acc = _attend(b_q, b_k, b_v, m_token, b_m, b_l, b_acc, scale, cap, SOFTCAP)
        i += 1

    if WINDOW_TOKENS > 0:
        overlay_row = tl.load(p_owners + b)
        for part in tl.static_range(2):  # the sinks, then the last tokens
            start = low if part == 0 else tl.maximum(recent, low)
            stop = sinks if part == 0 else n
            at = start + split * PAGE
            while at < stop:
                position = at + b_token
                m_token = position < stop
                place = tl.where(position < SINK, position, SINK + (position - SINK) % RING)
                o_row = ((overlay_row * WINDOW_TOKENS + place) * HEADS + h) * D
                o_full = o_row[:, None] + b_channel[None, :]
                m_there = m_token[:, None] & m_channel[None, :]
                b_k = tl.load(p_window_key + o_full, mask=m_there, other=0.0).to(tl.float32)
                b_v = tl.load(p_window_value + o_full, mask=m_there, other=0.0).to(tl.float32)
                b_m, b_l, b_acc = _attend(b_q, b_k, b_v, m_token, b_m, b_l, b_acc, scale, cap, SOFTCAP)
                at += SPLITS * PAGE

    o_part = ((b * HEADS + h) * SPLITS + split) * GROUP + b_row
    tl.store(p_out + o_part[:, None] * D + b_channel[None, :], b_acc, mask=m_q)
    tl.store(p_m + o_part, b_m, mask=b_row < GROUP)
    tl.store(p_l + o_part, b_l, mask=b_row < GROUP)


@triton.jit
def _rounded(x, TYPE: tl.constexpr):
    """float32 rounded to a 16-bit type, and its bits."""
    if TYPE == 0:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return bits.to(tl.float32, bitcast=True), bits >> 16
    half = x.to(tl.float16)
    return half.to(tl.float32), half.to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def _whole(x):
    """Rounded to whole numbers, ties to even: 1.5 * 2^23 leaves no bits behind the point."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def append(
    p_x,
    p_pages,
    p_slots,
    tiny,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    RUN: tl.constexpr,
    IS_KEY: tl.constexpr,
    FRAGMENT: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    META_OFFSET: tl.constexpr,
    META_TYPE: tl.constexpr,
    INTEGER_ZERO: tl.constexpr,
):
    """Codes one token of one head and stores its bytes. They are its own, so nothing is read."""
    token, h = tl.program_id(0), tl.program_id(1)
    slot = tl.load(p_slots + token)
    if slot >= 0:
        p_row = p_x + (token * HEADS + h) * D
        b_channel = tl.arange(0, BLOCK_D)
        x = tl.load(p_row + b_channel, mask=b_channel < D, other=0.0)
        least = tl.min(tl.where(b_channel < D, x, float("inf")), 0)
        most = tl.max(tl.where(b_channel < D, x, float("-inf")), 0)
        top = (1 << BITS) - 1
        if not INTEGER_ZERO:
            least, zero_bits = _rounded(least, META_TYPE)
            zero = least
        scale, scale_bits = _rounded(tl.maximum(tl.div_rn(most - least, top * 1.0), tiny), META_TYPE)
        if INTEGER_ZERO:
            zero, zero_bits = _rounded(tl.clamp(_whole(tl.div_rn(-least, scale)), -32768.0, 32768.0), META_TYPE)

        p_run = p_pages + (slot // PAGE * HEADS + h) * RUN
        place = (slot % PAGE).to(tl.int32)
        b_byte = tl.arange(0, BLOCK_BYTES)
        m_byte = b_byte < BYTES
        PER: tl.constexpr = 8 // BITS
        b_value = tl.zeros([BLOCK_BYTES], tl.int32)
        # the channel of a byte's first code, and how far apart its codes' channels are
        if not FRAGMENT:
            b_first = b_byte * PER
            STEP: tl.constexpr = 1
        elif IS_KEY:
            ROW: tl.constexpr = D * BITS // 64
            b_first = b_byte // (2 * ROW) * (D // 4) + b_byte % ROW * PER * 2 + b_byte // ROW % 2
            STEP: tl.constexpr = 2
        else:
            b_first = b_byte * PER
            STEP: tl.constexpr = 1
        for i in tl.static_range(PER):
            y = tl.load(p_row + b_first + i * STEP, mask=m_byte, other=0.0)
            if INTEGER_ZERO:
                code = _whole(tl.div_rn(y, scale + y * 0.0)) + zero
            else:
                code = _whole(tl.div_rn(y - least, scale + y * 0.0))
            b_value |= tl.clamp(code, 0.0, top * 1.0).to(tl.int32) << (i * BITS)
        bit = _code_index(place, b_first, IS_KEY, FRAGMENT, D, BITS) * BITS
        tl.store(p_run + OFFSET + bit // 8, b_value.to(tl.uint8), mask=m_byte)

        o_meta = META_OFFSET + _meta_index(place, FRAGMENT, PAGE) * 4
        tl.store(p_run + o_meta, (scale_bits & 255).to(tl.uint8))
        tl.store(p_run + o_meta + 1, (scale_bits >> 8).to(tl.uint8))
        tl.store(p_run + o_meta + 2, (zero_bits & 255).to(tl.uint8))
        tl.store(p_run + o_meta + 3, (zero_bits >> 8).to(tl.uint8))
