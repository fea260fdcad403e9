"""CUDA graphs of whole steps and torch.compile: answers, log-probabilities and pages are those of an eager engine.

Such a graph calls no Python when it is replayed, so attention cannot be recorded. What vLLM calls before every step is
the builder: the recorder follows the tables of the sequences there (`follow`), and reads their pages when all have
ended.

Models are in float32, where sums in another order move no greedy choice but near ties; and once in 16 bits, as they are
served. What torch.compile computes is rounded in other places than an eager engine's, which moves some codes, and with
them log-probabilities (by 0.03 on an H200). So graphs of a compiled model are compared with the compiled model without
graphs. That it attends to what it has stored is recorded by the tests with setup v2-piecewise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.engines.vllm import device
from tests.engines.vllm.device import MATRIX
from tests.engines.vllm.engines import (
    close,
    draft_model,
    engine,
    made_up_artifacts,
    needs_vllm,
    ngrams_apart,
    prompt,
    run,
    tiny_model,
)

pytestmark = [needs_vllm, pytest.mark.slow]
SIZES = [1, 2, 4, 8, 16, 32]
MODES = {  # what vLLM makes of them
    "vLLM's defaults": "FULL_AND_PIECEWISE",
    "full graphs, no torch.compile": "FULL_DECODE_ONLY",
    "piecewise graphs": "PIECEWISE",
    "torch.compile, no graphs": "NONE",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "vLLM's defaults": {"cudagraph_capture_sizes": [*SIZES, 64, 128]},
    "full graphs, no torch.compile": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": SIZES,
    },
    "piecewise graphs": {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [*SIZES, 64, 128]},
    "torch.compile, no graphs": {"cudagraph_mode": "NONE"},
}
# log-probabilities; a choice falls either way where the two best are so near; share of numbers in pages that differ
LIMITS = {"float32": (5e-3, 1e-2, 2e-3), "bfloat16": (0.15, 0.3, 0.1)}


class Said(NamedTuple):
    """An answer: tokens, their log-probabilities, and by how much the best choice was better than the second."""

    tokens: list[int]
    logprobs: list[float]
    margins: list[float]


def said(found: list[Any]) -> list[Said]:
    out = []
    for request in found:
        answer = request.outputs[0]
        steps = [sorted((each.logprob for each in step.values()), reverse=True) for step in answer.logprobs]
        own = [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        out.append(Said(list(answer.token_ids), own, [each[0] - each[1] for each in steps]))
    return out


def answers(
    path: Path, kvant: dict[str, Any], graphs: str = "NONE", **options: Any
) -> tuple[list[Said], dict[int, Any]]:
    """Two waves of requests, the second of which hits prefixes of the first; and the pages of the second, by length of
    the sequence."""
    llm = engine(path, kvant, block_size=128, **options)
    try:
        assert llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name == graphs
        assert llm.collective_rpc("follow") == [len(MATRIX)]
        shared = prompt(0, 300)
        first = run(llm, [shared + prompt(1, 30), prompt(2, 71), prompt(3, 3)], 30, logprobs=2)
        again = run(llm, [shared + prompt(4, 61), prompt(5, 130), prompt(6, 9), shared[:270]], 40, logprobs=2)
        assert [request.num_cached_tokens for request in again] == [256, 0, 0, 256]
        (pages,) = llm.collective_rpc("last_pages")
        return said([*first, *again]), pages
    finally:
        close(llm)


def compare(found: list[Said], expected: list[Said], dtype: str) -> int:
    """Answers are equal up to a near tie; how many tokens were compared."""
    near, tie, _ = LIMITS[dtype]
    compared = 0
    for mine, theirs in zip(found, expected, strict=True):
        pairs = zip(mine.tokens, theirs.tokens, strict=True)
        parted = next((i for i, (a, b) in enumerate(pairs) if a != b), len(theirs.tokens))
        if parted < len(theirs.tokens):
            assert theirs.margins[parted] < tie, (
                f"token {parted} is another, and no near tie: {theirs.margins[parted]:.3f}"
            )
        a, b = (torch.tensor(each.logprobs[:parted]) for each in (mine, theirs))
        torch.testing.assert_close(a, b, rtol=0, atol=near)
        compared += parted
    return compared


def compare_pages(
    found: dict[int, Any], expected: dict[int, Any], said: list[Said], wanted: list[Said], dtype: str
) -> None:
    """Pages of the sequences whose answers are equal: few numbers differ."""
    assert found.keys() == expected.keys() and len(found) == 4, (found.keys(), expected.keys())
    lengths = [361 + 39, 130 + 39, 9 + 39, 270 + 39]  # the last token is not stored
    equal = [n for n, a, b in zip(lengths, said[-4:], wanted[-4:], strict=True) if a.tokens == b.tokens]
    assert equal or dtype != "float32", "no answer is equal to the end"
    for n in equal:
        for layer, recipe in enumerate(MATRIX):
            for part, codes in expected[n][layer].items():
                if not len(codes):  # no group of tokens is whole
                    continue
                share = float((found[n][layer][part] != codes).double().mean())
                assert share < LIMITS[dtype][2], f"[recipe {recipe}] {part} of {n} tokens: {share:.2%} differ"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A layer for each recipe of the matrix."""
    root, count = tmp_path_factory.mktemp("graphs"), len(MATRIX)
    kvant = {"layers": {str(place): name for place, name in enumerate(MATRIX)}}
    return tiny_model(root / "model", layers=count), {
        **kvant,
        "artifact": made_up_artifacts(root, layers=count, names=MATRIX),
    }


@pytest.mark.cell("graphs: {config}, {dtype}", setups=("v2-graphs", "v1-graphs"))
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ("vLLM's defaults", "float32"),
        ("vLLM's defaults", "bfloat16"),
        ("full graphs, no torch.compile", "float32"),
        ("piecewise graphs", "float32"),
    ],
)
def test_answers_and_pages_are_those_without_graphs(model: Any, config: str, dtype: str) -> None:
    if not device.on_gpu():
        pytest.skip("needs a CUDA device: --vllm-device cuda")
    path, kvant = model
    without: dict[str, Any] = {"enforce_eager": True}
    if CONFIGS[config].get("mode") != 0:
        without = {"enforce_eager": False, "compilation_config": CONFIGS["torch.compile, no graphs"]}
    expected, theirs = answers(path, kvant, dtype=dtype, **without)
    options = {"enforce_eager": False, "compilation_config": CONFIGS[config]}
    found, mine = answers(path, kvant, MODES[config], dtype=dtype, **options)
    assert compare(found, expected, dtype) > (200 if dtype == "float32" else 30)
    compare_pages(mine, theirs, found, expected, dtype)


@pytest.mark.cell("graphs of speculation: {method}", setups=("v2-graphs",))
@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_speculation_in_graphs(model: Any, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that verify drafts are graphs of several queries a sequence."""
    if not device.on_gpu():
        pytest.skip("needs a CUDA device: --vllm-device cuda")
    path, kvant = model
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "ngram":
        ngrams_apart(monkeypatch)
        drafts |= {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
    else:
        drafts |= {"model": str(draft_model(tmp_path / "draft", path)), "attention_backend": "CUSTOM"}
        kvant = {**kvant, "draft": "saw-int4"}
    few, told = [prompt(0, 7) * 25, prompt(1, 11) * 12, prompt(2, 40)], []
    for options in (
        {"enforce_eager": True},
        {"enforce_eager": False, "compilation_config": CONFIGS["vLLM's defaults"]},
    ):
        llm = engine(path, kvant, block_size=128, dtype="float32", speculative_config=drafts, **options)
        try:
            told.append(said(run(llm, few, 60, logprobs=2)))
        finally:
            close(llm)
    assert compare(told[1], told[0], "float32") > 100


def test_the_last_pages_that_are_followed_are_those_of_the_sequences(model: Any) -> None:
    """On a CPU, where nothing is a graph: two engines have the same pages, and another prompt other ones."""
    if device.on_gpu():
        pytest.skip("on a CPU")
    path, kvant = model
    expected, theirs = answers(path, kvant)
    found, mine = answers(path, kvant)
    assert compare(found, expected, "float32") == 3 * 30 + 4 * 40
    compare_pages(mine, theirs, found, expected, "float32")
    other = dict(zip(mine, [mine[n] for n in reversed(mine)], strict=True))
    with pytest.raises((AssertionError, RuntimeError)):
        compare_pages(other, theirs, found, expected, "float32")
