"""Emulated kernels of recipes that code groups of tokens."""

from __future__ import annotations

import pytest
import torch

from kvant.ops.cuda import append_groups, fit_subspace
from kvant.ops.cuda import decode as cuda_decode
from tests.needs import needs_compiler
from tests.ops.cuda.append_checks import SQUAT, check_padded_step, check_squat
from tests.ops.cuda.decode_cases import ROTATED_KEYS
from tests.ops.cuda.decode_checks import check_outputs
from tests.ops.emulated.checks import check_append, filled

pytestmark = needs_compiler


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "group", "dim", "options"),
    [
        ("kivi-k2v2", 4, 128, {}),
        ("kivi-k4v4:k.group=16,k.flush=48,k.recent=7,v.recent=9,sink=5", 5, 64, {"softcap": 5.0}),
        ("kivi-k2v2", 4, 64, {}),
        ("kivi-k2v4-sink:v.recent=20,sink=3", 2, 96, {"sliding_window": 150}),
        ("kitty-pro", 4, 128, {}),
        ("kitty", 3, 96, {"sliding_window": 250}),
        ("kitty:k.group=32,k.flush=32,v.recent=5,sink=9", 9, 64, {}),
        ("kitty:k.boost=1.0", 4, 64, {}),
        ("squat", 1, 64, {}),
        ("kivi-k2v2-sink:shift=false", 4, 128, {"page": 128}),
        ("kitty-pro:k.group=64,k.flush=64,v.recent=40,sink=9,shift=false", 4, 64, {}),
    ],
)
def test_decode_of_groups(name: str, group: int, dim: int, options: dict[str, float]) -> None:
    """Keys per channel over groups of tokens, with tails of all lengths; then cut, so that keys wait where values are packed."""
    options = dict(options)
    cache, seqs = filled(name, 2, group, dim, [1, 63, 130, 300], page=options.pop("page", None))  # type: ignore[arg-type]
    for cut in (0, 111):
        for seq in seqs:
            cache.crop(seq, max(1, seq.length - cut))
        check_outputs(cache, seqs, group, {"scale": dim**-0.5, "softcap": None, "sliding_window": None, **options})


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "group", "dim", "options"), ROTATED_KEYS)
def test_decode_of_keys_before_rope(name: str, group: int, dim: int, options: dict[str, float]) -> None:
    """Keys are rotated one by one when they are read: from pages, from tails of all lengths and from sinks, at odd positions."""
    options = dict(options)
    cache, seqs = filled(name, 2, group, dim, [1, 63, 130, 300], first=int(options.pop("first", 0)))
    for cut in (0, 41):
        for seq in seqs:
            cache.crop(seq, max(1, seq.length - cut))
        check_outputs(cache, seqs, group, {"scale": dim**-0.5, "softcap": None, "sliding_window": None, **options})


def test_keys_of_which_rope_rotates_some_channels_are_refused() -> None:
    cache, seqs = filled("squat-pre", 2, 4, 64, [5], rotated=32)
    with pytest.raises(ValueError, match="all of their 64 channels, and rope rotates 32 of them"):
        cuda_decode.decode(cache.stores[0], torch.randn(1, 8, 64), cache.batch(seqs), scale=0.1)


@pytest.mark.parametrize("name", ["kivi-k2v2-sink:shift=false", "kitty-pro:k.group=64,k.flush=64,sink=9"])
def test_a_step_of_groups_may_be_padded(name: str) -> None:
    """As a graph of a server's decode step is: sequences of no tokens, and tokens of no sequence."""
    check_padded_step(name, "cpu")


@pytest.mark.parametrize(
    "name", ["kivi-k4v4:k.group=16,k.flush=48,k.recent=7,v.recent=9,sink=5", "kitty-pro:k.group=32,k.flush=64,sink=2"]
)
@pytest.mark.parametrize("spare", [32, -100])
def test_groups_are_appended_in_one_launch_or_two(
    name: str, spare: int, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(append_groups, "STEP_SPARE", spare)
    check_append(name, 64, ([5, 1, 0], [1, 1, 1], [0, 30, 2]))
    two = ["kvant_append_groups", "kvant_append_tokens"]
    assert launched == (["kvant_append_sequences"] if spare > 0 else two) * 3


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "group", "dim", "rounds"), SQUAT)
def test_append_of_corrected_keys(name: str, group: int, dim: int, rounds: tuple[list[int], ...]) -> None:
    check_squat(name, group, dim, rounds, "cpu")


def test_sums_over_the_queries_of_a_prompt_are_spread(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_subspace, "LEAST_CHUNK", 16)
    check_squat("squat", 2, 32, ([40, 1, 17], [1, 1, 1]), "cpu")
    assert launched == [
        *("kvant_subspace_gram", "kvant_fit_subspace", "kvant_append_groups", "kvant_append_tokens"),
        *("kvant_fit_subspace", "kvant_append_sequences"),
    ]
