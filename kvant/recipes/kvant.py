"""kvant-2, kvant-3, kvant-4 and kvant-4-fast: kvant's own recipes.

**kvant-2** spends its bits where queries have variance. Keys are unrotated to the start of their RoPE block of 256
positions, so that their statistics do not depend on the position, and their mean is removed. They are then mapped to
a basis in which they are white and in which the queries' variances are sorted (transforms.affine_map.Balance): the
first channels matter most to the logits. The first quarter of the channels has 4 bits, the next half 2, the last
quarter none. There is one scale per token: the root mean square, stretched so that <x, decoded x> = <x, x> in the
product weighted by the queries' variances (codecs.banded). Values are partly whitened, mixed by a Hadamard matrix and
have 2 bits and one scale, whose sign says whether the values' mean was removed. 2.25 bits per element at head dim 64,
2.125 at 128. 4 sinks and 192 recent tokens are kept beside the pages, keys as they are and values as fp8, whose error is
small beside that of two bits. `search=9` first searches the scale with the least error; this gains nothing once the scale
is stretched.

**kvant-3** and **kvant-4** are the same with more bits: keys in bands of 4, 3 and 2 bits and values of 3; keys and values
of 4. Their windows have values in full precision, too.

Queries are unrotated once per RoPE block, which costs head_dim / 256 of the products. `rope=post` codes keys after RoPE
instead; statistics are then measured over all positions that will be served, as for the other recipes.

**kvant-4-fast** is SAW-INT4 with keys and values rotated, a float minimum, the keys' mean removed, which costs nothing at
decode, and a searched range for each token. It has the bytes and kernels of saw-int4-kv. `sink=4` improves it further.

In calibration a token is weighted partly by how much attention depends on it. Keys: 0.7 + 0.3 min(a / mean a, 100),
with a the sum of p^2 |v - o|^2 over the queries that read the token packed. Values: one half, and one half of the sum
of p^2. The first 16 tokens of a text have weight 0.
"""

import dataclasses

from kvant.codecs.affine import Affine
from kvant.codecs.banded import Banded
from kvant.recipe import Recipe, Stream, Window
from kvant.transforms.affine_map import Balance, Mean, Spectral
from kvant.transforms.hadamard import Hadamard

_WINDOW = Window(sink=4, recent=192)
_VALUES_IN_FP8 = dataclasses.replace(_WINDOW, window_dtype="fp8")
_INT4 = Affine(bits=4, search=5)


def _balanced(name: str, keys: str, values: str, summary: str, value_window: Window = _WINDOW) -> Recipe:
    """Keys in bands, in the basis that balances them with queries, and values of one width, both with one scale per token."""
    return Recipe(
        name,
        Stream(Banded(keys, search=1), (Balance(),), _WINDOW, rope="block"),
        Stream(Banded(values, search=1, weighted=False, unbiased=False, flag=True), (Spectral(),), value_window),
        paper="kvant",
        summary=summary,
    )


KVANT_2 = _balanced(
    "kvant-2", "4/2/0", "2", "keys in bands of 4, 2 and 0 bits by what queries read, values of 2 bits", _VALUES_IN_FP8
)
KVANT_3 = _balanced("kvant-3", "4/3/2", "3", "as kvant-2, with keys in bands of 4, 3 and 2 bits and values of 3 bits")
KVANT_4 = _balanced("kvant-4", "4", "4", "as kvant-2, with keys and values of 4 bits")
KVANT_4_FAST = Recipe(
    "kvant-4-fast",
    Stream(_INT4, (Mean(), Hadamard())),
    Stream(_INT4, (Hadamard(),)),
    paper="kvant",
    summary="keys without their mean, keys and values rotated, INT4 with a searched range",
)
