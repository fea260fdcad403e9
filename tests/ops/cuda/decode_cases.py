"""What decode is tested with, on a GPU and emulated: recipes of every format, shapes and options."""

from __future__ import annotations

LENGTHS = [1, 63, 64, 129, 700, 2000]
ROTATED: list[tuple[str, int, int, dict[str, float]]] = [  # recipe, query heads a KV head, head_dim, options
    ("kvant-2", 4, 64, {}),
    ("kvant-2:rope_block=100", 5, 64, {"softcap": 5.0, "first": 1000}),
    ("kvant-2", 2, 64, {"sliding_window": 150}),
    ("kvant-2:rope_block=64,sink=70,recent=130", 3, 128, {"first": 30}),
    ("kvant-2", 1, 128, {"sliding_window": 270, "first": 200}),
    ("kvant-2:rope_block=64", 16, 128, {"softcap": 5.0, "first": 3}),
    ("kvant-2:k.bits=4/4/0,rope_block=128", 8, 128, {}),
    ("kvant-2:rope_block=64,sink=0,recent=0", 12, 64, {}),
    ("kvant-2:rope_block=100,sink=4,recent=64", 17, 64, {"rotated": 24}),
    ("kvant-2:rope_block=128", 9, 256, {"first": 77}),
]
# recipe, query heads a KV head and query, head_dim, queries a sequence, options
SEVERAL_QUERIES: list[tuple[str, int, int, int, dict[str, float]]] = [
    ("saw-int4", 4, 128, 4, {}),
    ("kvant-2:rollback=3", 4, 128, 4, {}),
    ("oscar:sink=3,recent=20,rollback=2", 2, 64, 3, {"sliding_window": 70}),
    ("int4", 1, 64, 2, {"sliding_window": 3, "softcap": 5.0}),
    ("int4:sink=4,recent=3,rollback=7", 3, 64, 8, {}),
    ("quarot-int2-win:sink=5,recent=70,rollback=4", 5, 64, 5, {}),
    ("kvant-2:rope_block=64,sink=70,recent=130,rollback=7", 4, 64, 8, {"first": 30, "sliding_window": 150}),
    ("kvant-2:rope_block=100,sink=4,recent=64,rollback=4", 3, 64, 5, {"first": 1000, "softcap": 5.0}),
    ("kvant-2:rope=post,rollback=1", 8, 64, 2, {}),
    ("int4:v.group=32,k.group=32", 4, 64, 4, {}),
    ("saw-int4-kmeans", 4, 64, 2, {}),
    ("vecinfer-2:rollback=3", 4, 64, 4, {}),
    ("vecinfer-2:rope=block,rope_block=64,sink=3,recent=20,rollback=2", 4, 64, 3, {"first": 30}),
    ("kivi-k2v2:rollback=3", 4, 64, 4, {}),  # groups of tokens: every query is a sequence
    ("saw-int4", 2, 256, 4, {}),
]
HALVED: list[tuple[str, int, int, dict[str, float]]] = [  # bands of which a lane has one byte of a token
    ("kvant-3", 4, 64, {"first": 30}),
    ("kvant-3:rope=post", 9, 64, {"softcap": 5.0}),
    ("kvant-2:rope=post,k.bits=3/2/0,v.bits=3", 5, 128, {}),
    ("kvant-2:rope_block=64,k.bits=0/4/2", 3, 64, {}),
]
ROTATED_HIGH_BATCH: list[tuple[str, int, int, dict[str, float]]] = [  # more, where there are many blocks of positions
    ("million-2:rope=block,rope_block=64,k.bits=10,v.bits=9", 6, 96, {"first": 5}),
    ("kvant-2:rope_block=64", 8, 128, {"sliding_window": 100, "softcap": 5.0}),
    ("kvant-2:rope_block=64,k.bits=2", 4, 64, {}),
    ("kvant-3:rope_block=64", 4, 128, {"first": 5}),
    ("kvant-3:rope_block=64", 9, 64, {}),
    ("vecinfer-2:rope=block,rope_block=64,sink=3,recent=20", 4, 64, {"first": 30}),
    ("million-2:rope=block,rope_block=100", 9, 128, {"softcap": 5.0}),
]
ROTATED_INSIDE: list[tuple[str, int, int, dict[str, float]]] = [  # where decode rotates 16-bit queries itself
    ("kvant-2", 4, 128, {}),
    ("kvant-2:rope_block=100", 5, 64, {"softcap": 5.0, "first": 1000}),
    ("kvant-2", 2, 64, {"sliding_window": 150}),
    ("kvant-2:rope_block=64,sink=70,recent=130", 3, 128, {"first": 30}),
    ("kvant-2", 1, 128, {"sliding_window": 270, "first": 200}),
    ("kvant-2:rope_block=64", 16, 128, {"softcap": 5.0, "first": 3}),
    ("kvant-2:k.bits=4/4/0,rope_block=128", 8, 64, {}),
    ("kvant-2:k.bits=0/2/4,rope_block=64", 4, 128, {"first": 5}),
    ("kvant-2:k.bits=4,rope_block=64", 6, 96, {}),
    ("kvant-2:k.bits=3,rope_block=64", 7, 64, {}),
    ("kvant-3:rope_block=64", 4, 64, {"first": 5}),
    ("kvant-2:rope_block=64,sink=0,recent=0", 12, 64, {}),
    ("kvant-2:rope_block=64,k.bits=2", 17, 64, {"first": 77}),
]
FP8_WINDOWS: list[tuple[str, int, int, dict[str, float]]] = [  # of values
    ("int4:sink=3,recent=70,v.window_dtype=fp8", 4, 80, {}),
    ("int4:sink=3,recent=70,v.window_dtype=fp8", 9, 64, {}),
    ("oscar:group=32,sink=3,recent=20,v.window_dtype=fp8", 2, 128, {"sliding_window": 150}),
    ("int2:k.group=32,v.group=16,sink=3,recent=20,v.window_dtype=fp8", 4, 64, {}),
    ("turboquant-3:sink=3,recent=20,v.window_dtype=fp8", 5, 64, {}),
    ("saw-int4-kmeans:centroids=64,sink=3,recent=20,v.window_dtype=fp8", 4, 128, {}),
]
SCALES: list[tuple[str, int, int, dict[str, float]]] = [  # several scales a token
    ("int4:group=32", 4, 128, {}),
    ("oscar:group=64,sink=3,recent=20", 4, 128, {"sliding_window": 150}),
    ("oscar:group=32", 2, 64, {"softcap": 5.0}),
    ("int4:group=32,zero=integer,meta=float16", 5, 64, {}),
    ("saw-int4:group=64", 9, 128, {"softcap": 5.0}),
    ("int2:k.group=32,v.group=16", 16, 64, {}),
    ("int8:k.group=64,v.group=32", 1, 128, {}),
    ("int4:v.group=32", 8, 96, {}),
    ("int4:k.group=32", 3, 96, {}),
    ("int2:group=64,sink=2,recent=5", 4, 256, {}),
]
RESIDUAL: list[tuple[str, int, int, dict[str, float]]] = [  # centroids of whole head vectors, and codes of residuals
    ("saw-int4-kmeans", 4, 128, {}),
    ("saw-int4-kmeans-rot:centroids=16,sink=3,recent=20", 5, 64, {"sliding_window": 150}),
    ("saw-int4-kmeans:centroids=40,books=layer,zero=float,meta=float16", 1, 64, {"softcap": 5.0}),
    ("saw-int4-kmeans-rot:bits=2,group=32", 16, 64, {}),
    ("saw-int4-kmeans:centroids=1", 8, 96, {}),
    ("saw-int4-kmeans:k.centroids=30,v.centroids=70,sink=3,recent=20", 7, 64, {"sliding_window": 150}),
    ("saw-int4-kmeans:k.centroids=1,v.centroids=33,group=64,recent=5", 3, 128, {"softcap": 5.0}),
]
LEVELS: list[tuple[str, int, int, dict[str, float]]] = [  # codes that are places in a table of levels
    ("turboquant-4", 4, 64, {}),
    ("turboquant-3:sink=3,recent=20", 9, 128, {"softcap": 5.0}),
    ("turboquant-2", 1, 128, {"sliding_window": 150}),
    ("turboquant-4:k.bits=2,v.bits=3", 16, 64, {}),
    ("turboquant-4:meta=bfloat16", 5, 96, {}),
    ("turboquant-3:v.bits=4", 8, 256, {}),
]
SPACES: list[tuple[str, int, int, dict[str, float]]] = [  # a codebook for every sub-vector's place
    ("million-2:books=space", 4, 64, {}),
    ("million-2:k.books=space,bits=6", 9, 64, {"softcap": 5.0}),
    ("million-4:bits=4,books=space", 3, 96, {}),
    ("vecinfer-2:bits=8,v.books=space,dim=8", 1, 128, {"sliding_window": 150}),
]
ROTATED_KEYS: list[tuple[str, int, int, dict[str, float]]] = [  # where decode rotates keys that are stored before RoPE
    ("squat-pre", 4, 64, {"first": 1000}),
    ("squat-pre:sink=3,k.bits=4,k.flush=64,v.recent=5", 9, 64, {"softcap": 5.0, "first": 77}),
    ("squat-pre:v.group=0,k.bits=3", 2, 128, {"sliding_window": 150}),
    ("squat-pre:k.group=16,k.flush=48,k.recent=7,v.recent=70,k.bits=8", 5, 32, {"first": 5}),
    ("squat-pre:v.bits=4", 1, 96, {}),
    ("squat-pre", 4, 128, {"first": 3}),
]
SINK_LOGITS: list[tuple[str, int, int, dict[str, float]]] = [  # of every way that outputs are finished
    ("saw-int4", 4, 128, {}),
    ("saw-int4-kv", 8, 64, {"sliding_window": 128}),
    ("oscar:sink=3,recent=20", 5, 64, {"sliding_window": 150}),
    ("kvant-2", 4, 64, {}),
    ("kvant-2:rope_block=64,sink=5", 8, 128, {"sliding_window": 100}),
    ("kvant-2:rope=post", 3, 64, {}),
    ("kvant-2:rope=post", 4, 128, {"softcap": 5.0}),
    ("kvant-4-fast", 9, 64, {}),
    ("int4:group=32", 4, 64, {"softcap": 5.0}),
    ("saw-int4-kmeans-rot:centroids=40,sink=3,recent=20", 4, 64, {}),
    ("kivi-k2v2", 4, 64, {}),
    ("kitty:k.group=32,k.flush=32,v.recent=5,sink=9", 9, 64, {"sliding_window": 150}),
    ("squat-pre:sink=3", 4, 64, {}),
    ("vecinfer-2", 4, 64, {}),
    ("vecinfer-2:rope=block,rope_block=64,sink=3,recent=20", 4, 64, {}),
]
ROTATED_BEFORE = (("QUERY_TRANSFORM", 2),)  # by a kernel before decode
ROTATED_BY_DECODE = (("QUERY_TRANSFORM", 4),)  # at a high batch
COPIED_INDICES = (("INDICES_IN_REGISTERS", 0),)
# How decode reads indices of product VQ: to registers, by the default and by other launches; from pages that are copied to shared memory.
INDEX_LAUNCHES: list[tuple[tuple[str, int], ...]] = [
    (),
    (("INDICES_IN_REGISTERS", 1), ("PAIRED_BOOKS", 0), ("TEAMS", 2), ("WARPS", 6)),
    (("INDICES_IN_REGISTERS", 1), ("CHUNK_TILES", 2)),
    COPIED_INDICES,
    (*COPIED_INDICES, ("PAIRED_BOOKS", 1), ("TEAMS", 3), ("WARPS", 4)),
]
