"""Damaged and hostile files: every one is refused with an error, or reads back equal. None crashes, hangs, or takes memory
that the file does not account for.

1,000 files, half of them snapshots, half artifacts, and some more through `kvant.Cache.load`; 10,000 with `--all`; `--mutations N` for
another number.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from kvant.artifact import Artifact
from kvant.cache import PagedCache, PrefixCache, Snapshot, save
from tests.cache.test_machine import append, look
from tests.engines.test_hf import make_model, prompt
from tests.families import make
from tests.test_artifact import made_up

RECIPES = [
    "int4:sink=3,recent=5",
    "saw-int4",
    "kitty:k.group=16,k.flush=16,v.recent=5,sink=9",
    "zipcache:group=16,flush=16",
]


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """Nothing here takes minutes; if it did, it would hang."""
    signal.alarm(1200)
    yield
    signal.alarm(0)


def parse(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def build(header: dict[str, Any] | bytes, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def resealed(header: dict[str, Any], body: bytes) -> bytes:
    """A snapshot whose seal is right for whatever its header says: what a forger would write."""
    data = build(header, b"")
    sums = body[-32 - (header["checksums"]["data_offsets"][1] - header["checksums"]["data_offsets"][0]) : -32]
    return data + body[:-32] + hashlib.sha256(data + sums).digest()


# --- ways to damage a file --------------------------------------------------------------------------------------------


def flip(data: bytes, chance: random.Random) -> bytes:
    out = bytearray(data)
    end = chance.choice([16, 2000, len(out)])  # headers are short, and deserve their share
    for _ in range(chance.choice([1, 1, 1, 2, 7])):
        out[chance.randrange(min(end, len(out)))] ^= 1 << chance.randrange(8)
    return bytes(out)


def truncate(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.choice([chance.randrange(len(data)), len(data) - chance.randint(1, 40), chance.randrange(16)])]


def extend(data: bytes, chance: random.Random) -> bytes:
    at = chance.choice([len(data), chance.randrange(len(data))])
    return data[:at] + chance.randbytes(chance.choice([1, 8, 32, 1000])) + data[at:]


def swap_tensors(data: bytes, chance: random.Random) -> bytes:
    """Two tensors change places: their descriptions, or their bytes."""
    header, body = parse(data)
    names = [name for name in header if name != "__metadata__"]
    one, two = chance.sample(names, 2)
    if chance.random() < 0.5:
        header[one], header[two] = header[two], header[one]
    else:
        (a, b), (c, d) = sorted((header[one]["data_offsets"], header[two]["data_offsets"]))
        body = body[:a] + body[c:d] + body[b:c] + body[a:b] + body[d:]
    return build(header, body)


def wrong_shape(data: bytes, chance: random.Random) -> bytes:
    header, body = parse(data)
    entry = header[chance.choice([name for name in header if name != "__metadata__"])]
    what = chance.choice(["shape", "dtype", "offsets", "drop"])
    if what == "shape":
        entry["shape"] = chance.choice(
            [entry["shape"][::-1], [*entry["shape"], 1], [2**40], [0], [-1], ["x"], None, [2**61, 2**61], [1.5], {}]
        )
    elif what == "dtype":
        entry["dtype"] = chance.choice(["F32", "U8", "BF16", "I64", "F64", "", None, "BOOL", 7])
    elif what == "offsets":
        entry["data_offsets"] = chance.choice([[0, 0], [0, 2**62], [-8, 8], [5], None, "ab", [1, 0], [0.0, 8.0]])
    else:
        del entry[chance.choice(list(entry))]
    return build(header, body)


def hostile_header(data: bytes, chance: random.Random) -> bytes:
    header, body = parse(data)
    texts: list[bytes] = [
        b"[" * 100_000,
        b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe" * 50,
        b"9" * 10_000,
        b'{"__metadata__": {"format": "kvant-snapshot-1"}}',
        b'{"__metadata__": 3}',
        json.dumps({**header, "__metadata__": {}}).encode(),
        json.dumps({k: v for k, v in header.items() if k != "__metadata__"}).encode(),
        json.dumps(dict(reversed(header.items()))).encode(),
        json.dumps({**header, "more": {"dtype": "U8", "shape": [2**62], "data_offsets": [0, 2**62]}}).encode(),
    ]
    if chance.random() < 0.4:
        length = chance.choice([0, 1, 2**63, 2**64 - 1, 2**40, len(data), len(data) - 8, chance.randrange(2**20)])
        return length.to_bytes(8, "little") + data[8:]
    return build(chance.choice(texts), body)


DAMAGE: list[Callable[[bytes, random.Random], bytes]] = [
    flip,
    flip,
    truncate,
    extend,
    swap_tensors,
    wrong_shape,
    hostile_header,
]


def forge(value: Any, chance: random.Random) -> Any:
    """JSON with one thing in it changed."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        if chance.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: forge(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        if chance.random() < 0.2:
            return value[:at] + value[at + 1 :]
        return [*value[:at], forge(value[at], chance), *value[at + 1 :]]
    if type(value) is int and chance.random() < 0.6:
        return value + chance.choice([-1, 1, 16, -16, 2**31, 2**63, -(2**63), 2**80])
    return chance.choice([None, -1, 0, 1, 2**40, "x", "", [], {}, [0], 1.5, True, float("nan"), "0" * 64, [[[]]]])


# --- snapshots --------------------------------------------------------------------------------------------------------


def saved_cache(name: str, path: Path) -> PagedCache:
    cache = make(name, page_tokens=16)
    PrefixCache(cache)
    for ids in ([1] * 50, [2, 3] * 20, [4] * 7):
        append(cache, [cache.new()], [ids])
    cache.prefix.keep(cache.sequences[0], [1] * 50)
    cache.fork(cache.sequences[1])
    cache.prefix.keep(cache.sequences[1], [2, 3] * 20, "tenant")
    cache.free(cache.sequences[2])
    save(path, [cache], {"some": "thing"})
    return cache


def same(one: PagedCache, two: PagedCache) -> bool:
    if [dataclasses.replace(e, overlay_row=0, pages=[]).__dict__ for e in one.sequences] != [
        dataclasses.replace(e, overlay_row=0, pages=[]).__dict__ for e in two.sequences
    ]:
        return False
    if [n.key for n in one.prefix.nodes] != [n.key for n in two.prefix.nodes]:
        return False
    return all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(look(one, one.sequences), look(two, two.sequences), strict=True)
    )


def sound(cache: PagedCache) -> None:
    """References add up, and everything can be read, gone on with and freed."""
    held = Counter(page for entry in cache.sequences for page in entry.held) + Counter(
        n.page for n in cache.prefix.nodes
    )
    assert [cache.pool.references(page) for page in range(cache.pool.total)] == [
        held[p] for p in range(cache.pool.total)
    ]
    for entry in list(cache.sequences):
        if 0 < entry.length < 100:
            look(cache, [entry])
            append(cache, [entry], [[1] * 20])
            cache.crop(entry, entry.length // 2)
        cache.free(entry)
    cache.prefix.clear()
    assert cache.pool.used == 0


def mutations(request: pytest.FixtureRequest) -> int:
    """How many files are damaged."""
    return request.config.getoption("--mutations") or (10000 if request.config.getoption("--all") else 1000)


def test_snapshots(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)
    count = mutations(request) // 2
    outcomes: Counter[str] = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, name in enumerate(RECIPES):
        chance = random.Random(number)
        path = tmp_path / f"{number}"
        original = saved_cache(name, path)
        good = path.read_bytes()
        for _ in range(count // len(RECIPES)):
            forged = chance.random() < 0.3
            if forged:
                header, body = parse(good)
                key = chance.choice(["state", "state", "state", "digests", "extra"])
                header["__metadata__"][key] = json.dumps(forge(json.loads(header["__metadata__"][key]), chance))
                bad = resealed(header, body)
            else:
                bad = chance.choice(DAMAGE)(good, chance)
            path.write_bytes(bad)
            cache = make(name, page_tokens=16)
            PrefixCache(cache)
            try:
                with Snapshot(path) as snapshot:
                    snapshot.load([cache])
            except ValueError as error:
                outcomes["refused"] += 1
                if str(path) not in str(error):
                    raise
                if cache.pool.used or cache.sequences:
                    raise AssertionError("a refused snapshot left something behind") from error
            else:
                outcomes["forged and possible" if forged else "equal"] += 1
                if not forged:
                    assert same(original, cache), "read, and not what was written"
                sound(cache)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 300, f"{grown:.0f} MiB"
    assert outcomes["refused"] > 0.7 * sum(outcomes.values()), outcomes


def test_snapshots_of_a_model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same through kvant.Cache.load, whose file also describes the batch."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    model = make_model("gemma3")
    cache = kvant.Cache(model, "int4:sink=2,recent=5", share=True, page_tokens=16)
    with torch.inference_mode():
        model(prompt(2, 60), past_key_values=cache)
    cache.finish(prompt(2, 60))
    good = cache.save(tmp_path / "x").read_bytes()
    chance = random.Random(5)
    path = tmp_path / "x"
    refused = 0
    for _ in range(mutations(request) // 20):
        header, body = parse(good)
        extra = forge(json.loads(header["__metadata__"]["extra"]), chance)
        header["__metadata__"]["extra"] = json.dumps(extra)
        path.write_bytes(resealed(header, body))
        try:
            loaded = kvant.Cache.load(path, model)
        except ValueError:
            refused += 1
            continue
        with torch.inference_mode():
            model(prompt(2, 3), past_key_values=loaded)
    assert refused > 10


@pytest.mark.parametrize("sealed", ["recipe alone", "digest too"])
def test_windows_that_a_header_asks_for_are_not_allocated(
    sealed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forged recipe with a million sinks: refused by its digest; and where that is forged too, by the file's size."""
    model = make_model("llama")
    cache = kvant.Cache(model, "int4:sink=2,recent=5")
    with torch.inference_mode():
        model(prompt(2, 60), past_key_values=cache)
    path = cache.save(tmp_path / "x")
    forged = kvant.Cache(model, "int4:sink=1048576,recent=5")
    forged._allocate = lambda *args: pytest.fail("allocated")  # type: ignore[method-assign]
    monkeypatch.setattr(kvant.Cache, "_allocate", forged._allocate)
    header, body = parse(path.read_bytes())
    metadata = header["__metadata__"]
    extra = json.loads(metadata["extra"])
    metadata["extra"] = json.dumps(extra | {"recipe": forged.recipe.to_json()})
    if sealed == "digest too":
        forged.layouts = forged._make_layouts(extra["dtype"], torch.device("cpu"))
        metadata["digests"] = json.dumps([forged.digest])
    path.write_bytes(resealed(header, body))
    message = "is of another cache" if sealed == "recipe alone" else "would need .* bytes"
    with pytest.raises(ValueError, match=message):
        kvant.Cache.load(path, model, max_tokens=128, max_sequences=2)


# --- artifacts --------------------------------------------------------------------------------------------------------


def test_artifacts(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)
    original = made_up(layers=2, dim=64)
    path = original.save(tmp_path)
    good = path.read_bytes()
    chance = random.Random(9)
    outcomes: Counter[str] = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(mutations(request) // 2):
        forged = chance.random() < 0.3
        if forged:
            header, body = parse(good)
            metadata = header["__metadata__"]
            key = chance.choice(["recipe", "shape", "source", "digest", "format"])
            value = json.loads(metadata[key]) if metadata[key].startswith("{") else metadata[key]
            metadata[key] = json.dumps(forge(value, chance))
            del metadata["seal"]
            metadata["seal"] = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()
            bad = build(header, body)
        else:
            bad = chance.choice(DAMAGE)(good, chance)
        path.write_bytes(bad)
        try:
            artifact = Artifact.load(path)
        except ValueError as error:
            outcomes["refused"] += 1
            if str(path) not in str(error):
                raise
            continue
        outcomes["forged and possible" if forged else "equal"] += 1
        assert artifact.digest == original.digest
        if not forged:
            assert (artifact.recipe, artifact.source) == (original.recipe, original.source)
            assert (artifact.heads, artifact.head_dim, artifact.layers) == (2, 64, 2)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 300, f"{grown:.0f} MiB"
    assert outcomes["refused"] > 0.7 * sum(outcomes.values()), outcomes
