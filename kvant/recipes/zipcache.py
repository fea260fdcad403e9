"""ZipCache: Accurate and Efficient KV Cache Quantization with Salient Token Identification (arXiv 2405.14256).

Tokens that get much attention have four bits, the others two. Keys are coded per channel, values by channel-separable
tokenwise quantization; a token's saliency is its normalized attention score, the mean weight over the queries that see
it. 40 % of the tokens are salient, as in two of the four settings of SQuat's tables; the others have 30 and 50 %.

Where we differ: a page has one size, so every group of 128 tokens has the same number of salient ones, rather than the
prompt as a whole, and tokens stay in full precision until a group is complete (the paper recompresses every 100 tokens,
SQuat's tables every 32). Saliency is measured inside the group, see correctors/saliency.py; each KV head ranks its own
tokens.
"""

from kvant.codecs.salient import Salient
from kvant.correctors.saliency import Saliency
from kvant.recipe import Recipe, Stream, Window

_WINDOW = Window(flush=128)

ZIPCACHE = Recipe(
    "zipcache",
    Stream(Salient("channel"), window=_WINDOW, corrector=Saliency()),
    Stream(Salient("token"), window=_WINDOW, corrector=Saliency()),
    paper="ZipCache, arXiv 2405.14256",
    summary="INT4 for the 40 % of the tokens that get most attention, INT2 for the others",
)
