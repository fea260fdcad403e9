"""vLLM's offloading connector: prefix hits in CPU memory, after the pages were evicted from the cache. Pages and attention are those of a
plain run over the same keys and values, sinks included."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm import device
from tests.engines.vllm.engines import (
    GROUPS,
    LAYERS,
    close,
    engine,
    made_up_artifacts,
    needs_vllm,
    prompt,
    run,
    tiny_model,
)
from tests.engines.vllm.offloading import CONFIG, use_copies, watch_copies

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    root = tmp_path_factory.mktemp("vllm")
    return tiny_model(root / "model"), made_up_artifacts(root)


@pytest.fixture
def start(model: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Any] = []

    def begin(layers: dict[str, str], **options: Any) -> Any:
        watch_copies(monkeypatch) if device.on_gpu() else use_copies(monkeypatch)
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        config = {**CONFIG, "kv_connector_extra_config": {**CONFIG["kv_connector_extra_config"]}}
        kvant = {"layers": layers, "artifact": model[1]}
        made.append(engine(model[0], kvant, kv_transfer_config=config, **options))
        assert made[0].collective_rpc("record") == [4]
        return made[0]

    yield begin
    for llm in made:
        close(llm)


@pytest.mark.cell("offload to CPU memory", setups=("v1-eager",))
@pytest.mark.parametrize(
    ("layers", "size"), [(LAYERS, 64), ({"0-": "saw-int4"}, 64), pytest.param(GROUPS, 128, marks=pytest.mark.slow)]
)
def test_a_prefix_comes_back_from_cpu_memory(start: Any, layers: dict[str, str], size: int) -> None:
    """Twice; others have taken its blocks and its overlay row in between."""
    llm = start(layers, block_size=size, blocks=12 * 64 // size, max_model_len=640, max_num_seqs=2)
    shared = prompt(0, 330)
    run(llm, [shared], 3)
    for i in range(2):
        for seed in range(1, 9):
            run(llm, [prompt(10 * i + seed, 300)], 3)
        found = run(llm, [shared + prompt(50 + i, 10)], 20)
        assert found[0].num_cached_tokens == 330 // size * size
    (seen,) = llm.collective_rpc("compare")
    assert seen["loaded"] and seen["overwritten"] and seen["decodes"] and seen["pages"], seen
    assert not seen["short of sinks"], seen


@pytest.mark.cell("offload to CPU memory", setups=("v2-eager",), refused="reason")
@pytest.mark.parametrize(
    ("layers", "config", "reason"),
    [
        ("saw-int4", {"kv_connector": "NixlConnector"}, "NixlConnector: it is not known to move pages as opaque bytes"),
        ("saw-int4", {"canonical_layout": True}, "it would cut pages into tokens and heads"),
        ("squat", {}, "squat is not served with OffloadingConnector, which shares blocks between requests"),
        ("int4:sink=4,recent=64", {"spec_name": "TieringOffloadingSpec"}, "would come without their exact sinks"),
        ("int4:sink=4,recent=64", {}, "Set VLLM_USE_V2_MODEL_RUNNER=0"),
        ("saw-int4", {"plain": False}, "layers with a sliding window, or that are not attention"),
        ("saw-int4", {"method": "eagle3"}, "with a draft model"),
    ],
)
def test_what_is_refused(layers: str, config: dict[str, Any], reason: str) -> None:
    from types import SimpleNamespace

    from kvant import recipes
    from kvant.engines.vllm.checks import check_connector

    device.note({"recipe": layers})
    name = config.get("kv_connector", "OffloadingConnector")
    transfer = SimpleNamespace(kv_connector=name, kv_connector_extra_config=config)
    drafting = SimpleNamespace(method=config["method"]) if "method" in config else None
    asked = SimpleNamespace(kv_transfer_config=transfer, use_v2_model_runner=True, speculative_config=drafting)
    with pytest.raises(ValueError, match=reason):
        check_connector(asked, [recipes.get(layers)], config.get("plain", True))
