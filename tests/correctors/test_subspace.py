"""SQuat's facts: the update is the optimum, the recursion gives the inverses, and without weight nothing changes."""

from __future__ import annotations

import pytest
import torch

from kvant.codecs.affine import Affine
from kvant.codecs.channel import Channel
from kvant.correctors.subspace import Subspace
from kvant.recipe import Stream, Window


def kkt(penalty: torch.Tensor, fixed: torch.Tensor) -> torch.Tensor:
    """argmin d^T P d with the first entries of d given, by the KKT system: a generic solver."""
    dim, count = len(penalty), len(fixed)
    given = torch.eye(dim, dtype=penalty.dtype)[:count]
    system = torch.zeros(dim + count, dim + count, dtype=penalty.dtype)
    system[:dim, :dim], system[:dim, dim:], system[dim:, :dim] = 2 * penalty, given.mT, given
    right = torch.cat((torch.zeros(dim, dtype=penalty.dtype), fixed))
    return torch.linalg.lstsq(system, right[:, None], driver="gelsd").solution[:dim, 0]


@pytest.mark.parametrize(("dim", "block"), [(64, 0), (64, 16), (96, 0), (128, 32), (8, 1), (6, 2)])
@pytest.mark.parametrize("weight", [1e-4, 0.01, 1.0])
def test_an_update_is_the_optimum_that_a_generic_solver_finds(dim: int, block: int, weight: float) -> None:
    corrector = Subspace(rank=min(5, dim), weight=weight, block=block)
    subspace = corrector.fit(torch.randn(40, 2, 3, dim) * torch.rand(dim) * 3)
    updates = corrector.updates(subspace)
    blocks = corrector.blocks(dim)
    assert len(updates) == len(blocks) - 1
    for head in range(2):
        q = subspace[head].double()
        penalty = torch.eye(dim, dtype=torch.float64) + weight * q.mT @ q
        for part, update in zip(blocks, updates, strict=False):
            error = torch.randn(part.stop - part.start, dtype=torch.float64)
            # the channels before the block are coded and stay as they are
            best = kkt(penalty, torch.cat((torch.zeros(part.start, dtype=torch.float64), error)))
            torch.testing.assert_close(update[head] @ error, best[part.stop :], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("block", [0, 8, 16])
def test_coding_is_the_papers_algorithm_written_out(block: int) -> None:
    """Every block is coded as it stands, then the rest moves to the optimum that the solver finds."""
    codec, corrector = Channel(bits=2, group=32), Subspace(rank=4, weight=0.01, block=block)
    x = torch.randn(64, 2, 64) * torch.rand(64).exp()
    state = corrector.fit(torch.randn(50, 2, 2, 64))
    found = codec.decode(corrector.encode(x, codec, state))
    for head in range(2):
        q = state[head].double()
        penalty = torch.eye(64, dtype=torch.float64) + 0.01 * q.mT @ q
        now = x[:, head].double()
        for part in corrector.blocks(64):
            own = now[:, part].float()[:, None]
            coded = codec.decode(codec.encode(own))[:, 0].double()
            error = coded - now[:, part].float()
            now[:, part] = coded
            for token in range(64):
                moved = kkt(penalty, torch.cat((torch.zeros(part.start, dtype=torch.float64), error[token])))
                now[token, part.stop :] += moved[part.stop :]
        torch.testing.assert_close(found[:, head].double(), now, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_without_weight_the_codes_are_kivis_bit_for_bit(bits: int, head_dim: int) -> None:
    codec, corrector = Channel(bits=bits, group=32), Subspace(weight=0.0, block=head_dim // 4)  # type: ignore[arg-type]
    x = torch.randn(96, 3, head_dim) * 10
    state = corrector.fit(torch.randn(200, 3, 4, head_dim) * 100)
    corrected, plain = corrector.encode(x, codec, state), codec.encode(x)
    assert corrected.keys() == plain.keys()
    for name in plain:
        assert torch.equal(corrected[name], plain[name])


def test_the_error_leaves_the_subspace() -> None:
    """Of eight blocks only the last one's error finds no channel to take it up: about the root of an eighth is left."""
    codec, corrector = Channel(bits=2, group=32), Subspace(rank=5, weight=1.0, block=16)
    directions = torch.randn(5, 128)
    queries = torch.randn(300, 1, 2, 5) @ directions * 3
    x = torch.randn(320, 1, 128)
    state = corrector.fit(queries)
    seen = []
    for parts in (codec.encode(x), corrector.encode(x, codec, state)):
        error = codec.decode(parts) - x
        seen.append(float((error[:, 0] @ directions.mT).norm()))
    assert seen[1] < 0.5 * seen[0]


def test_the_fit_is_the_svd_of_all_queries_of_a_group() -> None:
    queries = torch.randn(70, 2, 3, 32) @ torch.randn(32, 32)
    found = Subspace(rank=7).fit(queries)
    for head in range(2):
        _, values, vectors = torch.linalg.svd(queries[:, head].reshape(-1, 32).double(), full_matrices=False)
        expected = values[:7, None] * vectors[:7]
        signs = (found[head].double() * expected).sum(-1, keepdim=True).sign()
        torch.testing.assert_close(found[head].double() * signs, expected, rtol=1e-4, atol=1e-4)


def test_a_fit_goes_on_from_what_was_seen() -> None:
    """Queries of rank 4 lose nothing when they come in parts and five directions are kept."""
    queries = torch.randn(90, 1, 2, 4) @ torch.randn(4, 48)
    corrector = Subspace(rank=5)
    state = torch.zeros(1, 5, 48)
    for part in queries.split((1, 30, 59)):
        state = corrector.fit(part, state)
    whole = corrector.fit(queries)
    torch.testing.assert_close(state.mT @ state, whole.mT @ whole, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Subspace(rank=0), "rank must be at least 1"),
        (lambda: Subspace(weight=-1.0), "weight must be a finite number"),
        (lambda: Subspace(weight=float("nan")), "weight must be a finite number"),
        (lambda: Subspace(block=-4), "block must be a number of channels"),
        (lambda: Subspace(block=48).check_dim(64), "block must divide head_dim 64, got 48"),
        (lambda: Subspace(rank=100).check_dim(64), "rank must be at most head_dim 64"),
        (lambda: Stream(Affine(), corrector=Subspace()), "needs a codec that codes groups of tokens"),
    ],
)
def test_mistakes_are_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_a_codec_whose_channels_hang_together_is_refused() -> None:
    from kvant.codecs.boosted import Boosted

    with pytest.raises(ValueError, match="codes every channel for itself, got Boosted"):
        Stream(Boosted(), window=Window(flush=128), corrector=Subspace())
