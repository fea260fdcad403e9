"""What vLLM's scheduler does to a cache, over four recipes at once, a layer each: pages and attention are those of a plain
run over the same keys and values. Each is run with recipes that code tokens one by one, in blocks of 64, and with recipes that code
groups of tokens, in blocks of 128."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm import runner_v2
from tests.engines.vllm.device import EVERY
from tests.engines.vllm.engines import (
    GROUPS,
    LAYERS,
    close,
    draft_model,
    eagle_head,
    engine,
    made_up_artifacts,
    mimo_like,
    needs_vllm,
    ngrams_apart,
    prompt,
    recomputed,
    run,
    tiny_model,
)

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("vllm")
    return tiny_model(root / "model"), {"layers": LAYERS, "artifact": made_up_artifacts(root)}


@pytest.fixture(params=[64, 128])
def size(request: pytest.FixtureRequest) -> int:
    """Tokens of a block: 64 where tokens are coded one by one, 128 where groups of them are."""
    return int(request.param)


@pytest.fixture
def start(model: tuple[Path, dict[str, Any]]) -> Iterator[Any]:
    made: list[Any] = []

    def begin(
        size: int = 64,
        recipe: str | dict[str, str] | None = None,
        rows: int | None = None,
        draft: str | None = None,
        **options: Any,
    ) -> Any:
        """All recipes of LAYERS or of GROUPS, one for all layers, or others; `rows`: spare overlay rows; `draft`: the recipe of a
        draft's layers."""
        path, kvant = model
        kvant = kvant if size == 64 else {"layers": GROUPS}
        if rows is not None:
            kvant = {**kvant, "spare_overlay_rows": rows}
        if recipe:
            kvant = {**kvant, "layers": recipe if isinstance(recipe, dict) else {"0-": recipe}}
        if draft:
            kvant = {**kvant, "draft": draft}
        made.append(engine(path, kvant, block_size=size, **options))
        count = made[0].collective_rpc("record")
        assert count == [4] * options.get("tensor_parallel_size", 1) or (draft and count[0] > 4)
        return made[0]

    yield begin
    for llm in made:
        close(llm)


def compared(llm: Any) -> dict[str, int]:
    """What was compared, and found equal, in all ranks."""
    found = llm.collective_rpc("compare")
    assert all(one == found[0] for one in found)
    seen: dict[str, int] = found[0]
    assert seen["decodes"] and seen["pages"], seen
    assert not seen["short of sinks"], seen
    return seen


@pytest.mark.cell("prefix hit", setups=EVERY)
@pytest.mark.runner_v2(1)
def test_prefix_hit(start: Any, size: int) -> None:
    llm = start(size)
    shared = prompt(0, 150)
    run(llm, [shared + prompt(1, 30)], 5)
    found = run(llm, [shared + prompt(2, 60), shared[:129], shared + prompt(3, 200)], 70)
    assert [request.num_cached_tokens for request in found] == [128, 128, 128]
    seen = compared(llm)
    assert seen["prefills"] and seen["decodes"] > 4 * 200 and seen["behind a prefix"], seen


@pytest.mark.cell("sinks of a prefix whose row was given away", setups=("v2-piecewise",))
@pytest.mark.runner_v2(0)
def test_sinks_of_a_prefix_whose_row_was_given_away(start: Any, size: int) -> None:
    """There is one row: other requests have taken it before the prefix is hit."""
    llm = start(size, rows=0, max_num_seqs=1)
    shared = prompt(0, 150)
    run(llm, [shared], 3)
    for seed in (1, 2):
        run(llm, [prompt(seed, 100)], 3)
        found = run(llm, [shared + prompt(10 + seed, 20)], 5)
        assert found[0].num_cached_tokens == 128
    seen = compared(llm)
    assert seen["behind a prefix"], seen


@pytest.mark.cell("hit after eviction")
@pytest.mark.runner_v2(1)
@pytest.mark.slow
def test_prefix_hit_after_eviction(start: Any, size: int) -> None:
    llm = start(size, blocks=12 * 64 // size, max_model_len=640)
    shared = prompt(0, 330)
    run(llm, [shared], 3)
    run(llm, [prompt(1, 450)], 3)  # takes the last of the blocks that are shared
    found = run(llm, [shared + prompt(2, 10)], 30)
    assert 0 < found[0].num_cached_tokens < 320
    run(llm, [prompt(3, 400), prompt(4, 300)], 3)
    found = run(llm, [shared + prompt(2, 10)], 30)
    assert found[0].num_cached_tokens == 0
    seen = compared(llm)
    assert seen["overwritten"] and seen["behind a prefix"], seen


@pytest.mark.cell("chunked prefill", setups=EVERY)
@pytest.mark.runner_v2(1)
def test_chunked_prefill(start: Any, size: int) -> None:
    llm = start(size, max_num_batched_tokens=96)
    run(llm, [prompt(0, 430), prompt(1, 5), prompt(2, 200), prompt(3, 64)], 12)
    seen = compared(llm)
    assert seen["prefills"] > 4 * 6 and not seen["behind a prefix"], seen


@pytest.mark.cell("prefix of a chunk of the same step", setups=("v2-piecewise",))
@pytest.mark.runner_v2(0)
@pytest.mark.slow
def test_prefix_of_a_chunk_of_the_same_step(start: Any, size: int) -> None:
    """The second request shares blocks that the second chunk of the first one is to write in this very step."""
    llm = start(size, max_num_batched_tokens=300)
    shared = prompt(0, 400)
    found = run(llm, [shared, shared + prompt(1, 40)], 12)
    assert found[1].num_cached_tokens == 384
    seen = compared(llm)
    assert seen["shared at once"], seen


@pytest.mark.cell("preemption")
@pytest.mark.runner_v2(1)
@pytest.mark.slow
def test_preemption(start: Any, size: int) -> None:
    llm = start(size, blocks=12 * 64 // size, max_model_len=640, enable_prefix_caching=False)
    run(llm, [prompt(i, 170) for i in range(4)], 120)
    seen = compared(llm)
    assert seen["overwritten"] and seen["fresh"] > 4 * 4 and not seen["behind a prefix"], seen


@pytest.mark.runner_v2(0)
def test_a_block_that_another_tenant_left(start: Any, size: int) -> None:
    """Tenant A's request ends with its fourth block. The first of tenant B's takes the blocks up such that this one is its fourth,
    too, and the second shares it in the step that writes it: it must not find A's window."""
    llm = start(size, "kvant-2" if size == 64 else "kitty-pro", blocks=8, max_model_len=7 * size)
    run(llm, [prompt(0, 4 * size)], 1, salt="A")
    shared = prompt(1, 4 * size)
    found = run(llm, [shared + prompt(2, 5), shared + prompt(3, 9)], 20, salt="B")
    assert found[1].num_cached_tokens == 4 * size
    seen = compared(llm)
    assert seen["shared at once"] and seen["overwritten"], seen


@pytest.mark.cell("n = 4")
@pytest.mark.runner_v2(1)
@pytest.mark.slow
def test_parallel_sampling(start: Any, size: int) -> None:
    llm = start(size)
    (found,) = run(llm, [prompt(0, 150)], 80, n=4, temperature=1.0, seed=1)
    assert len({tuple(output.token_ids) for output in found.outputs}) == 4
    seen = compared(llm)
    assert seen["shared at once"] and seen["behind a prefix"], seen


@pytest.mark.cell("n-grams", setups=EVERY)
@pytest.mark.runner_v2(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "size"),
    [(None, 64), ("int4:sink=4,recent=3", 64), (None, 128)],  # the second has as many recent tokens as drafts
)
def test_ngram_speculation(start: Any, monkeypatch: pytest.MonkeyPatch, recipe: str | None, size: int) -> None:
    ngrams_apart(monkeypatch)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    llm = start(size, recipe, speculative_config=drafts)
    few = [prompt(0, 7) * 25, prompt(1, 11) * 12, prompt(2, 40)]
    run(llm, few, 60)
    seen = compared(llm)
    assert seen["taken back"] and seen["verified"] and not seen["prefills"], seen


@pytest.mark.cell("n-grams, prefix hits, chunks and preemption at once")
@pytest.mark.runner_v2(1)
@pytest.mark.slow
def test_drafts_prefixes_chunks_and_preemption_at_once(start: Any, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """In a pool of so few blocks that requests give way to others. Every request begins a new block after some tokens; a text that
    repeats itself is its own source of n-grams."""
    ngrams_apart(monkeypatch)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    pool = {"blocks": 7, "max_num_batched_tokens": 96, "max_model_len": 4 * size}
    llm = start(size, speculative_config=drafts, disable_log_stats=False, **pool)
    shared = prompt(0, 16) * 16
    run(llm, [shared[: size + 20]], 2)
    texts = [shared[: size + 9] + prompt(seed, 5) * size for seed in (1, 2, 3)]
    found = run(llm, [text[: 2 * size - 6] for text in [*texts, prompt(4, 7) * size]], 14)
    assert [request.num_cached_tokens for request in found] == [size, size, size, 0]
    assert {each.name: each.value for each in llm.get_metrics() if hasattr(each, "value")}["vllm:num_preemptions"]
    seen = compared(llm)
    assert seen["prefills"] and seen["behind a prefix"] and seen["verified"] and seen["overwritten"], seen


@pytest.mark.cell("a draft of 16 bits: {method}", setups=("v1-eager",))
@pytest.mark.few(2)
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "eagle"])
def test_speculation_with_a_draft_of_its_own(start: Any, tmp_path: Path, method: str, size: int, model: Any) -> None:
    """The draft's layers have vLLM's own attention and cache; a step that verifies drafts is a decode. Prompts come in chunks."""
    draft = (
        draft_model(tmp_path / "draft", model[0]) if method == "draft_model" else eagle_head(tmp_path / "draft", method)
    )
    drafts = {"method": method, "model": str(draft), "num_speculative_tokens": 3}
    llm = start(size, speculative_config=drafts, max_num_batched_tokens=160)
    shared = prompt(0, 300)
    run(llm, [shared + prompt(1, 30), prompt(2, 70)], 30)
    found = run(llm, [shared + prompt(3, 60), prompt(4, 3)], 30)
    again = 0 if method == "draft_model" else recomputed(size)
    assert found[0].num_cached_tokens == 300 // size * size - again
    seen = compared(llm)
    assert seen["taken back"] and seen["verified"] and seen["prefills"] and seen["behind a prefix"], seen


@pytest.mark.cell("a draft with recipe {recipe}: {method}")
@pytest.mark.runner_v2(1)
@pytest.mark.few(2)
@pytest.mark.parametrize("method", ["eagle", "draft_model", "eagle3"])
@pytest.mark.parametrize("recipe", ["saw-int4", "full"])
def test_layers_of_a_draft_with_a_recipe(start: Any, tmp_path: Path, method: str, recipe: str, model: Any) -> None:
    """They are compared with a plain run as the model's are."""
    draft = (
        draft_model(tmp_path / "draft", model[0]) if method == "draft_model" else eagle_head(tmp_path / "draft", method)
    )
    drafts = {"method": method, "model": str(draft), "num_speculative_tokens": 3, "attention_backend": "CUSTOM"}
    llm = start(draft=recipe, speculative_config=drafts, max_num_batched_tokens=160)
    found = llm.collective_rpc("page_bytes")[0]
    assert len(found) > 4 and all(given == predicted for given, predicted in found), found
    shared = prompt(0, 300)
    run(llm, [shared + prompt(1, 30), prompt(2, 70)], 30)
    run(llm, [shared + prompt(3, 60), prompt(4, 3)], 30)
    seen = compared(llm)
    assert seen["taken back"] and seen["verified"] and seen["prefills"] and seen["behind a prefix"], seen


@pytest.mark.cell("MTP")
@pytest.mark.runner_v2(0)
@pytest.mark.slow
def test_multi_token_prediction(tmp_path: Path, size: int) -> None:
    """A layer of the checkpoint itself (MTP) is the draft; vLLM calls it once, or again for every further draft."""
    kvant: dict[str, Any] = {"layers": GROUPS}
    if size == 64:
        kvant = {"layers": LAYERS, "artifact": made_up_artifacts(tmp_path)}
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    if runner_v2.used():  # which does not choose the draft's attention
        kvant, drafts = {**kvant, "draft": "saw-int4"}, {**drafts, "attention_backend": "CUSTOM"}
    llm = engine(
        mimo_like(tmp_path / "model"), kvant, block_size=size, max_num_batched_tokens=160, speculative_config=drafts
    )
    try:
        assert llm.collective_rpc("record") == [5 if runner_v2.used() else 4]
        shared = prompt(0, 300)
        run(llm, [shared + prompt(1, 30), prompt(2, 70)], 30)
        found = run(llm, [shared + prompt(3, 60), prompt(4, 3)], 30)
        assert found[0].num_cached_tokens == 300 // size * size - recomputed(size)
        seen = compared(llm)
        assert seen["taken back"] and seen["verified"] and seen["prefills"], seen
    finally:
        close(llm)


@pytest.mark.cell("tensor parallel 2", setups=("v2-eager", "v1-eager"))
@pytest.mark.slow
def test_tensor_parallel(start: Any, size: int) -> None:
    llm = start(size, tensor_parallel_size=2, max_num_batched_tokens=256)
    shared = prompt(0, 150)
    run(llm, [shared + prompt(1, 30), prompt(2, 300)], 6)
    found = run(llm, [shared + prompt(3, 60)], 20)
    assert found[0].num_cached_tokens == 128
    seen = compared(llm)
    assert seen["prefills"] and seen["behind a prefix"], seen


@pytest.mark.runner_v2(0)
def test_blocks_of_two_pages(start: Any) -> None:
    """Keys of 128 tokens are coded together, and a page has 64: prefix hits end at blocks of two pages. Chunks end anywhere."""
    llm = start(128, "kivi-k2v2-sink", max_num_batched_tokens=150)
    shared = prompt(0, 250)
    run(llm, [shared + prompt(1, 30), prompt(2, 70)], 5)
    found = run(llm, [shared + prompt(3, 60), shared[:200], shared + prompt(4, 200)], 70)
    assert [request.num_cached_tokens for request in found] == [128, 128, 128]
    seen = compared(llm)
    assert seen["prefills"] and seen["behind a prefix"], seen


def alone(start: Any, **options: Any) -> Any:
    """An engine for `squat*`, which are fitted on each request's own prompt: nothing is shared, prompts come as a whole."""
    return start(
        64, {"0-1": "squat", "2-": "squat-pre"}, enable_prefix_caching=False, enable_chunked_prefill=False, **options
    )


@pytest.mark.runner_v2(0)
def test_a_recipe_that_is_fitted_on_the_prompt(start: Any) -> None:
    """Prompts of less than a group and of several; several in a step."""
    llm = alone(start)
    run(llm, [prompt(0, 150), prompt(1, 20), prompt(2, 2), prompt(3, 64)], 45)
    run(llm, [prompt(0, 150)], 3)
    seen = compared(llm)
    assert seen["fresh"] >= 4 * 4 and not seen["behind a prefix"] and not seen["prefills"], seen


@pytest.mark.runner_v2(0)
@pytest.mark.slow
def test_preemption_of_what_is_fitted_on_the_prompt(start: Any) -> None:
    """What was preempted is computed anew: then its answer so far counts as part of its prompt."""
    llm = alone(start, blocks=12, max_model_len=640)
    run(llm, [prompt(i, 170) for i in range(4)], 80)
    seen = compared(llm)
    assert seen["overwritten"] and seen["fresh"] > 4 * 4 and not seen["behind a prefix"], seen


@pytest.mark.runner_v2(0)
@pytest.mark.slow
def test_parallel_sampling_of_what_is_fitted_on_the_prompt(start: Any) -> None:
    llm = alone(start)
    (found,) = run(llm, [prompt(0, 150)], 40, n=4, temperature=1.0, seed=1)
    assert len({tuple(output.token_ids) for output in found.outputs}) == 4
    seen = compared(llm)
    assert not seen["shared at once"] and not seen["behind a prefix"], seen


@pytest.mark.slow
def test_tensor_parallel_of_what_is_fitted_on_the_prompt(start: Any) -> None:
    llm = alone(start, tensor_parallel_size=2)
    run(llm, [prompt(0, 150), prompt(1, 90)], 20)
    assert compared(llm)["fresh"]
