"""Models that generate from recipes that code groups of tokens: every output against attention written out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import kvant
from kvant.cache.paged import SLID_OUT
from kvant.rope import Rope
from tests.engines.test_hf import make_model, prompt
from tests.grouped import SMALL, Tokens, attended

RECIPES = [  # each recipe once
    "kivi-k2v2:k.group=16,k.flush=16,v.recent=5",
    "kivi-k4v4:k.group=16,k.flush=48,v.recent=9",
    "kivi-k2v2-sink:k.group=16,k.flush=32,v.recent=20,sink=3",
    "kivi-k4v2-sink:k.group=16,k.flush=16,v.recent=20,sink=7",
    "kivi-k2v4-sink:k.group=16,k.flush=16,v.recent=20,sink=3",
    "kitty:k.group=16,k.flush=16,v.recent=5,sink=9",
    "kitty-pro:k.group=32,k.flush=32,v.recent=40,sink=2",
    "squat:k.group=16,k.flush=16,v.recent=5,weight=0.1",
    "squat-pre:k.group=16,k.flush=32,v.recent=5,weight=0.01,block=16",
    "gear:block=32,k.group=16,flush=32",
    "gear-l:block=16,k.group=8,flush=16,sink=3",
    "zipcache:group=16,flush=32",
]


class Oracle:
    """Follows every layer of a cache and checks each output from the keys, values and queries that the model made."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.rows: list[list[Tokens]] = []  # of every layer, the tokens of every sequence so far
        self.prompts: list[list[int]] = []
        self.calls = 0
        cache.on_attend = self
        select = cache._select

        def selected(order: Sequence[int]) -> None:
            select(order)
            self.rows = [[layer[i] for i in order] for layer in self.rows]
            self.prompts = [[layer[i] for i in order] for layer in self.prompts]

        cache._select = selected

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor
    ) -> None:
        if layer == len(self.rows):
            nothing = [Tokens(*(x[0, :, :0].transpose(0, 1) for x in (key, value, query))) for _ in query]
            self.rows.append(nothing)
            self.prompts.append([0] * len(query))
        group = self.cache.state.group_of[layer]
        step = group.step
        rope = Rope(torch.ones(1)) if self.cache._ropes is None else self.cache._ropes[layer]
        for row in range(len(query)):
            real = slice(None) if step.padding_mask is None else step.padding_mask[row]
            new = Tokens(*(x[row].transpose(0, 1)[real] for x in (key, value, query)))
            past = self.rows[layer][row]
            n, count = len(past.k), len(new.k)
            tokens = Tokens(*(torch.cat((getattr(past, x), getattr(new, x))) for x in "kvq"))
            self.rows[layer][row] = tokens
            if not n:
                self.prompts[layer][row] = count
            sides = []
            for side, fresh in (("key", new.k), ("value", new.v)):
                known = self.prompts[layer][row]
                if query.shape[2] == 1 and step.padding_mask is None:
                    sides.append(attended(self.cache.layout, side, tokens, n + 1, known, rope))
                else:
                    sides.append(torch.cat((attended(self.cache.layout, side, tokens, n, known, rope), fresh)))
            expected = attention(new.q, *sides, group.sliding_window)
            torch.testing.assert_close(out[row][real], expected.to(out.dtype), rtol=1e-3, atol=1e-4)
            self.calls += 1


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
    """Causal attention of the last tokens over all, with the usual scale: [tokens, heads, dim] each."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(repeat, 1) for x in (k, v))
    at = torch.arange(len(k))
    own = at[len(k) - len(q) :, None]
    hidden = at > own if sliding_window is None else (at > own) | (at <= own - sliding_window)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def left_padded(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(lengths)
    ids, mask = (
        torch.zeros(len(lengths), longest, dtype=torch.int64),
        torch.zeros(len(lengths), longest, dtype=torch.int64),
    )
    for row, n in enumerate(lengths):
        ids[row, longest - n :] = prompt(len(lengths), longest)[row, :n]
        mask[row, longest - n :] = 1
    return ids, mask


def nothing_leaks(cache: Any) -> None:
    for group in cache.groups:
        held = Counter(page for seq in group.sequences for page in seq.pages if page != SLID_OUT)
        assert all(group.paged.pool.references(page) == held[page] for page in range(group.paged.pool.total))
    cache.reset()
    assert all(group.paged.pool.used == 0 for group in cache.groups)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_left_padded_batch_generates_from_what_spans_say(family: str, recipe: str) -> None:
    model = make_model(family, num_hidden_layers=2)
    ids, mask = left_padded([61, 50, 56])
    cache = kvant.Cache(model, recipe, implementation="reference")
    oracle = Oracle(cache)
    model.generate(ids, attention_mask=mask, past_key_values=cache, do_sample=False, max_new_tokens=5)
    assert [seq.length for seq in cache.groups[0].sequences] == [65, 54, 60]
    assert oracle.calls == 3 * 2 * 5
    assert cache.nbytes == cache.predicted_nbytes
    nothing_leaks(cache)


@pytest.mark.parametrize("recipe", RECIPES)
def test_beam_search_forks_tails_and_what_correctors_remember(recipe: str) -> None:
    model = make_model("llama", num_hidden_layers=2)
    ids = prompt(2, 61)
    cache = kvant.Cache(model, recipe, implementation="reference")
    oracle = Oracle(cache)
    options: dict[str, Any] = {"num_beams": 2, "do_sample": False, "max_new_tokens": 6}
    model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)
    assert oracle.calls >= 4 * 2 * 5
    nothing_leaks(cache)


@pytest.mark.parametrize("recipe", ["kitty:k.group=16,k.flush=16,v.recent=5,sink=9", RECIPES[8], RECIPES[9]])
@pytest.mark.parametrize("family", ["mistral-sliding", "gemma3"])
def test_sliding_layers_code_their_groups_too(family: str, recipe: str) -> None:
    """Gemma's layers differ in their rotary embeddings, Mistral's window is shorter than a group."""
    model = make_model(family)
    ids, mask = left_padded([77, 62])
    cache = kvant.Cache(model, recipe, page_tokens=32, implementation="reference")
    Oracle(cache)
    model.generate(ids, attention_mask=mask, past_key_values=cache, do_sample=False, max_new_tokens=5)
    sliding = [group for group in cache.groups if group.sliding_window is not None]
    assert any(SLID_OUT in seq.pages for group in sliding for seq in group.sequences)
    nothing_leaks(cache)


@pytest.mark.parametrize("recipe", RECIPES)
def test_lookup_decoding_crops_into_groups(recipe: str) -> None:
    model = make_model("llama", num_hidden_layers=2)
    ids = prompt(1, 40).repeat(1, 2)
    cache = kvant.Cache(model, recipe, implementation="reference")
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 6, "max_matching_ngram_size": 1, "do_sample": False}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=20, **options)
    assert out.shape == (1, 100)
    nothing_leaks(cache)


@pytest.mark.parametrize("recipe", SMALL[:6])
def test_a_chunked_prompt_is_read_as_decode_would_read_it(recipe: str) -> None:
    model = make_model("qwen3", num_hidden_layers=2)
    ids = prompt(2, 100)
    cache = kvant.Cache(model, recipe, implementation="reference")
    Oracle(cache)
    with torch.inference_mode():
        for start, stop in ((0, 40), (40, 41), (41, 73), (73, 74), (74, 100)):
            model(ids[:, start:stop], past_key_values=cache)
    nothing_leaks(cache)


def test_a_failed_forward_pass_leaves_tails_as_they_were() -> None:
    """Gemma has two groups of layers; the second has no room, so that the first is taken back."""
    model = make_model("gemma3")
    recipe = "kivi-k2v2:k.group=16,k.flush=16,v.recent=5"
    cache = kvant.Cache(model, recipe, max_tokens=64, page_tokens=16)
    ids = prompt(1, 90)
    with torch.inference_mode():
        model(ids[:, :30], past_key_values=cache)
        full = next(group for group in cache.groups if group.sliding_window is None)
        free = full.paged.pool.free
        full.paged.pool.take(free)
        with pytest.raises(kvant.PoolFull):
            model(ids[:, 30:60], past_key_values=cache)
        assert full.paged.pool.free == free, "pages are counted by their owners again: these have none"
        fresh = kvant.Cache(model, recipe, page_tokens=16)
        model(ids[:, :30], past_key_values=fresh)
        found = model(ids[:, 30:60], past_key_values=cache).logits
        torch.testing.assert_close(found, model(ids[:, 30:60], past_key_values=fresh).logits)


def test_a_config_is_refused_where_the_rotary_embedding_is_needed() -> None:
    model = make_model("llama")
    with pytest.raises(ValueError, match="squat-pre stores keys unrotated: it needs the model itself"):
        kvant.Cache(model.config, "squat-pre")
    kvant.Cache(model.config, "squat")
