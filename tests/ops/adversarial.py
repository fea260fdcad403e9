"""Keys and values that are hard on a codec or on a kernel, for tests of every implementation against the reference.

Every tensor is the keys of one sequence, the values of another and both of a third, so that one call of an operation
sees all of them. Sequences do not touch each other; each is compared by itself.
"""

from __future__ import annotations

import dataclasses

import torch

Tensor = torch.Tensor
HEADS, GROUP, DIM = 2, 3, 64  # GROUP: query heads a KV head
PROMPT, STEP = 130, 3  # tokens that are appended at once, and after them
TOKENS = PROMPT + STEP
LARGEST_LOGIT = 8.0  # that queries are scaled to: beyond it, outputs show little but the rounding of logits

RECIPES = [  # every codec, transform and way to be read; windows are short, so that most tokens are read from pages
    "full",
    "int8",
    "int4",
    "int3",
    "int2",
    "int4:group=32",
    "int2:zero=float,search=5,meta=float16",
    "int4:k.clip=0.9,v.search=3",
    "saw-int4",
    "saw-int4-kv",
    "saw-int4-hessian-kv",
    "saw-int4-kmeans:centroids=64",
    "saw-int4-kmeans-rot:centroids=64,zero=float",
    "quarot-int2",
    "quarot-int2-win:sink=3,recent=20",
    "oscar:sink=3,recent=20",
    "oscar:group=32,sink=3,recent=20",
    "kvant-2:sink=3,recent=20",
    "kvant-2:rope=post,search=9,sink=0,recent=0",
    "kvant-3:sink=3,recent=20",
    "kvant-4:sink=3,recent=20",
    "kvant-4-fast",
    "turboquant-4",
    "turboquant-3:sink=3,recent=20",
    "turboquant-2",
    "vecinfer-2:sink=1,recent=20",
    "million-2:bits=6,sink=1,recent=20",
    "kivi-k2v2:k.flush=32,v.recent=20",
    "kivi-k4v4:k.flush=32,v.recent=20",
    "kivi-k2v4-sink:sink=3,k.flush=32,v.recent=20",
    "kitty:k.group=32,k.flush=32,v.recent=20,sink=3",
    "kitty-pro:k.group=32,k.flush=32,v.recent=20,sink=3",
]
PACKED = RECIPES[1:]  # those with codes


def tensors(tokens: int, heads: int, dim: int) -> dict[str, Tensor]:
    """By name, float32 [tokens, heads, dim]."""
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(tokens, heads, dim, generator=generator)
    noise = torch.randn(tokens, heads, dim, generator=generator)
    one, first = torch.ones(tokens, heads, dim), torch.zeros(tokens, heads, dim)
    first[..., 0] = 1.0
    token, channel = torch.arange(tokens)[:, None, None], torch.arange(dim)[None, None]
    walking = (channel == token % dim).float().expand(-1, heads, -1)
    late = token >= tokens // 2

    def with_channel(number: float) -> Tensor:
        x = normal.clone()
        x[..., 5] = number
        return x

    return {
        "zeros": 0 * one,
        "constant 1": one,
        "constant -100": -100 * one,
        "constant 0.001": 1e-3 * one,
        "constant 60000": 6e4 * one,
        "unit vector": first,
        "100 times a unit vector": 100 * first,
        "-60000 times a unit vector": -6e4 * first,
        "1e-6 times a unit vector": 1e-6 * first,
        "1e-30 times a unit vector": 1e-30 * first,
        "another channel in every token": 3 * walking,
        "unit vectors among normal ones": torch.where(token % 2 == 0, normal, 100 * first),
        "constants among normal ones": torch.where(token % 3 == 0, one * (token % 7 - 3), normal),
        "60000 in one channel": with_channel(6e4),
        "1000 in one channel": with_channel(1e3),
        "denormals of float32": 1e-40 * normal,
        "denormals of float16": 1e-6 * normal,
        "all around 1e-30": 1e-30 * normal,
        "all around 1e-4": 1e-4 * normal,
        "all around 10000": 1e4 * normal,
        "all around 1e20": 1e20 * normal,
        "equal tokens": normal[:1].expand(tokens, -1, -1),
        "equal tokens but one": torch.where(token == 77, normal, noise[:1]),
        "zeros of both signs": torch.copysign(0 * one, normal),
        "zeros of both signs among normal numbers": torch.where(noise > 0, normal, torch.copysign(0 * one, normal)),
        "1 and 1e-5 of noise": 1 + 1e-5 * noise,
        "1 and 1e-3 of noise": 1 + 1e-3 * noise,
        "-100 and 0.1 of noise": -100 + 0.1 * noise,
        "nearly constant among normal ones": torch.where(token % 4 == 1, 2 + 1e-4 * noise, normal),
        "half of 1, half of the next number": torch.where(channel % 2 == 0, one, (1 + 2**-7) * one),
        "signs that alternate by channel": one * (1 - channel % 2 * 2),
        "signs that alternate by token": normal[:1] * (1 - token % 2 * 2),
        "huge, then tiny tokens": torch.where(late, 1e-4 * normal, 1e3 * normal),
        "tiny, then huge tokens": torch.where(late, 1e3 * normal, 1e-4 * normal),
        "zero vectors among normal ones": torch.where(token % 3 == 0, 0 * one, normal),
        "one huge token": torch.where(token == 40, 1e4 * normal, normal),
        "one token that is not zero": torch.where(token == 40, normal, 0 * one),
        "a ramp over channels": one * (channel - 20) / 8,
        "a ramp over tokens": one * (token + 1) / 50,
        "powers of two": one * torch.exp2(channel / 4 - 8),
        "halves": (noise * 8).round() / 2,
        "heavy tails": normal / (noise.abs() + 1e-3),
    }


@dataclasses.dataclass(frozen=True)
class Table:
    """Sequences of one type: their names, and keys and values [sequences, TOKENS, HEADS, DIM]."""

    names: list[str]
    keys: Tensor
    values: Tensor
    refused: dict[str, Tensor]  # tensors with numbers that append refuses

    def queries(self) -> Tensor:
        """[sequences, STEP, HEADS * GROUP, DIM]: of the step's tokens. Normal, scaled where logits would be too large."""
        shape = len(self.names), STEP, HEADS, GROUP, DIM
        q = torch.randn(shape, generator=torch.Generator().manual_seed(8))
        logits = torch.einsum("sthgd,snhd->sthgn", q, self.keys.float()) * DIM**-0.5
        most = logits.abs().amax((1, 3, 4), keepdim=True).clamp_min(LARGEST_LOGIT)
        return (q * LARGEST_LOGIT / most).flatten(2, 3).to(self.keys.dtype)


def table(dtype: torch.dtype, limit: float, every: int = 1) -> Table:
    """All tensors in a type, or one of `every`; `limit` is the largest number that append takes."""
    generator = torch.Generator().manual_seed(9)
    names, keys, values, refused = [], [], [], {}
    for name, x in list(tensors(TOKENS, HEADS, DIM).items())[::every]:
        x = x.to(dtype)
        if not bool((x.abs() <= limit).all()):
            refused[name] = x
            continue
        other = torch.randn(x.shape, generator=generator).to(dtype)
        for what, k, v in (("keys", x, other), ("values", other, x), ("keys and values", x, x)):
            names.append(f"{what}: {name}")
            keys.append(k)
            values.append(v)
    return Table(names, torch.stack(keys), torch.stack(values), refused)


def assert_close(names: list[str], found: Tensor, expected: Tensor, limit: float, least: float = 0.0) -> None:
    """Outputs [sequences, ...] of every sequence are close to those expected: `limit` bounds the relative error. A number
    may be off by the smallest one of its type, by 1e-30 or by `least`, too."""
    info = torch.finfo(found.dtype)
    least = max(least, 1e-30, info.smallest_normal * info.eps) * found[0].numel() ** 0.5
    found, expected = found.double().flatten(1), expected.double().flatten(1)
    error, size = (found - expected).norm(dim=1), expected.norm(dim=1)
    wrong = ~(error <= limit * size + least)  # true for NaN
    listed = [f"{names[i]} ({error[i]:.1e} of {size[i]:.1e})" for i in wrong.nonzero().flatten().tolist()]
    assert not listed, f"{len(listed)} of {len(error)} sequences are off by more than {limit}: {', '.join(listed)}"
