"""For tests of recipes that code groups of tokens: what attention should see, computed without pages."""

from __future__ import annotations

import dataclasses

import torch

from kvant import recipes
from kvant.cache import PagedCache, Sequence
from kvant.correctors.saliency import Saliency
from kvant.correctors.subspace import Subspace
from kvant.layout import Layout
from kvant.recipe import Recipe, spans
from kvant.rope import Rope
from tests.conftest import make_layout

GROUPWISE = [n for n in recipes.names() if any(s.groupwise for s in recipes.get(n).streams.values())]
SMALL = [  # the same codecs with groups that a short test fills many times, windows at odd places
    "kivi-k2v2:k.group=16,k.flush=16,v.recent=5",
    "kivi-k2v2:k.flush=32,v.recent=32",
    "kivi-k4v4:k.group=16,k.flush=48,k.recent=7,v.recent=9,sink=5",
    "kivi-k2v4-sink:k.group=16,k.flush=16,v.recent=20,sink=3",
    "kitty:k.group=16,k.flush=16,v.recent=5,sink=9",
    "kitty-pro:k.group=32,k.flush=64,v.recent=40,sink=2",
    "squat:k.group=16,k.flush=16,v.recent=5",
    "squat-pre:k.group=16,k.flush=32,v.recent=5,sink=3,weight=0.01,block=16",
    "gear:block=32,k.group=16,flush=32",
    "gear-l:block=16,k.group=8,flush=48,recent=5,sink=3",
    "zipcache:group=16,flush=16",
    "zipcache:group=16,flush=32,recent=6,sink=5,share=0.25",
    "kivi-k2v4-sink:k.group=16,k.flush=32,v.recent=20,sink=16,shift=false",
    "kitty:k.group=32,k.flush=32,v.recent=5,sink=9,shift=false",
    "gear:block=32,k.group=16,flush=32,sink=5,shift=false",
    "zipcache:group=16,flush=32,sink=5,shift=false",
]


@dataclasses.dataclass
class Tokens:
    """Keys, values and queries of a sequence, as a model would make them: [tokens, heads, head_dim]."""

    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor

    @staticmethod
    def random(n: int, heads: int, group: int, dim: int, seed: int = 0) -> Tokens:
        random = torch.Generator().manual_seed(seed)

        def draw(count: int) -> torch.Tensor:
            return torch.randn(n, count, dim, generator=random)

        channels = torch.rand(dim, generator=random).mul(2).exp()  # keys have strong channels
        return Tokens(draw(heads) * channels + draw(1)[:1], draw(heads) + 0.3, draw(heads * group))

    def __getitem__(self, part: slice) -> Tokens:
        return Tokens(self.k[part], self.v[part], self.q[part])


def some_rope(dim: int) -> Rope:
    return Rope(10000.0 ** -(torch.arange(0, dim, 2) / dim))


def make_cache(
    name: str | Recipe, heads: int = 2, dim: int = 64, layers: int = 1, pages: int | None = None, **options: object
) -> PagedCache:
    layout = make_layout(name, heads, dim, **{"dtype": "float32", **options})
    return PagedCache(layout, layers, pages, ropes=[some_rope(dim)] * layers)


def fill(cache: PagedCache, seq: Sequence, tokens: Tokens, chunks: list[int]) -> None:
    at = 0
    for count in chunks:
        batch = cache.extend([seq], [count])
        part = tokens[at : at + count]
        for layer in range(len(cache.stores)):
            cache.append(layer, part.k, part.v, batch, part.q)
        at += count
    assert at == len(tokens.k)


def whole_groups(layout: Layout, side: str, tokens: Tokens, prompt: int, rope: Rope) -> torch.Tensor:
    """Every whole group of a stream as decoding should give it back, in the stored space; NaN elsewhere.

    `prompt` is the number of tokens of the append that completed the first group.
    """
    stream = layout.recipe.streams[side]  # type: ignore[index]
    codec = stream.codec.bind(layout.head_dim, {}, layout.dtype)
    k = stored(layout, "key", tokens.k, rope)
    x = k if side == "key" else stored(layout, side, tokens.v, rope)
    q = tokens.q.float().unflatten(1, (layout.heads, -1))
    if layout.recipe.key.rope == "pre":
        q = rope.rotate(q, -torch.arange(len(q)))
    for transform in layout.recipe.key.transforms:
        q = transform.bind(layout.head_dim).dual(q)
    group, sink = stream.codec.group_tokens, stream.window.first
    out = torch.full_like(x, float("nan"))
    for start in range(sink, len(x) - group + 1, group):
        at = slice(start, start + group)
        if isinstance(stream.corrector, Subspace):
            parts = stream.corrector.encode(x[at], codec, stream.corrector.fit(q[:prompt]))
        elif isinstance(stream.corrector, Saliency):
            parts = codec.encode(x[at], attention_received(q[at], k[at]))  # type: ignore[call-arg]
        else:
            parts = codec.encode(x[at])
        out[at] = codec.decode(parts)
    return out


def attention_received(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Mean weight that each token of a group gets from those that see it: [tokens, heads]."""
    n = len(k)
    scores = torch.einsum("qhgd,khd->hgqk", q.double(), k.double()) * k.shape[-1] ** -0.5
    weights = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf")).softmax(-1).mean(1)
    # the codec ranks by sums of weights in steps of 2^-16
    return ((weights * 2**16).round().sum(1) / 2**16 / torch.arange(n, 0, -1)).mT.float()


def stored(layout: Layout, side: str, x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Tokens as a stream stores them, rounded where it is group-wise as if they had waited in the tail."""
    stream = layout.recipe.streams[side]  # type: ignore[index]
    x = x.float()
    if stream.rope == "pre":
        x = rope.rotate(x, -torch.arange(len(x)))
    for transform in stream.transforms:
        x = transform.bind(layout.head_dim).forward(x)
    return x.to(getattr(torch, layout.overlay_dtype)).float() if stream.groupwise else x


def attended(layout: Layout, side: str, tokens: Tokens, n: int, prompt: int, rope: Rope | None = None) -> torch.Tensor:
    """What attention should see of the first n tokens, in the model's space: coded where spans say packed."""
    rope = rope or some_rope(layout.head_dim)
    stream = layout.recipe.streams[side]  # type: ignore[index]
    y = stored(layout, side, (tokens.k if side == "key" else tokens.v)[:n], rope)
    if not n:
        return y
    if stream.groupwise:
        coded = whole_groups(layout, side, tokens[:n], prompt, rope)
    else:
        codec = stream.codec.bind(layout.head_dim, {}, layout.dtype)
        coded = codec.decode(codec.encode(y))
    out = torch.empty_like(y)
    for span in spans(layout.recipe, n):
        at = slice(span.start, span.stop)
        full = y[at].to(getattr(torch, layout.overlay_dtype)).float()
        out[at] = coded[at] if getattr(span, side) == "packed" else full
    for transform in reversed(stream.transforms):
        out = transform.bind(layout.head_dim).inverse(out[:, :, None])[:, :, 0]
    if stream.rope == "pre":
        out = rope.rotate(out, torch.arange(n))
    return out


def same_bytes(first: PagedCache, second: PagedCache) -> bool:
    """Whether pages, windows and what correctors remember are the same, bit for bit, poison included."""
    pairs = []
    for one, two in zip(first.stores, second.stores, strict=True):
        pairs += [(one.pages, two.pages), *zip(one.owned, two.owned, strict=True)]
    return all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs)
