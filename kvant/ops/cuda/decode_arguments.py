"""Argument structs of the kernels of decode attention."""

from __future__ import annotations

from kvant.ops.cuda.arguments import Arguments, float32, int32, optional, pointer

DecodeArguments = Arguments(
    "DecodeArguments",
    query=pointer("const void", "[batch, KV_HEADS * GROUP, HEAD_DIM]"),
    out=pointer(
        "void", "[batch, QUERIES, KV_HEADS * GROUP / QUERIES, HEAD_DIM]; float32 where a kernel after transforms them"
    ),
    lse=pointer("float", "log-sum-exps of the logits: the outputs' shape without HEAD_DIM"),
    pages=pointer("const u8", "[pages, KV_HEADS, PAGE_HEAD_BYTES]"),
    block_table=pointer("const s64", "[batch, block_table_width]: page numbers"),
    seq_lens=pointer("const s64", "[batch]: tokens of a sequence"),
    overlay_rows=pointer("const s64", "[batch]: row of a sequence in the overlays"),
    sinks=pointer("const s64", "[batch]: first tokens that the overlay holds"),
    key_ring_start=pointer("const s64", "[batch]: position from which on the ring of keys is filled"),
    value_ring_start=pointer("const s64", "[batch]: the same of values"),
    overlay_key=pointer("const void", "[rows, overlay tokens, KV_HEADS, HEAD_DIM]"),
    overlay_value=pointer("const void", "the same of values"),
    query_signs=optional("const float", "[HEAD_DIM]: signs before the Hadamard transform of queries"),
    output_signs=optional("const float", "[HEAD_DIM]: signs after the Hadamard transform of outputs"),
    value_mean=optional("const float", "[KV_HEADS, HEAD_DIM]: subtracted from values with a negative scale"),
    mean_logit=optional("const float", "[batch, KV_HEADS * GROUP]: q . mu, with a soft cap"),
    sink_logits=optional(
        "const float", "[sink_rows, KV_HEADS * GROUP / QUERIES]: logits in the softmax's denominator alone"
    ),
    query_matrix=optional("const uint4", "fragments of the queries' matrix, where this kernel transforms them"),
    output_matrix=optional("const uint4", "the same of outputs"),
    output_offset=optional("const float", "[output_matrix_heads, HEAD_DIM]: added to outputs after their matrix"),
    partial=pointer("float", "[parts, 2, PARTIAL]: partial results"),
    arrivals=pointer("int", "[batch, HEAD_TILES, min(WARPS, TILE_HEADS)]: counters, zero before and after"),
    key_codebooks=optional("const u8", "fp16 [KV_HEADS or 1, centroids, channels of a sub-vector]"),
    value_codebooks=optional("const u8", "the same of values"),
    operands=optional("const struct QueryOperand", "[batch, HEAD_TILES, rope_blocks]: made by a kernel before"),
    query_rows=optional(
        "const float",
        "queries in the space of the keys, for the overlay: [batch, KV_HEADS * GROUP, HEAD_DIM]; SPLIT_ROWS: each number as "
        "two bfloat16 numbers. With RoPE blocks the overlay holds raw keys, and `query` is read",
    ),
    scale=float32("of logits, times log2(e); 2 log2(e) / cap times with a soft cap"),
    cap=float32("the soft cap times log2(e)"),
    batch=int32("sequences"),
    block_table_width=int32("pages of a row of the block table"),
    sliding_window=int32("tokens that are attended to; 0 for all"),
    rope_blocks=int32("operands of a (sequence, head tile): RoPE blocks that the block table may reach into"),
    first_position=int32("RoPE position of the first token"),
    after_append=int32(
        "1 where the kernel before appends the new tokens, which the overlay holds: it is waited for late"
    ),
    matrix_heads=int32("matrices of queries: KV_HEADS or 1"),
    output_matrix_heads=int32("matrices of outputs: KV_HEADS or 1"),
    sink_rows=int32("rows of sink_logits: batch * QUERIES where they lack q . mu as the scores do, else 1"),
    cosine=optional(
        "const float",
        "[rope_blocks, HEAD_DIM / 2]: of the start of a RoPE block, where this kernel rotates; of every position for keys",
    ),
    sine=optional("const float", "[rope_blocks, HEAD_DIM / 2]"),
    angles=optional(
        "const uint4", "fp16 [tokens of a chunk, row]: fragments of angles inside a chunk, of rotated keys"
    ),
)

TransformQueriesArguments = Arguments(
    "TransformQueriesArguments",
    query=pointer("const void", "[batch, KV_HEADS * GROUP, HEAD_DIM]"),
    matrix=pointer("const uint4", "[matrix_heads, HEAD_DIM / 16, HEAD_DIM / 16, 2, 32]: fragments.matrix_fragments"),
    mean_logit=optional("const float", "[batch, KV_HEADS * GROUP]: q . mu, with a soft cap"),
    operands=pointer("struct QueryOperand", "[batch, HEAD_TILES]; not with channel-wise keys"),
    rows=pointer("float", "[batch, KV_HEADS * GROUP, HEAD_DIM]: for the overlay and for channel-wise keys"),
    scale=float32("as decode's"),
    batch=int32("sequences"),
    matrix_heads=int32("KV_HEADS or 1"),
    at_once=int32("sequences of a CTA at a time, at most 16 / TILE_HEADS; fewer are ready sooner"),
    after_append=int32("as decode's"),
)

TransformOutputsArguments = Arguments(
    "TransformOutputsArguments",
    rows=pointer("const void", "float32 [batch, heads, rows of a head, HEAD_DIM]"),
    out=pointer("void", "the same shape, of the queries' type"),
    matrix=pointer("const float", "[heads, HEAD_DIM, HEAD_DIM]"),
    offset=optional("const float", "[heads, HEAD_DIM]"),
    lse=optional("const float", "[batch, heads, rows of a head]: decode's, where there are sink logits"),
    sink_logits=optional("const float", "as decode's: the offset belongs to the tokens' share of the softmax"),
    batch=int32("sequences"),
    heads=int32("matrices: KV_HEADS or 1"),
    head_rows=int32("rows of a matrix and sequence"),
    sink_rows=int32("as decode's"),
)

RotateQueriesArguments = Arguments(
    "RotateQueriesArguments",
    query=pointer("const void", "[batch, KV_HEADS * GROUP, HEAD_DIM]"),
    matrix=pointer("const uint2", "[matrix_heads, tiles, HEAD_DIM / 16, 2 parts, 32]: fragments.rotate_fragments"),
    cosine=pointer("const float", "[rope_blocks, half]: of the start of a RoPE block"),
    sine=pointer("const float", "[rope_blocks, half]"),
    operands=pointer("struct QueryOperand", "[batch, HEAD_TILES, rope_blocks]"),
    seq_lens=pointer("const s64", "as decode's"),
    scale=float32("as decode's"),
    batch=int32("sequences"),
    rope_blocks=int32("RoPE blocks that the block table may reach into"),
    first_position=int32("RoPE position of the first token"),
    half=int32("rotated pairs of channels"),
    matrix_heads=int32("KV_HEADS or 1"),
    sliding_window=int32("as decode's"),
    after_append=int32("as decode's"),
)
