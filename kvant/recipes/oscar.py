"""OSCAR: Offline Spectral Covariance-Aware Rotation for 2-bit KV Cache Quantization (arXiv 2605.17757)."""

from kvant.codecs.affine import Affine
from kvant.recipe import Recipe, Stream, Window
from kvant.transforms.rotation import Rotation

_CODEC = Affine(bits=2, clip=0.0)
_WINDOW = Window(sink=64, recent=256)

OSCAR = Recipe(
    "oscar",
    Stream(_CODEC, (Rotation(target="queries"),), _WINDOW),
    Stream(_CODEC, (Rotation(target="attended"),), _WINDOW),
    paper="OSCAR, arXiv 2605.17757",
    summary="keys and values rotated by what attention reads, clipped, INT2, 64 sink and 256 recent tokens",
)
