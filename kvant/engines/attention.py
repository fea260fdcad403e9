"""The attention function "kvant" of transformers, its mask, and the interface of the caches that it asks.

A cache's `update` returns a `Handle` in place of keys and values. transformers passes it on to the attention function, which
asks the cache behind the handle to attend. Anything that is not a handle goes through torch's SDPA, as without kvant.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

Tensor = torch.Tensor
ATTENTION = "kvant"
SCORES = 1 << 26  # attention scores that eager_attention holds at a time


class AttendingCache(Protocol):
    """A cache that attends by itself: what the attention function and the layers of the cache ask of it."""

    @property
    def batch_size(self) -> int: ...

    @property
    def fixed_steps(self) -> int | None:
        """Steps that a decoder of fixed steps has done and will report when it is closed. None where there is no decoder: each
        layer then counts its own columns."""

    def attend(
        self,
        handle: Handle,
        query: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Stores the handle's keys and values and attends to all that the cache holds:
        query [batch, heads, columns, head_dim] -> [batch, columns, heads, head_dim]. `sink_logits` [heads] are the model's own
        attention sinks."""

    def abort(self) -> None:
        """Takes back the forward pass under way: the attention function refused one of its calls."""

    def cut_gradients(self) -> None:
        """Called where the caller asked for gradients. They end here: query, key and value have been detached."""


class Handle:
    """The new keys and values of one layer, and the cache that will store them: [batch, heads, columns, head_dim] each."""

    def __init__(self, cache: AttendingCache, layer: int, key: Tensor, value: Tensor) -> None:
        self.cache, self.layer, self.key, self.value = cache, layer, key, value

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"packed keys and values have no {name!r}: they are read by the attention implementation {ATTENTION!r} alone. "
            "Either the cache was made for another model, or this model's attention implementation was changed after the cache "
            "was made, or the model reads its cache outside of its attention function and cannot be served"
        )


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function "kvant": a cache behind a handle, or plain keys and values through SDPA. s_aux is transformers' name of
    the model's own attention sinks, one logit a query head."""
    if not isinstance(key, Handle):
        _check_sinks(module, s_aux)
        if s_aux is not None or softcap is not None:
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            return eager_attention(query, key, value, attention_mask, scale, s_aux, softcap, dropout), None
        if query.device.type == "cpu" and attention_mask is not None and kwargs.get("position_bias") is None:
            return _grouped_sdpa(query, key, value, attention_mask, dropout, scaling), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    try:
        if kwargs.get("position_bias") is not None:
            raise ValueError("cannot serve this model: its attention takes position_bias")
        _check_sinks(module, s_aux)
        if dropout or is_causal is False or getattr(module, "is_causal", True) is False:
            raise ValueError("cannot serve this call: a packed cache is for causal attention without dropout")
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key.key, key.value)):
            query = _detach(module, query, key)
    except BaseException:
        key.cache.abort()
        raise
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sink_logits = None if s_aux is None else s_aux.detach()
    return key.cache.attend(key, query, attention_mask, scale, softcap, sink_logits), None


def _check_sinks(module: torch.nn.Module, s_aux: Tensor | None) -> None:
    """Refuses an attention layer whose sinks would be left out of the softmax."""
    if s_aux is None and _has(module, "sinks") and isinstance(module.sinks, Tensor):
        raise ValueError(
            f"cannot serve this model: {type(module).__name__} has attention sinks and does not pass them on as s_aux"
        )


def _has(module: torch.nn.Module, name: str) -> bool:
    """As hasattr, but not for submodules. Where a module has no such attribute, torch would format a message, which takes longer."""
    return (
        name in module.__dict__ or name in module._parameters or name in module._buffers or hasattr(type(module), name)
    )


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    sink_logits: Tensor | None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention with what SDPA lacks, a logit per query head in the softmax's denominator and a soft cap of the scores:
    query [batch, heads, columns, head_dim], key and value [batch, KV heads, tokens, head_dim] -> [batch, columns, heads, head_dim].
    Scores of a block of queries are held at a time, in float32. mask: bool or to be added, [batch, 1 or heads, columns, tokens];
    None is causal."""
    columns, tokens, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(group, 1) for x in (key, value))
    if mask is None:
        mask = torch.ones(columns, tokens, dtype=torch.bool, device=query.device).tril(tokens - columns)
        mask = mask[None, None]
    out = []
    for rows in torch.arange(columns, device=query.device).split(
        max(1, SCORES // (query.shape[0] * query.shape[1] * tokens))
    ):
        scores = query[:, :, rows].float() @ key.mT * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        here = mask[:, :, rows, :tokens]
        scores = scores.masked_fill(~here, float("-inf")) if here.dtype == torch.bool else scores + here
        weights = torch.nn.functional.dropout(scores.softmax(-1).nan_to_num(0.0), dropout)
        part = weights @ value
        if sink_logits is not None:
            part = part * torch.sigmoid(scores.logsumexp(-1) - sink_logits.float()[:, None])[..., None]
        out.append(part)
    return torch.cat(out, 2).transpose(1, 2).to(query.dtype)


def _grouped_sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, scaling: float | None
) -> Tensor:
    """What transformers' SDPA computes, to the bit on a CPU. Where there is a mask it repeats keys and values for every query head,
    which only GPUs need: on a CPU that takes most of the time of a decode step's attention."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).contiguous()


def _detach(module: torch.nn.Module, query: Tensor, handle: Handle) -> Tensor:
    """Detaches query, key and value. Codes have no gradients, so those of the rest of a model would be wrong: a model in training
    mode is refused. In other modes a script may ask for gradients only because parameters require them by default."""
    if module.training:
        raise ValueError(
            "cannot serve this call: gradients do not flow through packed keys and values, and the model is in training "
            "mode; call it under torch.no_grad(), or after model.eval(), or train without a kvant.Cache"
        )
    handle.cache.cut_gradients()
    handle.key, handle.value = handle.key.detach(), handle.value.detach()
    return query.detach()


def attention_mask(batch_size: int, *args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of the attention function "kvant": that of SDPA."""
    if not batch_size:
        raise ValueError("the model was called with no sequences: input_ids must have at least one row")
    return sdpa_mask(batch_size, *args, **kwargs)  # type: ignore[no-any-return]


def padding_of(
    mask: Tensor | None, columns: int, before: int, past: Tensor | None, sliding_window: int | None
) -> Tensor | None:
    """Padding mask of the new columns: bool [batch, columns], True where a column is a token; None where all are.

    mask    attention mask of SDPA: bool [batch, 1, columns, before + columns]. One that is not causal apart from padding is refused.
    before  columns before the new ones; `past` is their padding mask, None where none of them is padding.
    """
    if mask is None:
        return None
    total = before + columns
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[-2:] != (columns, total):
        raise ValueError(
            f"expected a 2-D padding mask; got a {mask.ndim}-D {mask.dtype} mask of shape {tuple(mask.shape)} "
            f"for {columns} new of {total} columns"
        )
    # Every token attends to itself, so the diagonal of the new columns is their padding mask.
    new = mask[:, 0, :, before:].diagonal(dim1=1, dim2=2)
    old = mask.new_ones(len(mask), before) if past is None else past.to(mask.device)
    key_at = torch.arange(total, device=mask.device)
    query_at = key_at[before:, None]
    expected = (key_at <= query_at) & torch.cat((old, new), 1)[:, None, None, :]
    if sliding_window is not None:
        expected = expected & (key_at > query_at - sliding_window)
    if not torch.equal(expected.expand_as(mask), mask):
        raise ValueError("cannot serve this attention mask: only causal attention with padded columns is supported")
    return None if bool(new.all()) else new


def flatten(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """[batch, heads, columns, head_dim] -> [tokens, heads, head_dim], without padding."""
    x = x.transpose(1, 2)
    return x.reshape(-1, *x.shape[2:]) if padding_mask is None else x[padding_mask]


def unflatten(x: Tensor, padding_mask: Tensor | None, batch: int, columns: int) -> Tensor:
    """[tokens, heads, head_dim] -> [batch, columns, heads, head_dim], zero where padding was."""
    if padding_mask is None:
        return x.reshape(batch, columns, *x.shape[1:])
    out = x.new_zeros(batch, columns, *x.shape[1:])
    out[padding_mask] = x
    return out


AttentionInterface.register(ATTENTION, attention_forward)
AttentionMaskInterface.register(ATTENTION, attention_mask)
