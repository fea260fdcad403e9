"""Parts of a group of layers: each layer's overlay is the one that the overlay rows of its part copy."""

from __future__ import annotations

import torch

from kvant import recipes
from kvant.layout import Layout
from kvant.ops import OPS, LayerStore, choose
from kvant.serving.layer_group import LayerGroup, layered_overlay, pages_only

NAMES = ["a", "b", "c", "d"]


def group() -> LayerGroup:
    device = torch.device("cpu")
    layout = Layout.of(recipes.get("int4:sink=4,recent=16"), 2, 64, dtype="float32")
    overlays = {name: layered_overlay(layout, name, len(NAMES), 3, device) for name in layout.recipe.streams}
    stores = [LayerStore.allocate(layout, 0, 0, device, {}, None) for _ in NAMES]
    for place, store in enumerate(stores):
        store.overlays = {name: overlay[place] for name, overlay in overlays.items()}
    ops = {op: choose(op, layout, device) for op in OPS}
    return LayerGroup(layout, NAMES, stores, [pages_only(store) for store in stores], overlays, ops, 0, 64)


def check(part: LayerGroup) -> None:
    for index, store in enumerate(part.stores):
        for name, overlay in part.overlays.items():
            assert store.overlays[name].data_ptr() == overlay[index].data_ptr()


def test_overlays_of_parts_lie_side_by_side() -> None:
    whole = group()
    parts = [whole.part(["a", "c"]), whole.part(["b", "d"])]
    for part, names in zip(parts, (["a", "c"], ["b", "d"]), strict=True):
        check(part)
        assert part.names == names and part.stores == [whole.stores[NAMES.index(name)] for name in names]
    used = [store.overlays["key"].data_ptr() for store in whole.stores]
    assert len(set(used)) == len(NAMES)
    assert parts[0].part(["b", "d"]) is parts[1]  # a layer may ask by the part that it has


def test_a_later_call_makes_earlier_parts_void() -> None:
    whole = group()
    for names in (["a", "c"], ["b", "d"]):
        whole.part(names)
    for names in (["d", "a"], ["c", "b"]):
        check(whole.part(names))
    assert list(whole.parts) == [("d", "a"), ("c", "b")]
    assert whole.parts["d", "a"].part(NAMES) is whole and not whole.parts
    check(whole)
