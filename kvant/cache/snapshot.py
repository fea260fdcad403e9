"""Caches on disk: one safetensors file, written and read a few pages at a time.

    header     names, types and shapes of the tensors; the digests; the sequences and the prefix cache (JSON)
    tensors    of every layer: pages in use, each once; overlay rows ("window") and corrector states of the sequences; sinks of the
               prefix cache
    checksums  8 bytes for every page and every row of the other tensors
    seal       SHA-256 over the header and the checksums

The seal is checked before the header is used. Even then no more is allocated than the file holds, and every number is checked
against the layout. A seal is no signature: who writes a file can seal it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from kvant.cache.journal import Journal, whole
from kvant.cache.paged import PagedCache
from kvant.cache.state import Saved, Wrong, read_group, write_group
from kvant.cache.swap import restored_sequences
from kvant.files import check_replaceable, open_regular, replacing
from kvant.layouts import Layouts

Tensor = torch.Tensor
FORMAT = "kvant-snapshot-1"
HEADER_LIMIT = 100 << 20  # as safetensors has it
CHUNK = 16 << 20  # bytes that are read or written at a time
SUM = 8
TYPES = {
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}
NAMES = {dtype: name for name, dtype in TYPES.items()}


@dataclasses.dataclass(frozen=True)
class Field:
    """Type and shape of a tensor of the file. Each of its rows has a checksum."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.row_bytes

    @property
    def rows_at_once(self) -> int:
        return max(1, CHUNK // max(1, self.row_bytes))


def _fields(caches: Sequence[PagedCache], saved: Sequence[Saved]) -> dict[str, Field]:
    """The tensors of these caches by name, in the order of the file."""
    out: dict[str, Field] = {}
    for g, (cache, state) in enumerate(zip(caches, saved, strict=True)):
        for i, store in enumerate(cache.stores):
            out[f"{g}.{i}.pages"] = Field(torch.uint8, (state.pages, *store.pages.shape[1:]))
            for kind, rows in (("window", store.overlays), ("state", store.states)):
                for name, tensor in rows.items():
                    out[f"{g}.{i}.{name}.{kind}"] = Field(tensor.dtype, (len(state.sequences), *tensor.shape[1:]))
            for name, tensor in store.overlays.items():
                out[f"{g}.{i}.{name}.sinks"] = Field(tensor.dtype, (sum(state.sinks), *tensor.shape[2:]))
    return out


def _ending(fields: Mapping[str, Field]) -> dict[str, Field]:
    rows = sum(field.shape[0] for field in fields.values())
    return {"checksums": Field(torch.uint8, (rows, SUM)), "seal": Field(torch.uint8, (32,))}


def _sum(row: bytes | memoryview) -> bytes:
    return hashlib.blake2b(row, digest_size=SUM).digest()


# --- writing ----------------------------------------------------------------------------------------------------------


def save(path: str | os.PathLike[str], caches: Sequence[PagedCache], extra: dict[str, Any] | None = None) -> Path:
    """Writes caches to one file, whole or not at all; a file that was there stays until the new one is complete.

    `extra` is JSON that `Snapshot.extra` gives back.
    """
    target = Path(path)
    parent = target.resolve().parent
    check_replaceable(target, "snapshot")
    if not parent.is_dir():
        raise ValueError(f"snapshot {str(path)!r}: there is no directory {str(parent)!r}")
    with replacing(target) as temporary, ExitStack() as stack, open(temporary, "wb") as file:
        for cache in caches:
            stack.enter_context(cache.lock)
        _write(file, caches, extra or {})
    return target


def _write(file: BinaryIO, caches: Sequence[PagedCache], extra: dict[str, Any]) -> None:
    found = [write_group(cache) for cache in caches]
    saved = [state for state, _ in found]
    fields = _fields(caches, saved)
    header: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "digests": json.dumps([cache.digest for cache in caches]),
            "state": json.dumps([state.to_dict() for state in saved]),
            "extra": json.dumps(extra),
        }
    }
    at = 0
    for name, field in (fields | _ending(fields)).items():
        offsets = [at, at + field.nbytes]
        header[name] = {"dtype": NAMES[field.dtype], "shape": list(field.shape), "data_offsets": offsets}
        at += field.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise ValueError(f"the snapshot's header would take {len(text)} bytes, at most {HEADER_LIMIT} are allowed")
    text = len(text).to_bytes(8, "little") + text
    file.write(text)
    sums = bytearray()
    for cache, (state, pages) in zip(caches, found, strict=True):
        for rows in _rows(cache, state, pages):
            if not rows.numel():
                sums += _sum(b"") * len(rows)
                continue
            data = rows.contiguous().flatten().view(torch.uint8).numpy().data
            file.write(data)
            size = len(data) // len(rows)
            for first in range(0, len(data), size):
                sums += _sum(data[first : first + size])
    assert len(sums) == _ending(fields)["checksums"].nbytes
    file.write(sums)
    file.write(hashlib.sha256(text + sums).digest())


def _rows(cache: PagedCache, saved: Saved, pages: Sequence[int]) -> Iterator[Tensor]:
    """Rows of a cache's tensors in the order of `_fields`, a few at a time, copied to host memory."""
    overlay_rows = [seq.overlay_row for seq in cache.sequences]
    nodes = cache.prefix.nodes if cache.prefix is not None else []
    for i, store in enumerate(cache.stores):
        for tensor, chosen in [(store.pages, pages), *((each, overlay_rows) for each in store.owned)]:
            step = Field(tensor.dtype, tuple(tensor.shape)).rows_at_once
            for first in range(0, len(chosen), step):
                yield tensor[torch.tensor(chosen[first : first + step], device=tensor.device)].cpu()
        for name in store.overlays:
            yield from (node.sinks[i][name].cpu() for node, rows in zip(nodes, saved.sinks, strict=True) if rows)


# --- reading ----------------------------------------------------------------------------------------------------------


class Snapshot:
    """An open snapshot file. One whose seal is not that of its header and checksums is refused."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = str(path)
        try:
            self.file = open(open_regular(path), "rb")  # noqa: SIM115 (closed by __exit__)
        except OSError as error:
            raise ValueError(f"snapshot {self.path!r} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"snapshot {self.path!r} cannot be read: {error}") from error
        try:
            self._open()
        except BaseException:
            self.file.close()
            raise

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.file.close()

    def _damaged(self, what: str) -> ValueError:
        return ValueError(f"snapshot {self.path!r} is damaged: {what}")

    def _open(self) -> None:
        size = os.fstat(self.file.fileno()).st_size
        start = self.file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(HEADER_LIMIT, size - 8):
            raise self._damaged(f"a header of {length} bytes in a file of {size}")
        text = self.file.read(length)
        try:
            header = json.loads(text)
            metadata = header.pop("__metadata__")
            named = metadata["format"]
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise self._damaged(f"its header cannot be read: {type(error).__name__}: {error}") from error
        if named != FORMAT:
            raise ValueError(f"snapshot {self.path!r} cannot be read: expected the format {FORMAT}, got {named!r}")
        self.start = 8 + length
        self.fields = self._read_fields(header, size - self.start)
        ending = {name: self.fields.pop(name, None) for name in ("checksums", "seal")}
        if ending != _ending(self.fields):
            raise self._damaged("it should end with checksums and a seal")
        sums = ending["checksums"]
        assert sums is not None
        self.file.seek(size - 32 - sums.nbytes)
        self.sums = self.file.read(sums.nbytes)
        if hashlib.sha256(start + text + self.sums).digest() != self.file.read(32):
            raise self._damaged("its seal is not that of its header and checksums")
        try:
            self.digests, self.state, self.extra = (json.loads(metadata[key]) for key in ("digests", "state", "extra"))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise self._damaged(f"its header cannot be read: {type(error).__name__}: {error}") from error
        if not isinstance(self.digests, list) or not isinstance(self.state, list) or not isinstance(self.extra, dict):
            raise self._damaged("its header does not say what it should")

    def _read_fields(self, header: dict[str, Any], size: int) -> dict[str, Field]:
        """Types and shapes of the tensors in the order of their bytes. They leave no gap, and end where the file ends."""
        out: dict[str, Field] = {}
        at = 0
        for name, item in header.items():
            try:
                dtype, shape, offsets = TYPES[item["dtype"]], item["shape"], item["data_offsets"]
                right = 0 < len(shape) < 9 and all(type(n) is int and 0 <= n < 2**62 for n in shape)
                field = Field(dtype, tuple(shape))
                right = right and offsets == [at, at + field.nbytes]
            except (KeyError, TypeError, ValueError) as error:
                raise self._damaged(f"tensor {name!r:.80} is not described: {error!r:.80}") from error
            if not right:
                raise self._damaged(f"tensor {name!r:.80} is described as {item!r:.200}")
            out[name] = field
            at += field.nbytes
        if at != size:
            raise self._damaged(f"its tensors take {at} bytes, the file has {size} for them; it was cut or added to")
        return out

    def check(self, digests: Sequence[str]) -> None:
        """Refuses a snapshot of caches with other digests: their bytes mean something else."""
        if self.digests != list(digests):
            theirs, mine = (", ".join(f"{d!s:.16}..." for d in each) for each in (self.digests, digests))
            raise ValueError(
                f"snapshot {self.path!r} is of another cache: its digest is {theirs}, this cache's is {mine}; "
                "recipe, layout, artifact and model must be the same"
            )

    def check_room(self, caches: Sequence[Layouts], positions: int | None = None) -> None:
        """Refuses a header that names more than the file holds, before anything is allocated: the file has the bytes of every page
        and overlay row. `caches` has the layouts of the layers of each cache. Where there is no sequence, an overlay row is at
        most as long as the model's `positions`."""
        held = sum(field.nbytes for field in self.fields.values())
        needed, rows = 0, False
        for state, layouts in zip(self.state, caches, strict=False):
            for name, each in (("pages", layouts.page_bytes), ("sequences", layouts.overlay_bytes)):
                found = state.get(name) if isinstance(state, dict) else None
                number = len(found) if isinstance(found, list) else found if type(found) is int else 0
                needed += number * each
                rows = rows or (name == "sequences" and number > 0)
        recipe = caches[0].first.recipe
        longest = max(stream.window.sink + stream.window.ring for stream in recipe.streams.values())
        if needed > held or (not rows and positions is not None and longest > positions):
            raise self._damaged(f"recipe {recipe.name} would need {needed} bytes for what it names, it has {held}")

    def load(self, caches: Sequence[PagedCache]) -> None:
        """Fills empty caches: sequences in the order of the saved ones, and prefix caches where there are any."""
        self.check([cache.digest for cache in caches])
        if len(self.state) != len(caches):
            raise self._damaged(f"it describes {len(self.state)} caches, not {len(caches)}")
        limit = sum(field.nbytes for field in self.fields.values())
        try:
            saved = [
                read_group(data, cache, limit // cache.layouts.page_bytes)
                for data, cache in zip(self.state, caches, strict=True)
            ]
        except Wrong as error:
            raise self._damaged(str(error)) from error
        expected = _fields(caches, saved)
        if self.fields != expected or list(self.fields) != list(expected):
            raise self._damaged("its tensors are not those of the sequences that it describes")
        for cache, state in zip(caches, saved, strict=True):
            assert not cache.sequences and not cache.pool.used, "a snapshot is loaded into an empty cache"
            cache.reserve(state.pages, len(state.sequences))

        rows = self._read_rows()

        def fill(journal: Journal) -> None:
            for cache, state in zip(caches, saved, strict=True):
                self._fill(cache, state, rows)

        whole(caches, fill)

    def _fill(self, cache: PagedCache, saved: Saved, rows: Iterator[Tensor]) -> None:
        pages = cache.pool.take(saved.pages)
        for page, count in zip(pages, saved.references, strict=True):
            cache.pool.share([page] * (count - 1))
        sequences = restored_sequences(cache, saved.sequences, pages, share=False)
        nodes = [dataclasses.replace(node, page=pages[node.page]) for node in saved.nodes or ()]
        for store in cache.stores:
            for tensor, chosen in [
                (store.pages, pages),
                *((each, [seq.overlay_row for seq in sequences]) for each in store.owned),
            ]:
                done = 0
                while done < len(chosen):
                    part = next(rows)
                    ids = torch.tensor(chosen[done : done + len(part)], device=tensor.device)
                    tensor[ids] = part.to(tensor.device)
                    done += len(part)
            kept = {}
            for name, tensor in store.overlays.items():
                parts: list[Tensor] = []
                while sum(map(len, parts)) < sum(saved.sinks):
                    parts.append(next(rows))
                whole = torch.cat(parts) if parts else tensor.new_empty(0, *tensor.shape[2:])
                kept[name] = whole.to(tensor.device).split(saved.sinks) if saved.sinks else ()
            for i, (node, count) in enumerate(zip(nodes, saved.sinks, strict=True)):
                if count:
                    node.sinks = [*node.sinks, {name: each[i].clone() for name, each in kept.items()}]
        if cache.prefix is not None:
            cache.prefix.restore(nodes)
        else:
            cache.pool.release([node.page for node in nodes])

    def _read_rows(self) -> Iterator[Tensor]:
        """Rows of all tensors in order, a few at a time, each checked against its checksum."""
        self.file.seek(self.start)
        number = 0
        for name, field in self.fields.items():
            for first in range(0, field.shape[0], field.rows_at_once):
                count = min(field.rows_at_once, field.shape[0] - first)
                data = bytearray(self.file.read(count * field.row_bytes))
                for i in range(count):
                    row = memoryview(data)[i * field.row_bytes : (i + 1) * field.row_bytes]
                    if _sum(row) != self.sums[SUM * number : SUM * (number + 1)]:
                        raise self._damaged(f"row {first + i} of {name} is not what was written")
                    number += 1
                flat = torch.frombuffer(data, dtype=field.dtype) if data else torch.empty(0, dtype=field.dtype)
                yield flat.view(count, *field.shape[1:])
