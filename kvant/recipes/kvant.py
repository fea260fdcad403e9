"""kvant-4 and kvant-2: recipes of our own.

**kvant-2** codes what attention reads. Keys are unrotated to the start of their block of 256 positions, so that they
look alike wherever they stand; their mean is taken off; a basis in which they are white and in which queries have sorted
variances (transforms.affine_map.Balance) puts what queries read most into the first channels. The first quarter of the
channels has 4 bits, the next half 2, the last quarter none. One scale per token: the root mean square, stretched so that
the token's product with itself, weighed by the queries' variances, is kept (codecs.banded). Values: part of the way to
white, mixed, 2 bits, one scale, whose sign says whether the values' mean was taken off. 2.25 bits per element at head dim
64, 2.125 at 128. `search=9` searches the scale for the least error first; it gains nothing once the scale is stretched.

Queries are unrotated once per block of positions, which costs head_dim / 256 of the products. `rope=post` codes
keys as they come instead; statistics are then, as everybody's, measured over all positions that will be served.

**kvant-4** is SAW-INT4 with keys and values rotated, a float minimum, the keys' mean taken off, which costs nothing at
decode, and the range of each token searched: the bytes and kernels of saw-int4-kv. `sink=4` makes it better still.

A token counts in calibration partly by what attention reads of it: 0.7 + 0.3 min(a / mean a, 100) for keys, with a the
sum of p^2 |v - o|^2 over the queries that find it coded, one half and the sum of p^2 for values; the first 16 tokens of
a text not at all.
"""

from kvant.codecs.affine import Affine
from kvant.codecs.banded import Banded
from kvant.recipe import Recipe, Stream, Window
from kvant.transforms.affine_map import Balance, Mean, Spectral
from kvant.transforms.hadamard import Hadamard

_WINDOW = Window(sink=4, recent=64)
_INT4 = Affine(bits=4, search=5)
_KEYS = Stream(Banded("4/2/0", search=1), (Balance(),), _WINDOW, rope="block")

KVANT_4 = Recipe(
    "kvant-4",
    Stream(_INT4, (Mean(), Hadamard())),
    Stream(_INT4, (Hadamard(),)),
    paper="kvant",
    summary="keys without their mean, keys and values rotated, INT4 with a searched range",
)

KVANT_2 = Recipe(
    "kvant-2",
    _KEYS,
    Stream(Banded("2", search=1, weighted=False, unbiased=False, flag=True), (Spectral(),), _WINDOW),
    paper="kvant",
    summary="keys in bands of 4, 2 and 0 bits by what queries read, values 2 bits, 4 sink and 64 recent tokens",
)
