"""Snapshots: whole or not at all, refused by name where they are not what was written, and little memory on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import kvant
from kvant.cache import PoolFull, PrefixCache, Snapshot, save
from kvant.cache import snapshot as snapshots
from tests.cache.test_machine import append, look
from tests.families import make, tensors_of

NAME = "int4:sink=3,recent=5"


def filled(name: str = NAME, layers: int = 2) -> kvant.PagedCache:
    cache = make(name, layers=layers, page_tokens=16)
    for ids in ([1] * 50, [2, 3] * 20):
        append(cache, [cache.new()], [ids])
    return cache


def load(path: Path, cache: kvant.PagedCache) -> kvant.PagedCache:
    with Snapshot(path) as snapshot:
        snapshot.load([cache])
    return cache


def test_it_is_a_safetensors_file_that_says_what_it_is(tmp_path: Path) -> None:
    cache = filled()
    path = save(tmp_path / "x", [cache], {"a": [1, "b"]})
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "kvant-snapshot-1"
        assert cache.digest in file.metadata()["digests"]
        pages = file.get_tensor("0.1.pages")
        names = set(file.keys()) - {"checksums", "seal"}
        rows = sum(file.get_slice(name).get_shape()[0] for name in names)
        assert file.get_tensor("checksums").shape == (rows, 8)
    assert torch.equal(pages, cache.stores[1].pages[[page for e in cache.sequences for page in e.pages]])
    with Snapshot(path) as snapshot:
        assert snapshot.extra == {"a": [1, "b"]}
    assert [seq.name for seq in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("pages", [None, 8])
def test_pages_that_are_shared_are_written_once_and_shared_again(tmp_path: Path, pages: int | None) -> None:
    cache = filled()
    for _ in range(6):
        cache.fork(cache.sequences[0])
    path = save(tmp_path / "x", [cache])
    one = path.stat().st_size
    other = load(path, make(NAME, pages, layers=2, page_tokens=16))
    assert other.pool.used == cache.pool.used == 7
    assert [other.pool.references(page) for page in other.sequences[0].pages] == [7] * 4
    for mine, theirs in zip(look(cache, cache.sequences), look(other, other.sequences), strict=True):
        assert torch.equal(mine, theirs)
    cache.fork(cache.sequences[0])
    more = save(path, [cache]).stat().st_size - one
    assert more < cache.layout.overlay_bytes * 2 + 1000, "one more window, no more pages"
    with pytest.raises(PoolFull, match="7 more pages were asked for, 5 of 5 are free"):
        load(path, make(NAME, 5, layers=2, page_tokens=16))


def test_sequences_and_prefixes_go_on_after_a_load(tmp_path: Path) -> None:
    cache = filled()
    PrefixCache(cache).keep(cache.sequences[0], [1] * 50)
    cache.free(cache.sequences[0])
    path = save(tmp_path / "x", [cache])
    other = make(NAME, layers=2, page_tokens=16)
    prefix = PrefixCache(other)
    load(path, other)
    for each in (cache, other):
        seq = each.prefix.take([1] * 45 + [7] * 9)
        assert (seq.length, seq.sinks) == (45, 3)
        append(each, [seq], [[7] * 9])
    for mine, theirs in zip(look(cache, cache.sequences), look(other, other.sequences), strict=True):
        assert torch.equal(mine, theirs)
    assert other.nbytes == other.predicted_nbytes
    plain = load(path, make(NAME, layers=2, page_tokens=16))  # without a prefix cache, prefixes are left out
    assert plain.pool.used == 3
    prefix.clear()


@pytest.mark.parametrize(("tensor", "row"), [("0.0.pages", 2), ("0.1.pages", 5), ("0.1.value.window", 1)])
def test_a_flipped_bit_is_named_by_its_place(tmp_path: Path, tensor: str, row: int) -> None:
    cache = filled()
    path = save(tmp_path / "x", [cache])
    with Snapshot(path) as snapshot:
        at = snapshot.start
        for name, field in snapshot.fields.items():
            if name == tensor:
                at += row * field.row_bytes + field.row_bytes // 2
                break
            at += field.nbytes
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)
    other = make(NAME, layers=2, page_tokens=16)
    with pytest.raises(ValueError, match=f"snapshot .* is damaged: row {row} of {tensor} is not what was written"):
        load(path, other)
    assert other.pool.used == 0 and not other.sequences
    append(other, [other.new()], [[1] * 50])  # and it can be used


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], "it was cut or added to"),
        (lambda data: data[:3000], "it was cut or added to|a header of"),
        (lambda data: data[:5], "a header of"),
        (lambda data: b"", "a header of 0 bytes in a file of 0"),
        (lambda data: data + b"x", "it was cut or added to"),
        (lambda data: data[:-4] + b"abcd", "its seal is not that of"),
        (lambda data: data.replace(b"kvant-snapshot-1", b"kvant-snapshot-9"), "expected the format kvant-snapshot-1"),
        (lambda data: data[:9] + b"\xff" + data[10:], "its header cannot be read"),
    ],
)
def test_other_damage_is_named(tmp_path: Path, change: Any, message: str) -> None:
    path = save(tmp_path / "x", [filled()])
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        load(path, make(NAME, layers=2, page_tokens=16))


@pytest.mark.parametrize(
    "other",
    ["int4:sink=3,recent=6", "saw-int4:sink=3,recent=5", "int2:sink=3,recent=5", "int4:sink=3,recent=5,zero=float"],
)
def test_bytes_that_mean_something_else_are_never_read(tmp_path: Path, other: str) -> None:
    path = save(tmp_path / "x", [filled()])
    with pytest.raises(ValueError, match="is of another cache: its digest is"):
        load(path, make(other, layers=2, page_tokens=16))
    with pytest.raises(ValueError, match="is of another cache: its digest is"):
        load(path, make(NAME, layers=2, page_tokens=32))


def test_calibrated_tensors_are_part_of_the_digest() -> None:
    name = "saw-int4-hessian"
    one, two = make(name), make(name)
    assert one.digest == two.digest
    tensors = {key: value + 1e-3 for key, value in tensors_of(name, 2, 64).items()}
    assert kvant.PagedCache(one.layout, 1, tensors={0: tensors}).digest != one.digest


def test_permissions_stay(tmp_path: Path) -> None:
    path = save(tmp_path / "x", [filled()])
    path.chmod(0o600)
    save(path, [filled()])
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_is_no_file_is_refused_and_nothing_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, words in ((tmp_path / "fifo", "a FIFO"), (tmp_path, "a directory"), (Path("/dev/null"), "a device")):
        with pytest.raises(ValueError, match=f"snapshot .* expected a file, got {words}"):
            save(path, [filled()])
        with pytest.raises(ValueError, match=f"snapshot .* expected a file, got {words}"):
            Snapshot(path)


def test_a_failed_write_leaves_the_old_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled()
    path = save(tmp_path / "x", [cache])
    old = path.read_bytes()
    append(cache, [cache.sequences[0]], [[5] * 9])

    def fail(data: Any) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(snapshots, "_sum", fail)
    with pytest.raises(KeyboardInterrupt):
        save(path, [cache])
    assert path.read_bytes() == old
    assert [seq.name for seq in tmp_path.iterdir()] == ["x"]


HELPER = """
import resource, sys, torch
from kvant import Layout, PagedCache, recipe
from kvant.cache import Snapshot, save
def new():
    return PagedCache(Layout.of(recipe("int8"), 8, 128), 2, 600)
cache = new()
seq = cache.new()
cache.extend([seq], [600 * 64])
for store in cache.stores:
    store.pages.random_(0, 255)
mebibytes = sum(store.pages.nbytes for store in cache.stores) >> 20
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
if sys.argv[2] == "loop":
    print("ready", flush=True)
    while True:
        save(sys.argv[1], [cache])
before = peak()
save(sys.argv[1], [cache])
saving = peak() - before
other = new()
for store in other.stores:
    store.pages.zero_()
before = peak()
with Snapshot(sys.argv[1]) as snapshot:
    snapshot.load([other])
print(mebibytes, saving, peak() - before)
assert all(torch.equal(a.pages[seq.pages], b.pages[other.sequences[0].pages]) for a, b in zip(cache.stores, other.stores))
"""


def start(path: Path, mode: str) -> subprocess.Popen[str]:
    root = Path(kvant.__file__).parent.parent
    return subprocess.Popen(
        [sys.executable, "-c", HELPER, str(path), mode],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )


def test_saving_and_loading_take_little_extra_memory(tmp_path: Path) -> None:
    out, _ = start(tmp_path / "x", "measure").communicate()
    size, saving, loading = map(int, out.split())
    assert size >= 150
    assert saving <= 64 and loading <= 64, f"{size} MiB: {saving} MiB more to save, {loading} MiB more to load"


def test_killed_it_leaves_the_old_snapshot_or_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "x"
    old = save(path, [filled()]).read_bytes()
    process = start(path, "loop")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.15)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    if path.read_bytes() != old:
        with Snapshot(path) as snapshot:
            assert sum(field.nbytes for field in snapshot.fields.values()) > 150 << 20
