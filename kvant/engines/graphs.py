"""Decoding in steps that a CUDA graph replays.

A step of eager transformers is a few thousand launches, and kvant's own bookkeeping on the host. A `Decoder` takes pages for the
whole generation, keeps lengths, slots and block tables at fixed addresses on the device, captures one step of the model
(token -> layers -> logits) and replays it. `sample` is transformers' own loop over such steps, so logits processors, sampling,
stopping criteria and streamers work as they do with `model.generate`.

There is no silent fallback: what cannot be captured is refused with its reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol, Self, runtime_checkable

import torch
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvant.cache import StaticBatch, static
from kvant.engines.attention import Handle, flatten, unflatten
from kvant.engines.batch_state import BatchState
from kvant.engines.ownership import Ownership
from kvant.layouts import Layouts
from kvant.ops import Implementation
from kvant.ops.registry import Op
from kvant.ops.types import COUNTERS
from kvant.recipe import Recipe

Tensor = torch.Tensor
WARM_UP = 2  # steps without a graph: kernels are compiled, and libraries allocate their workspaces
DEVICE = "cuda"  # the type of device that has graphs


@runtime_checkable
class DecodableCache(Protocol):
    """What a Decoder asks of a `kvant.Cache`."""

    state: BatchState
    ownership: Ownership
    layouts: Layouts
    recipe: Recipe
    first_position: int
    as_decoded: bool
    on_attend: Callable[[int, Tensor, Tensor, Tensor, Tensor], None] | None

    def settle(self) -> None: ...

    def chosen(self, op: Op, device: torch.device) -> list[Implementation]: ...


def refuse(model: Any, cache: DecodableCache, graph: bool = True) -> str | None:
    """Why a cache cannot be decoded from in fixed steps, or with `graph` in a CUDA graph; None where it can."""
    if cache.as_decoded or cache.on_attend is not None:
        return "as_decoded or on_attend is set, which are done on the host"
    reason = next(filter(None, map(static.refuse, cache.layouts.distinct)), None)
    if reason is not None or not graph:
        return reason
    devices = {parameter.device for parameter in model.parameters()} | {
        group.paged.stores[0].pages.device for group in cache.state.groups
    }
    if len(devices) > 1 or next(iter(devices)).type != DEVICE:
        found = ", ".join(sorted(map(str, devices)))
        return f"model and cache must lie on one CUDA device, and they lie on {found}"
    for op in ("append", "decode"):
        kernel = next((each for each in cache.chosen(op, next(iter(devices))) if not each.capturable), None)
        if kernel is not None:
            return f"{op} of recipe {cache.recipe.name} is {kernel.name!r} here, which cannot be captured: it waits for the GPU"
    return None


class Replay:
    """A step that reads and writes fixed addresses alone: the first calls run eagerly, all others replay a CUDA graph.

    step      takes no arguments and returns a tensor, which is valid until the next call.
    counters  zeros that the calls of the decode kernel in the graph share; they live as long as the graph.
    name      of the step, for messages.
    """

    def __init__(
        self, step: Callable[[], Tensor], device: torch.device, name: str, counters: Tensor | None = None
    ) -> None:
        self.step, self.name, self.counters = step, name, counters
        self.stream = torch.cuda.Stream(device)
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.out: Tensor | None = None

    def __call__(self) -> Tensor:
        self.calls += 1
        if self.calls <= WARM_UP:
            here = torch.cuda.current_stream(self.stream.device)
            self.stream.wait_stream(here)
            with torch.cuda.stream(self.stream):
                self.out = self.step()
            here.wait_stream(self.stream)
        else:
            if self.graph is None:
                self.graph = self._capture()
            self.graph.replay()
        assert self.out is not None
        return self.out

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Captures the step; nothing is computed yet."""
        from kvant.ops.cuda.counters import sharing_counters

        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.stream.device)
        try:
            with contextlib.ExitStack() as stack:
                if self.counters is not None:
                    stack.enter_context(sharing_counters(self.counters))
                # thread_local: other threads may use the GPU meanwhile
                stack.enter_context(torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"))
                self.out = self.step()
        except Exception as error:
            raise RuntimeError(
                f"{self.name} cannot be captured in a CUDA graph ({type(error).__name__}: {error}): do without graph=True"
            ) from error
        finally:
            torch.cuda.set_stream(here)  # a capture that fails does not always do so
        return graph


class Decoder:
    """Decodes the batch that a cache holds: a call takes one token of every sequence and returns logits of the next.

    model, cache  the cache has been filled by this model. It belongs to the decoder until `close`.
    steps         pages for so many steps are taken at once; where there are not enough, PoolFull, and nothing has changed.
    graph         replay the step from a CUDA graph; without it the same step runs eagerly, on any device.

    `with cache.decoder(model, 100) as decode: logits = decode(tokens)`. Any other use of the cache closes it.
    """

    def __init__(self, model: Any, cache: DecodableCache, steps: int, *, graph: bool = True) -> None:
        with cache.ownership.claimed(keep=True, within=True):
            self._open(model, cache, steps, graph)

    def _open(self, model: Any, cache: DecodableCache, steps: int, graph: bool) -> None:
        cache.settle()
        state = cache.state
        if not state.groups or state.batch_size < 1:
            raise ValueError("the cache holds no sequences: let the model read a prompt first")
        reason = refuse(model, cache, graph)
        if reason is not None:
            raise ValueError(f"cannot decode in {'a CUDA graph' if graph else 'fixed steps'}: {reason}")
        self.model, self.cache, self.steps, self.graph = model, cache, steps, graph
        self.done = self._begun = 0  # steps; `_begun` counts the one under way, too
        self.closed = self._running = False
        device = state.groups[0].paged.stores[0].pages.device
        with torch.inference_mode(False):
            self._tokens = torch.zeros(state.batch_size, 1, dtype=torch.int64, device=device)
            self._positions = torch.zeros_like(self._tokens)
            heads = model.config.get_text_config(decoder=True).num_attention_heads
            counters = torch.zeros(state.batch_size * heads * COUNTERS, dtype=torch.int32, device=device)
        name = f"a step of this {model.config.model_type}"
        self._run: Callable[[], Tensor] = Replay(self._step, device, name, counters) if graph else self._step
        state.whole(self._take)

    def _take(self) -> None:
        """Takes pages for all steps, and the batch."""
        state = self.cache.state
        self.batches = [StaticBatch(group.paged, group.sequences, self.steps) for group in state.groups]
        self._places = [  # of every layer: its group's batch, its index in the group, its sliding window
            (self.batches[state.groups.index(group)], group.layers.index(layer), group.sliding_window)
            for layer, group in enumerate(state.group_of)
        ]
        for group in state.groups:
            group.step = None
        state.decoder = self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits [sequences, vocabulary] after one more token of every sequence; they are valid until the next call.

        positions  of the tokens. By default a token's position is the number of tokens before it, padding not counted.
        """
        if self.closed:
            raise ValueError(
                "this decoder is closed: close() was called, or the cache has been used for something else"
            )
        if self._begun != self.done:
            self.close()
            raise RuntimeError("the last step broke off: it has been taken back, and this decoder is closed")
        if self.done == self.steps:
            raise ValueError(f"pages were taken for {self.steps} steps, and all of them are done")
        self.cache.ownership.claim()
        if tokens.numel() != len(self._tokens):
            raise ValueError(f"expected one token for each of {len(self._tokens)} sequences, got {list(tokens.shape)}")
        self._tokens.copy_(tokens.reshape(-1, 1))
        if positions is None:
            self._positions.copy_(self.batches[0].batch.seq_lens[:, None] + self.cache.first_position)
        else:
            self._positions.copy_(positions.reshape(-1, 1))
        self._begun = self.done + 1
        try:
            with torch.no_grad():
                logits = self._run()
            for each in self.batches:
                each.check()
            self.done = self._begun
        except BaseException:
            self.close()
            raise
        return logits

    def _step(self) -> Tensor:
        """One step of the model, with inputs and outputs at fixed addresses."""
        for each in self.batches:
            each.advance()
        self._running = True
        try:
            out = self.model(
                input_ids=self._tokens, position_ids=self._positions, past_key_values=self.cache, use_cache=True
            )
        finally:
            self._running = False
        return out.logits[:, -1]

    def attend(
        self,
        handle: Handle,
        query: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """As `Cache.attend`, with one new token of every sequence."""
        if not self._running or query.shape[2] != 1:
            raise RuntimeError("this cache belongs to a decoder: close it before calling the model with the cache")
        if mask is not None and not torch.cuda.is_current_stream_capturing():
            # While a step is captured transformers makes a mask that it does not make otherwise. The steps before had none.
            raise ValueError("cannot serve this attention mask in fixed steps: every sequence attends to all of itself")
        batch, index, window = self._places[handle.layer]
        q, k, v = (flatten(x, None) for x in (query, handle.key, handle.value))
        batch.append(index, k, v, q)
        flat = batch.decode(index, q, scale=scale, softcap=softcap, sliding_window=window, sink_logits=sink_logits)
        return unflatten(flat, None, len(query), 1)

    def close(self) -> None:
        """Gives back pages that were not used, and the cache, which holds the tokens of all steps that were done."""
        if self.closed:
            return
        self.cache.ownership.claim()
        state = self.cache.state

        def close() -> None:
            state.journal.note(self, "closed")
            self.closed = True
            for each in self.batches:
                each.close(self.done, self._begun)
            state.decoded(self.done)

        try:
            state.whole(close)
        except Exception:  # it would fail again
            state.forget()
            raise
        self._run = self._step  # drops the graph


class _Stepping:
    """Stands in for the model in transformers' sampling loop: its calls, after the prompt, are steps of a decoder."""

    def __init__(self, model: Any, cache: DecodableCache, steps: int, graph: bool) -> None:
        self._model, self._cache, self._steps, self._graph = model, cache, steps, graph
        self._decoder: Decoder | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)  # so `_prefill`, which reads the prompt, is the model's own

    def __call__(self, input_ids: Tensor, position_ids: Tensor | None = None, **inputs: Any) -> Any:
        if self._decoder is None:
            self._decoder = Decoder(self._model, self._cache, self._steps, graph=self._graph)
        logits = self._decoder(input_ids, position_ids)
        return CausalLMOutputWithPast(logits=logits[:, None], past_key_values=self._cache)


def sample(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    *,
    capture: bool = True,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """For `model.generate(..., custom_generate=sample)`: transformers' loop for greedy search and sampling, in fixed steps."""
    cache = model_kwargs.get("past_key_values")
    if not isinstance(cache, DecodableCache):
        raise ValueError(f"generation in a CUDA graph needs a kvant.Cache, got {type(cache).__name__}")
    mode = generation_config.get_generation_mode(None)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"cannot generate in a CUDA graph: {mode.value} changes the batch between steps")
    if generation_config.output_attentions or generation_config.output_hidden_states:
        raise ValueError("cannot generate in a CUDA graph: it gives logits, no attentions and no hidden states")
    stepping = _Stepping(model, cache, max(1, generation_config.max_length - input_ids.shape[1]), capture)
    try:
        return type(model)._sample(
            stepping,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            streamer=streamer,
            **model_kwargs,
        )
    finally:
        cache.settle()
