"""ZipCache's codec: of every group of tokens the salient ones have four bits, the others two."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import torch

from kvant.codecs.base import Codec, Field, Parts, Tensor
from kvant.codecs.channel import affine_codes, check_group
from kvant.codecs.format import Band, ScaleKind, Scales, StreamFormat


@dataclasses.dataclass(frozen=True)
class Salient(Codec):
    """Mixed precision by token. The low two bits of all tokens are one dense tensor, the high two bits of the salient
    tokens another. One index byte per token is the token's row in the second tensor, or says that it has none.

    axis   "channel": a scale and a minimum for every channel, one pair for the salient tokens and one for the others
           (keys); "token": every channel is divided by the root of its largest magnitude in the group, then a scale and
           a minimum for every token (values; the paper's channel-separable tokenwise quantization).
    group  tokens that are ranked and coded together.
    share  share of the tokens that are salient; the same number in every group, so that all pages have the same size.
    """

    axis: Literal["channel", "token"] = "channel"
    group: int = 128
    share: float = 0.4

    ranked: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.axis not in ("channel", "token"):
            raise ValueError(f"axis must be channel or token, got {self.axis!r}")
        check_group("group", self.group)
        if not 0.0 < self.share < 1.0 or not 0 < self.salient < self.group:
            raise ValueError(f"share must leave tokens of both kinds in a group of {self.group}, got {self.share}")

    @property
    def group_tokens(self) -> int:
        return self.group

    @property
    def salient(self) -> int:
        """Salient tokens of a group."""
        return round(self.share * self.group)

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        if head_dim % 4:
            raise ValueError(f"head_dim must be a multiple of 4, got {head_dim}")
        width, tokens = (2 * head_dim, self.group) if self.axis == "channel" else (1, 1)
        fields = [
            Field("codes", "code", 2, head_dim),
            Field("scale", "meta", 16, width, tokens, "float16"),
            Field("min", "meta", 16, width, tokens, "float16"),
            Field("high", "index", 2, self.salient * head_dim, self.group),
            Field("index", "index", 8, self.group, self.group),
        ]
        if self.axis == "token":
            fields.append(Field("norm", "meta", 16, head_dim, self.group, "float16"))
        return tuple(fields)

    def format(self, head_dim: int) -> StreamFormat:
        if self.axis == "channel":  # one set of scales for the salient tokens and one for the others
            scales = Scales(ScaleKind.MIN, ("scale", "min"), "float16", "channel", groups=2, tokens=self.group)
        else:
            scales = Scales(ScaleKind.MIN, ("scale", "min"), "float16", "token")
        return StreamFormat(
            type(self).__name__,
            head_dim,
            bands=(Band("codes", 0, head_dim, 2),),
            scales=scales,
            group_tokens=self.group,
            extras=("high", "index") if self.axis == "channel" else ("high", "index", "norm"),
        )

    def encode(self, x: Tensor, saliency: Tensor | None = None) -> Parts:
        """[tokens, heads, head_dim]; saliency is [tokens, heads]. Without it the first tokens of a group are the salient ones."""
        tokens, heads, dim = x.shape
        assert tokens % self.group == 0, (tokens, self.group)
        x = x.float().reshape(-1, self.group, heads, dim).transpose(1, 2)  # [groups, heads, tokens, channels]
        rank = torch.zeros(tokens, heads, dtype=torch.float32, device=x.device) if saliency is None else saliency
        order = rank.reshape(-1, self.group, heads).transpose(1, 2).argsort(dim=-1, descending=True, stable=True)
        chosen = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order[..., : self.salient], True)
        top = torch.where(chosen, 15.0, 3.0)[..., None]
        parts: Parts = {}
        if self.axis == "channel":
            pick = torch.stack((chosen, ~chosen), 2)[..., None]  # [groups, heads, 2, tokens, 1]
            low = x[:, :, None].masked_fill(~pick, float("inf")).amin(3)  # [groups, heads, 2, channels]
            high = x[:, :, None].masked_fill(~pick, float("-inf")).amax(3)
            tops = torch.tensor([15.0, 3.0], dtype=torch.float32, device=x.device)[:, None, None]
            codes, scale, low = affine_codes(x[:, :, None], low[..., None, :], high[..., None, :], tops, "float16")
            codes = torch.where(chosen[..., None], codes[:, :, 0], codes[:, :, 1])
            parts |= {"scale": scale.flatten(2), "min": low.flatten(2)}
        else:
            norm = x.abs().amax(2).sqrt().clamp_min(torch.finfo(torch.float16).tiny).to(torch.float16)
            x = x / norm.float()[:, :, None]
            codes, scale, low = affine_codes(x, x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), top, "float16")
            parts |= {"scale": self._rows(scale), "min": self._rows(low), "norm": norm}
        where = chosen.nonzero()[:, -1].reshape(-1, heads, self.salient, 1).expand(-1, -1, -1, dim)
        return parts | {
            "codes": self._rows(codes & 3),
            "high": (codes >> 2).gather(2, where).flatten(2),
            "index": torch.where(chosen, chosen.cumsum(-1) - 1, self.salient).to(torch.uint8),
        }

    def decode(self, parts: Parts) -> Tensor:
        tokens, heads, dim = parts["codes"].shape
        codes = self._unrows(parts["codes"])
        high = parts["high"].unflatten(-1, (self.salient, dim))
        high = torch.cat(
            (high, torch.zeros_like(high[:, :, :1])), 2
        )  # an index past the salient tokens reads these zeros
        index = parts["index"].long().clamp_max(self.salient)[..., None]  # [groups, heads, tokens, 1]
        codes = codes | high.gather(2, index.expand(-1, -1, -1, dim)) << 2
        if self.axis == "channel":
            scale, low = (parts[name].float().unflatten(-1, (2, dim)) for name in ("scale", "min"))
            kind = (index == self.salient).long().expand(-1, -1, -1, dim)
            x = codes.float() * scale.gather(2, kind) + low.gather(2, kind)
        else:
            scale, low = (self._unrows(parts[name]).float() for name in ("scale", "min"))
            x = (codes.float() * scale + low) * parts["norm"].float()[:, :, None]
        return self._rows(x).reshape(tokens, heads, dim)

    def _rows(self, x: Tensor) -> Tensor:
        """[groups, heads, tokens, width] -> a row per token."""
        return x.transpose(1, 2).flatten(0, 1)

    def _unrows(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.group, *x.shape[1:]).transpose(1, 2)
