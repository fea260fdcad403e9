from __future__ import annotations

import math

import pytest
import torch

from kvant import recipes
from kvant.calibrate.run import calibrate
from kvant.engines.hf import Cache
from kvant.eval import Segments, evaluate, teacher
from tests.engines.test_hf import make_model, prompt


def test_windows_are_spread_evenly_and_score_enough() -> None:
    segments = Segments.over(range(1000), context=100, tokens=150, prompt=40)
    assert (len(segments.ids), segments.prompt, segments.scored, segments.tokens) == (3, 40, 50, 150)
    assert segments.ids[:, 0].tolist() == [0, 454, 909]
    assert segments.ids[2, -1] == 999
    assert Segments.over(range(1000), context=90, tokens=10).prompt == 30
    assert Segments.over(range(101), context=100, tokens=60, prompt=40).ids.tolist() == [list(range(101))]


def test_every_segment_begins_as_the_text_does() -> None:
    """A model that was trained with a token at the beginning predicts otherwise without it."""
    ids = [7, *range(100, 1099)]
    segments = Segments.over(ids, context=100, tokens=150, prompt=40, bos=7)
    assert (len(segments.ids), segments.prompt, segments.scored, segments.tokens) == (3, 40, 50, 150)
    assert segments.ids[:, :2].tolist() == [[7, 100], [7, 554], [7, 1009]]
    assert segments.ids[2, -1] == 1098
    assert Segments.over(ids, context=999, tokens=959, prompt=40, bos=7).ids.tolist() == [ids]
    for other in (None, 8):  # no such token, or a tokenizer that does not write it
        assert Segments.over(ids, 100, 150, 40, other).ids.tolist() == Segments.over(ids, 100, 150, 40).ids.tolist()


@pytest.mark.parametrize(("context", "tokens"), [(100, 900), (100, 959), (700, 950), (999, 600)])
def test_hardly_a_token_is_scored_twice(context: int, tokens: int) -> None:
    """Where tokens do not divide by segments, all but a token of each."""
    segments = Segments.over(range(1000), context, tokens, prompt=40)
    scored = segments.ids[:, segments.prompt + 1 :].flatten().tolist()
    assert len(scored) == segments.tokens >= tokens
    assert len(scored) - len(set(scored)) < len(segments.ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 1000}, "the text has 1000 tokens, a context of 1000 needs at least 1001"),
        ({"context": 1}, "context must be at least 2"),
        ({"prompt": 100}, "prompt must be at least 1 and shorter than the context of 100"),
        ({"prompt": 0}, "prompt must be at least 1"),
        ({"tokens": 0}, "tokens must be positive"),
        (
            {"tokens": 960, "prompt": 40},
            "tokens must be at most 959, got 960: the text has 1000 tokens, and 40 of them",
        ),
    ],
)
def test_mistakes_are_named(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Segments.over(range(1000), **{"context": 100, "tokens": 10, **options})


@pytest.mark.parametrize("chunk", [1, 7, 80])
@pytest.mark.parametrize("batch", [1, 8])
def test_scores_are_those_of_the_definition(chunk: int, batch: int) -> None:
    """Recomputed from plain forward passes: the full cache's distributions, and the recipe's through its own cache."""
    model = make_model("llama", initializer_range=0.3)
    segments = Segments(prompt(3, 121), 20)
    import kvant

    full, int4 = evaluate(model, [recipes.get("full"), recipes.get("int4")], segments, chunk=chunk, batch=batch)
    assert (full.recipe, int4.recipe) == ("full", "int4")
    assert abs(full.kl) < 1e-6
    assert full.top1 == 1.0
    assert full.attn_rel_mse < 1e-10
    kl, nll, equal = [], [], []
    with torch.inference_mode():
        for row in segments.ids:
            exact = model(row[None, :-1], use_cache=False).logits[0].log_softmax(-1)[20:]
            cache = kvant.Cache(model, "int4")
            model(row[None, :20], past_key_values=cache)
            parts = [
                model(row[None, at : min(at + chunk, 120)], past_key_values=cache).logits[0]
                for at in range(20, 120, chunk)
            ]
            found = torch.cat(parts).log_softmax(-1)
            kl.append((exact.exp() * (exact - found)).sum(-1))
            nll.append(-found.gather(1, row[21:, None])[:, 0])
            equal.append(exact.argmax(-1) == found.argmax(-1))
    # code flips between batch sizes move single tokens, the means agree
    assert int4.kl == pytest.approx(float(torch.cat(kl).mean()), rel=0.05)
    assert int4.ppl == pytest.approx(math.exp(float(torch.cat(nll).mean())), rel=0.02)
    assert int4.top1 == pytest.approx(float(torch.cat(equal).float().mean()), abs=0.02)
    assert int4.bpe == 4.5 * 128 / 120
    assert int4.kl_se > 0
    assert len(int4.layers) == 3
    assert 1e-5 < int4.attn_rel_mse < 1


@pytest.mark.parametrize("name", ["int4", "kivi-k2v2", "oscar:target=none,k.clip=1,v.clip=1"])
def test_the_size_of_a_block_does_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU reads larger blocks than a CPU; the text is decoded in either."""
    model = make_model("llama", initializer_range=0.3)
    segments = Segments(prompt(3, 121), 20)
    found = []
    for block in (64, 9):
        monkeypatch.setattr(teacher, "BLOCK", block)
        found += evaluate(model, [recipes.get(name)], segments)
    assert found[0].kl == pytest.approx(
        found[1].kl, rel=1e-2
    )  # hidden states that differ in their last digits change a code now and then
    assert found[0].layers == pytest.approx(found[1].layers, rel=1e-2)


def test_fewer_bits_score_worse() -> None:
    model = make_model("qwen3", initializer_range=0.3)
    names = ["int8", "int4", "int3", "int2"]
    results = evaluate(model, [recipes.get(name) for name in names], Segments(prompt(4, 101), 30), chunk=4)
    assert [r.kl for r in results] == sorted(r.kl for r in results)
    assert [r.attn_rel_mse for r in results] == sorted(r.attn_rel_mse for r in results)


def test_sliding_layers_are_probed_with_their_window() -> None:
    model = make_model("gemma3")
    (full,) = evaluate(model, [recipes.get("full")], Segments(prompt(1, 81), 40), chunk=1)
    assert full.attn_rel_mse < 1e-10


def test_progress_reaches_its_total() -> None:
    seen: list[tuple[int, int]] = []
    model = make_model("llama")
    evaluate(
        model,
        [recipes.get("full")],
        Segments(prompt(3, 31), 10),
        3,
        2,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (60, 60)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_keys_relative_to_their_block_do_not_care_where_a_text_stands() -> None:
    model = make_model("llama")
    ids = torch.randint(0, 100, (600,), generator=torch.Generator().manual_seed(1))
    recipe = recipes.get("kvant-2:recent=8,rope_block=32")
    artifact = calibrate(model, None, recipe, ids, excerpt_tokens=128, max_position=1024)
    segments = Segments.over(ids.tolist(), context=90, tokens=60, prompt=30)
    found = [
        evaluate(
            model,
            [recipe],
            segments,
            offset=offset,
            make_cache=lambda chosen, first=offset: Cache(model, chosen, artifact=artifact, first_position=first),
        )[0].kl
        for offset in (0, 640, 649)
    ]
    assert found[0] > 0
    assert found[1] == pytest.approx(found[0], rel=0.05)
    assert found[2] == pytest.approx(found[0], rel=0.5)  # other blocks, other codes


def test_a_profile_shows_the_fragile_layer() -> None:
    """One layer's keys made large: its logits, and no other layer's, are wrong by far more."""
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight *= 12
    segments = Segments.over(prompt(1, 120)[0].tolist(), context=90, tokens=60, prompt=30)
    (result,) = evaluate(model, [recipes.get("int4")], segments, profile=True)
    assert len(result.logits) == len(result.layers) == len(model.model.layers)
    assert result.logits[1] > 5 * result.logits[0] > 0
    (exact,) = evaluate(model, [recipes.get("full")], segments, profile=True)
    assert max(exact.logits) < 1e-6
    (without,) = evaluate(model, [recipes.get("int4")], segments)
    assert without.logits == []
    assert without.profile is None


def test_the_old_name_of_segments_works_and_warns() -> None:
    import kvant.eval

    with pytest.warns(DeprecationWarning, match="Segments"):
        assert kvant.eval.Windows is Segments
