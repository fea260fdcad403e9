"""Watches kvant's backend inside a vLLM engine, and compares all it did with a plain run over the same keys and values.

An engine is given `worker_extension_cls="tests.engines.vllm.recorder.Recorder"`; its workers then record every call of every
attention layer (`record`), and replay them (`compare`): what was written to the pages is what a cache of one sequence,
appended to in one go by the same kernels, holds; and what attention gave is what it gives there.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch

from kvant.engines.vllm.backend import KvantImpl
from kvant.engines.vllm.builder import KvantBuilder
from kvant.layout import StreamName
from kvant.ops import LayerStore, PagedBatch
from tests.conftest import relative_error
from tests.engines.vllm import offloading

Tensor = torch.Tensor
TOLERANCE = 1e-4  # of outputs in float32
LIMIT_16_BITS = 5e-3  # of the relative error of outputs in 16 bits
# Share of numbers in pages, at most, that kernels of few and of many tokens round to another one, on a GPU. Tests of the
# kernels allow 1e-4 of the bytes of pages of which more than half are empty.
DIFFERING = 3e-4
NAMES: tuple[StreamName, StreamName] = ("key", "value")
SEEN = (
    "steps",
    "decodes",
    "verified",  # those of several tokens: drafts, or the last tokens of a prompt
    "fresh",  # prefills without history
    "prefills",  # those with one
    "shared at once",  # sequences that read what another one wrote in the same step
    "taken back",  # sequences whose last tokens were not accepted
    "pages",  # sequences whose pages were compared
    "short of sinks",  # sequences whose sinks were read from their pages
    "behind a prefix",  # sequences of whose recent window a part was read from pages
    "overwritten",  # blocks that were used a second time
    "loaded",  # blocks that a connector filled
    "given back",  # sequences some of whose pages a sliding window has left
)


@dataclasses.dataclass
class Call:
    """One layer's forward pass over one step."""

    table: Tensor
    seq_lens: list[int]
    query_start_loc: list[int]
    ring_start: list[int]
    sinks: list[int]
    decodes: int  # the first sequences, that were decodes
    tensors: dict[str, Tensor]  # query, key, value, out: [tokens, heads, head_dim]
    pages: Tensor | None  # [sequences, pages, heads, bytes] after the step, where other layers may write to them later


class Transfer(NamedTuple):
    """A block that a connector moved between two steps."""

    at: int  # steps before it
    loads: bool  # or stores
    chunk: int  # number in CPU memory
    tokens: range  # slots of the block


class Recorder:
    """Methods that vLLM adds to its workers."""

    model_runner: Any

    def record(self) -> int:
        """Begins to record; returns how many layers there are."""
        self.calls: dict[int, list[Call]] = {}
        self.transfers: list[Transfer] = []
        offloading.told = lambda *moved: self.transfers.append(Transfer(len(self.calls[0]), *moved))
        layers = self._impls()
        for index, impl in layers.items():
            several = len(self.model_runner.kv_cache_config.kv_cache_groups) > 1
            impl.forward = functools.partial(_forward, impl, self.calls.setdefault(index, []), several)
        return len(layers)

    def compare(self) -> dict[str, int]:
        """Compares everything that was recorded; returns how much of what there was."""
        seen, failures = dict.fromkeys(SEEN, 0), []
        for index, impl in self._impls().items():
            try:
                assert self.calls[index], "it was never called"
                _compare(impl, self.calls[index], seen, self.transfers)
            except AssertionError as error:
                failures.append(f"[recipe {impl.layers.layout.recipe.name}] layer {index}: {error}")
        assert not failures, "\n".join(failures)
        return seen

    def follow(self) -> int:
        """Begins to note the tables of every step's sequences, also of steps that replay a CUDA graph: vLLM builds
        metadata before it. Returns how many layers there are."""
        self.tables: dict[str, tuple[Tensor, list[int]]] = {}  # of the last step with tokens, by layer
        for group in (group for groups in self.model_runner.attn_groups for group in groups):
            builder = group.get_metadata_builder(0)
            if isinstance(builder, KvantBuilder):
                builder.build = functools.partial(_build, builder, self.tables)
        return len(self._impls())

    def last_pages(self) -> dict[int, list[dict[str, Tensor]]]:
        """What the pages of the sequences of the last step hold, by the length of the sequence: of every layer, by
        stream and part."""
        found: dict[int, list[dict[str, Tensor]]] = {}
        for name, impl in self._named().items():
            table, lengths = self.tables[name]
            store: LayerStore = impl.layers.stores[impl.place]
            for row, n in zip(table, lengths, strict=True):
                if n:
                    found.setdefault(n, []).append(_unpacked(store, row[: -(-n // store.layout.page_tokens)], n))
        return found

    def page_bytes(self) -> list[tuple[int, int]]:
        """Bytes of a page of every layer, as vLLM gave them and as the layout predicts."""
        layers = [layer for layer in self._context().values() if isinstance(getattr(layer, "impl", None), KvantImpl)]
        found = []
        for layer in layers:
            layout, block = layer.impl.layers.layout, layer.kv_cache[0]  # [heads, tokens, bytes]
            found.append((block.nbytes * layout.page_tokens // block.shape[1], layout.page_bytes))
        return found

    def window_bytes(self) -> int:
        """Bytes of the overlays and sink rows of all layers."""
        groups = {id(impl.layers): impl.layers for impl in self._impls().values()}
        return sum(x.nbytes for group in groups.values() for x in (*group.overlays.values(), *group.sinks.values()))

    def _impls(self) -> dict[int, Any]:
        return dict(enumerate(self._named().values()))

    def _named(self) -> dict[str, Any]:
        """Not the layers of a draft model with an attention of vLLM's own, nor those without attention."""
        context = self._context().items()
        return {name: layer.impl for name, layer in context if isinstance(getattr(layer, "impl", None), KvantImpl)}

    def _context(self) -> dict[str, Any]:
        return self.model_runner.vllm_config.compilation_config.static_forward_context  # type: ignore[no-any-return]


def _build(builder: Any, tables: dict[str, tuple[Tensor, list[int]]], *args: Any, **rest: Any) -> Any:
    step = type(builder).build(builder, *args, **rest)
    lengths = step.batch.seq_lens.tolist()
    if any(lengths):
        for layer in builder.layers.names:
            tables[layer] = step.batch.block_table.clone(), lengths
    return step


def _unpacked(store: LayerStore, pages: Tensor, n: int) -> dict[str, Tensor]:
    """Numbers of the pages of a sequence, on the host: of its n tokens, or of their whole groups."""
    out = {}
    for name in NAMES:
        stream = store.layout.recipe.streams[name]
        end = stream.window.packed_end(n) if stream.groupwise else n
        for part, codes in store.layout.unpack(name, store.pages[pages]).items():
            out[f"{name} {part}"] = codes[: end * len(codes) // (len(pages) * store.layout.page_tokens)].cpu()
    return out


def _forward(
    impl: Any,
    calls: list[Call],
    several: bool,
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    attn_metadata: Any,
    output: Tensor,
    **rest: Any,
) -> Tensor:
    step = attn_metadata
    out = type(impl).forward(impl, layer, query, key, value, kv_cache, step, output, **rest)
    if step is not None:
        b, n = step.batch, step.tokens
        tensors = {"query": query, "key": key, "value": value, "out": output}
        lengths, size = b.seq_lens.tolist(), impl.layers.layout.page_tokens
        table = b.block_table[:, : -(-max(lengths) // size)].clone()  # on a GPU it has room for the longest sequence
        for row, length in zip(table, lengths, strict=True):
            row[-(-length // size) :] = 0  # vLLM's first page, which is nobody's
        every = 1 if table.is_cuda else 5 if several else 0
        stored = impl.layers.stores[impl.place].pages[table] if every and len(calls) % every == 0 else None
        calls.append(
            Call(
                table,
                lengths,
                b.query_start_loc.tolist(),
                b.ring_start["key"].tolist(),
                b.sinks.tolist(),
                step.decodes,
                {name: x[:n].clone() for name, x in tensors.items()},
                stored,
            )
        )
    return out


def _compare(impl: Any, calls: list[Call], seen: dict[str, int], transfers: list[Transfer]) -> None:
    store: LayerStore = impl.layers.stores[impl.place]
    layout = store.layout
    size = layout.page_tokens
    blocks, where = len(store.pages), store.pages.device
    # what every slot was last given, in full precision; and the step that gave it
    heads = {"key": layout.heads, "value": layout.heads, "query": impl.num_heads}
    shadow = {
        name: torch.full((blocks * size, count, layout.head_dim), float("nan"), device=where)
        for name, count in heads.items()
    }
    written = torch.full((blocks * size,), -1)
    append = functools.partial(_append, impl.layers.ops["append"].run)
    decode, prefill = (impl.layers.ops[op].run for op in ("decode", "prefill"))
    window = impl.sliding_window
    options = {"scale": impl.scale, "softcap": impl.softcap, "sliding_window": window, "sink_logits": impl.sink_logits}
    sink = layout.recipe.key.window.sink
    previous: dict[tuple[int, ...], int] = {}
    offloaded: dict[int, dict[str, Tensor]] = {}
    begun: set[int] = set()
    differ: list[tuple[int, int]] = []  # numbers in pages that were compared, and those of them that differ
    for number, call in enumerate(calls):
        seen["steps"] += 1
        for moved in (each for each in transfers if each.at == number):
            slots = slice(moved.tokens.start, moved.tokens.stop)
            if not moved.loads:
                offloaded[moved.chunk] = {name: x[slots].clone() for name, x in shadow.items()}
                continue
            for name, x in offloaded[moved.chunk].items():
                shadow[name][slots] = x
            written[slots] = number - 1
            seen["loaded"] += 1
        batch = list(
            zip(call.table.tolist(), call.seq_lens, call.query_start_loc, call.query_start_loc[1:], strict=False)
        )
        for pages, n, first, last in batch:  # everything is written before anything is read
            slots = _slots(pages, n - (last - first), n, size)
            for name in heads:
                shadow[name][slots] = call.tensors[name][first:last].float()
            written[slots] = number
            starts = {slot // size for slot in slots.tolist() if slot % size == 0}
            seen["overwritten"] += len(starts & begun)
            begun |= starts
        for b, (pages, n, first, last) in enumerate(batch):
            count = last - first
            if not count:
                continue
            before = n - count
            all_slots = _slots(pages, 0, n, size)
            # What is in pages that the sliding window has left is read by nobody: the plain run has zeros there.
            gone = torch.tensor(pages).repeat_interleave(size)[:n] < 0
            low = 0 if window is None else max(0, before + 1 - window)
            assert not gone[low:].any(), "a sequence has no page for a token that it attends to"
            seen["given back"] += bool(gone.any())
            absent = gone[:, None, None].to(where)
            given_dtype = call.tensors["key"].dtype
            tokens = tuple(shadow[name][all_slots].masked_fill(absent, 0).to(given_dtype) for name in (*NAMES, "query"))
            k, given = tokens[0], written[all_slots]
            assert not k.isnan().any(), "a sequence has a token that nobody wrote"
            plain = _plain(store, n)
            # On a GPU a code may be the next one where a number lies halfway: attention is compared over the same bytes.
            taken = call.pages[b][: len(plain.pages)] if call.pages is not None and call.pages.is_cuda else None
            q, out = (call.tensors[name][first:last] for name in ("query", "out"))
            rows = {
                "overlay_rows": torch.zeros(1, dtype=torch.int64, device=where),
                "sinks": torch.tensor([call.sinks[b]], device=where),
            }
            exact: dict[StreamName, Tensor] = dict.fromkeys(NAMES, torch.tensor([call.ring_start[b]], device=where))
            if b < call.decodes:  # token by token, as without speculation
                each = []
                for i in range(count):
                    end = before + i + 1
                    append(plain, tokens, given, end - 1 if i else 0, end)
                    if taken is not None:
                        plain.pages.copy_(taken)
                    one = _batch(end, 1, size, where)._replace(**rows, ring_start=exact)
                    each.append(decode(plain, q[i : i + 1], one, **options))
                expected = torch.cat(each)
                seen["decodes"] += 1
                seen["verified"] += count > 1
            else:
                if before:
                    append(plain, tokens, given, 0, before)
                    if taken is not None:
                        plain.pages.copy_(taken)
                args = call.tensors["key"][first:last], call.tensors["value"][first:last]
                batch_of_one = _batch(n, count, size, where)._replace(**rows, ring_start=exact)
                expected = prefill(plain, q, *args, batch_of_one, **options)
                seen["prefills" if before else "fresh"] += 1
                append(plain, tokens, given, before, n)
            _same_outputs(out, expected, n)
            if layout.overlay_tokens("key"):
                seen["short of sinks"] += call.sinks[b] < min(n, sink) and low < sink
                seen["behind a prefix"] += call.ring_start[b] > 0
            table = tuple(pages[: -(-n // size)])
            for older in {table, table[: -(-before // size)]}:
                seen["taken back"] += bool(before and previous.get(older, 0) > before)
            previous[table] = n
            seen["shared at once"] += bool(before and (written[all_slots[:before]] == number).any())
            if taken is not None:
                if number == len(calls) - 1 or number % 7 == 0:
                    seen["pages"] += 1
                    own = _plain(store, n)
                    append(own, tokens, given, 0, n)
                    differ.append(_differing(store, own, taken, pages, n))
            elif call.pages is not None:
                seen["pages"] += 1
                differ.append(_differing(store, plain, call.pages[b], pages, n))
            elif calls[0].pages is None and (number == len(calls) - 1 or number % 7 == 0):
                seen["pages"] += 1
                later = {page for call in calls[number + 1 :] for page in call.table.flatten().tolist()}
                loaded = [moved for moved in transfers if moved.loads and moved.at > number]
                later |= {slot // size for moved in loaded for slot in moved.tokens}
                still = [-1 if page in later else page for page in pages]
                differ.append(_differing(store, plain, store.pages[pages], still, n))
    total, wrong = (sum(each) for each in zip(*differ, strict=True)) if differ else (0, 0)
    assert wrong <= total * (0 if where.type == "cpu" else DIFFERING), f"{wrong} of {total} numbers in pages differ"


def _same_outputs(out: Tensor, expected: Tensor, n: int) -> None:
    if out.dtype == torch.float32:
        torch.testing.assert_close(out, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m: f"at {n}: {m}")
        return
    error = relative_error(out, expected)
    assert error < LIMIT_16_BITS, f"at {n}: the relative error of outputs is {error:.2e}"


def _differing(store: LayerStore, plain: LayerStore, found: Tensor, pages: list[int], n: int) -> tuple[int, int]:
    """Compares the pages of a sequence, [pages, heads, bytes], with those of the plain run; those with number -1 are
    left out. How many numbers were compared, and how many of them differ. On a CPU none may."""
    size = store.layout.page_tokens
    table, compared, wrong = pages[: -(-n // size)], 0, 0
    for name in NAMES:
        mine = store.layout.unpack(name, found[: len(table)])
        theirs = store.layout.unpack(name, plain.pages[: len(table)])
        stream = store.layout.recipe.streams[name]
        end = stream.window.packed_end(n) if stream.groupwise else n  # of an unfinished group nothing is in a page
        for part, codes in mine.items():
            rows = len(codes) // len(table)  # of a page: tokens, or groups of them
            for place, page in enumerate(table):
                at = slice(place * rows, min(end * rows // size, (place + 1) * rows))
                if page >= 0:
                    differ = int((codes[at] != theirs[part][at]).sum())
                    assert not differ or codes.is_cuda, f"{name} {part} of page {page} differ"
                    compared, wrong = compared + codes[at].numel(), wrong + differ
    return compared, wrong


def _slots(pages: list[int], first: int, last: int, size: int) -> Tensor:
    at = torch.arange(first, last)
    return torch.tensor(pages)[at // size] * size + at % size


def _plain(store: LayerStore, n: int) -> LayerStore:
    """A store for one sequence, bound to the same tensors; memory that nothing has written is poisoned."""
    pages = -(-n // store.layout.page_tokens)
    overlays = {name: overlay[:1].clone().fill_(float("nan")) for name, overlay in store.overlays.items()}
    runs = torch.full((pages, *store.pages.shape[1:]), 0xFF, dtype=torch.uint8, device=store.pages.device)
    states = {name: state[:1].clone().fill_(float("nan")) for name, state in store.states.items()}
    derived = (
        store.derived if runs.is_cuda else {}
    )  # matrices, made in many launches; on a CPU also what knows its pages
    return dataclasses.replace(store, pages=runs, overlays=overlays, states=states, derived=derived)


def _append(
    run: Any, plain: LayerStore, tokens: tuple[Tensor, Tensor, Tensor], given: Tensor, first: int, last: int
) -> None:
    """Appends tokens [first, last) of a sequence in one go; `given` has the step that wrote each. What is fitted on the request is
    fitted on the tokens of the steps up to the one that completes the first group, so these come as they came."""
    size, recipe = plain.layout.page_tokens, plain.layout.recipe
    ends = [last]
    if recipe.not_prefix_safe is not None:
        new = (given[first : last - 1] != given[first + 1 : last]).nonzero()[:, 0] + first + 1
        before = [end for end in new.tolist() if end < recipe.key.codec.group_tokens]
        ends = [*before, *[end for end in new.tolist() if end >= recipe.key.codec.group_tokens][:1], last]
    for start, end in zip([first, *ends], ends, strict=False):
        if start < end:
            k, v, q = (x[start:end] for x in tokens)
            batch = _batch(end, end - start, size, plain.pages.device)
            run(plain, k, v, batch, **({"query": q} if recipe.wants_queries else {}))


def _batch(n: int, count: int, size: int, device: torch.device) -> PagedBatch:
    """One sequence of n tokens, the last `count` of them new, in pages 0, 1, 2, ..."""

    def column(value: int) -> Tensor:
        return torch.tensor([value], device=device)

    slots = torch.arange(n - count, n, device=device)
    exact: dict[StreamName, Tensor] = dict.fromkeys(NAMES, column(0))
    table = torch.arange(-(-n // size), device=device)[None]
    return PagedBatch(table, column(n), slots, torch.tensor([0, count], device=device), column(0), column(n), exact)
