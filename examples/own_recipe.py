"""Put a recipe together from parts, and see whether it fits a model and what it stores.

python examples/own_recipe.py [MODEL]
"""

import sys

import kvant
from kvant.codecs.affine import Affine
from kvant.models import load
from kvant.recipe import Recipe, Stream, Window
from kvant.transforms.hadamard import Hadamard

window = Window(sink=4, recent=64)  # the first 4 and the last 64 tokens stay in full precision
mine = Recipe(
    "mine",
    key=Stream(Affine(bits=8), transforms=(Hadamard(),), window=window),  # keys: rotated, 8 bits
    value=Stream(Affine(bits=4), window=window),  # values: 4 bits
    summary="keys of 8 bits, values of 4",
)

model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
cache = kvant.Cache(model, mine)
print(
    f"{cache.layout.bits_per_element():.2f} bits per number in pages, {cache.layout.bits_per_element(32768):.2f} at 32k tokens"
)
for verdict in kvant.check(model, tokenizer, [mine, "int4"], tokens=320):  # more tokens: a surer verdict
    print(verdict)

# A file kvant/recipes/mine.py with this constant makes it known to all commands: kvant eval --recipe mine, or mine:v.bits=3
