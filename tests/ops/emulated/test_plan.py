"""Launches of the emulated kernels: what registers hold, where queries are rotated, the shared memory of other GPUs."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from kvant.bench import attention
from kvant.ops import reference
from kvant.ops.cuda import decode as cuda_decode
from kvant.ops.cuda import plan
from kvant.ops.cuda.key_planes import key_planes
from scripts.kernel_resources import GPUS
from tests.conftest import make_layout, relative_error
from tests.needs import needs_compiler
from tests.ops import emulated
from tests.ops.cuda.decode_cases import ROTATED_BEFORE, ROTATED_BY_DECODE
from tests.ops.emulated.checks import filled

pytestmark = needs_compiler


def test_queries_are_rotated_inside_decode_where_it_holds_their_matrix() -> None:
    def made(name: str, group: int = 4, dim: int = 128, query: str = "bfloat16", **options: Any) -> plan.Plan:
        layout = make_layout(name, 8, dim)
        shared = options.pop("shared", emulated.H200)
        return plan.Plan(layout, group, query, (2, 1), (0, 1), False, True, shared, **options)

    for group in (1, 2, 3, 4, 5, 8):
        assert made("kvant-2", group).rotated_queries == (2 <= group <= 4)
        assert made("kvant-2", group, low_batch=True).query_kernel
        found = made("kvant-2", group, tuned=ROTATED_BY_DECODE)
        assert found.rotated_queries and not found.query_kernel
        usual = made("kvant-2", group, tuned=ROTATED_BEFORE)
        assert usual.query_kernel and not usual.rotated_queries
        assert (found.warps, found.constants["MIN_CTAS"]) == (usual.warps, usual.constants["MIN_CTAS"])
        bytes_ = found.dynamic_bytes + found.warps * found.rotated_bytes + 2048
        assert bytes_ * int(str(found.constants["MIN_CTAS"])) <= emulated.H200[1]
    assert not made("kvant-2", query="float32").rotated_queries
    assert not made("kvant-2", dim=256).rotated_queries
    assert not made("kvant-2", partial_rope=True).rotated_queries
    assert not made("kvant-2", shared=(101376, 102400)).rotated_queries
    assert not made("kvant-2:rope=post").rotated_queries
    assert not made("vecinfer-2:rope=block").rotated_queries


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("arch", "name", "group", "dim", "low_batch", "constants"),
    [
        ("sm_86", "int4:group=32", 4, 128, False, {"WARPS": 2, "MIN_CTAS": 2}),
        ("sm_80", "saw-int4", 4, 128, True, {"WARPS": 4}),
        ("sm_80", "vecinfer-4", 8, 128, True, {"WARPS": 8}),  # fewer copies of codebooks
        ("sm_120", "vecinfer-2", 4, 128, False, {"TEAMS": 2, "WARPS": 4, "INDICES_IN_REGISTERS": 0}),
        ("sm_100", "vecinfer-2", 4, 128, False, {"TEAMS": 3, "WARPS": 4, "INDICES_IN_REGISTERS": 1}),  # as on sm_90
        ("sm_80", "vecinfer-2", 4, 128, False, {"TEAMS": 3, "WARPS": 4, "INDICES_IN_REGISTERS": 1}),
        ("sm_120", "kvant-4", 4, 128, False, {"STAGES": 2, "MIN_CTAS": 1}),
        ("sm_86", "kvant-4-fast", 4, 128, True, {"QUERY_TRANSFORM": "QueryTransform::HADAMARD"}),
        # by a kernel before decode
        ("sm_86", "oscar:group=32", 4, 128, True, {"QUERY_TRANSFORM": "QueryTransform::MATRIX"}),
        ("sm_86", "kitty-pro", 16, 128, False, {"WARPS": 2}),
        ("sm_100", "saw-int4-kmeans", 4, 128, False, {"WARPS": 8, "MIN_CTAS": 1, "CENTROID_SUMS": 1}),  # as on sm_90
        ("sm_80", "saw-int4-kmeans", 4, 128, False, {"WARPS": 6, "MIN_CTAS": 1, "CENTROID_SUMS": 1}),
        ("sm_100", "saw-int4-kmeans", 4, 128, True, {"WARPS": 8, "MIN_CTAS": 1, "CENTROID_SUMS": 1}),
        ("sm_86", "kvant-2", 4, 128, False, {"QUERY_TRANSFORM": "QueryTransform::MATRIX"}),
        ("sm_100", "kvant-2", 4, 128, False, {"QUERY_TRANSFORM": "QueryTransform::ROTATED_MATRIX"}),  # as on sm_90
        ("sm_120", "million-2:k.bits=10,v.bits=9", 4, 256, True, {"WARPS": 2}),
        ("sm_120", "saw-int4", 8, 256, True, {"WARPS": 2}),
    ],
)
def test_decode_by_the_plans_of_other_gpus(
    arch: str,
    name: str,
    group: int,
    dim: int,
    low_batch: bool,
    constants: dict[str, int | str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fewer warps, stages and copies, and transforms by other kernels, as their shared memory makes it."""
    gpu = GPUS[arch]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: gpu.capability)
    monkeypatch.setattr(cuda_decode, "shared_memory", lambda device: gpu.shared)
    monkeypatch.setattr(cuda_decode, "LOW_BATCH", 128 if low_batch else 0)
    texts = list[str]()
    make = emulated.Kernel.__init__

    def checked(self: Any, text: str, kernel: str, device: torch.device, threads: int, shared: int = 0) -> None:
        assert shared <= gpu.shared[0] and threads <= 1024
        texts.append(text)
        make(self, text, kernel, device, threads, shared)

    monkeypatch.setattr(emulated.Kernel, "__init__", checked)
    cache, seqs = filled(name, 2, group, dim, [1, 63, 300])
    batch, store = cache.batch(seqs), cache.stores[0]
    q = torch.randn(len(seqs), 2 * group, dim).bfloat16()
    with attention.poisoned():
        found = cuda_decode.decode(store, q, batch, scale=dim**-0.5)
    assert relative_error(found, reference.decode(store, q.double(), batch, scale=dim**-0.5)) < 2e-3
    assert f"#define BULK {int(gpu.capability >= (9, 0))}\n" in texts[0]
    for constant, value in constants.items():
        assert f" int {constant} = {value};" in texts[0], constant


PLACES = """
struct Places { int *channel, *raised; };
template <class P> DEV void write_places(const Places& a) {
  for (int i = 0; i < P::REGISTERS; i++) {
    a.raised[P::BEFORE + i] = P::raised(i);
    for (int j = 0; j < 16; j++) a.channel[(P::BEFORE + i) * 16 + j] = P::channel(i, j / 4, j % 4);
  }
}
template <class... P> DEV void write_all(KeyPlanes<P...>, const Places& a) { (write_places<P>(a), ...); }
extern "C" __global__ void __launch_bounds__(32) places(const Places a) { if (threadIdx.x == 0) write_all(Keys{}, a); }
"""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "dim"),
    [
        *(
            ("kvant-2", 64),
            ("kvant-2:k.bits=4/4/0", 128),
            ("kvant-2:k.bits=3/2/0", 256),
            ("kvant-3", 128),
            ("kvant-3", 64),
            ("int8", 96),
        ),
        *(("turboquant-4", 96), ("turboquant-3", 128), ("turboquant-2", 64)),
    ],
)
def test_the_kernels_registers_have_the_plans_channels(name: str, dim: int) -> None:
    layout = make_layout(name, 2, dim)
    made = plan.Plan(layout, 4, "bfloat16", (2, 1), (2, 1), False, True, emulated.H200)
    channel, raised = (torch.full((made.key_registers * n,), -9, dtype=torch.int32) for n in (16, 1))
    arguments = (ctypes.c_void_p * 2)(channel.data_ptr(), raised.data_ptr())
    emulated.Kernel(made.text + PLACES, "places", torch.device("cpu"), 32).launch((1, 1), arguments)  # type: ignore[arg-type]
    planes = [(plane, i) for plane in key_planes(layout) for i in range(plane.registers)]
    assert raised.tolist() == [plane.raised(i) for plane, i in planes]
    assert channel.tolist() == [plane.channel(i, j // 4, j % 4) for plane, i in planes for j in range(16)]
    stored = sorted(c for c in set(channel.tolist()) if c >= 0)
    assert stored == [
        c for band in layout.format("key").stored_bands for c in range(band.first, band.first + band.width)
    ]
