"""Folding the value transforms of a recipe into a model's own weights, so that they cost nothing at serving time.

Values reach the cache as v = x W_v, and the attention output o goes through o W_o. A linear transform A of
the values commutes with attention, so v A = x (W_v A), and o A^-1 W_o undoes it in the output: both products are
computed once, in the weights (OSCAR section 4). The folded model gives the same outputs with any cache that stores what
it is given, a full one above all: its values are v A, and its output projection undoes A. Its config says what was folded
(`kvant_folded`), and a cache of the same recipe and artifact then applies no value transforms, in every engine. A recipe with
other value transforms would transform values twice, and is refused. The mark also has the model's fingerprints before and after,
so that artifacts of the original model fit it.

Products are computed in float64 and rounded once to the type of the weights. In float32 that changes nothing that matters; 16-bit
weights are rounded as they were when they were stored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from kvant import recipes
from kvant.artifact import Artifact
from kvant.engines.fingerprint import MARK, fingerprint
from kvant.ops.types import BoundStream
from kvant.progress import Progress
from kvant.recipe import MixedRecipe, Recipe

Tensor = torch.Tensor
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative, of the logits; 16-bit weights are rounded anew: 0.1


def fold(model: Any, recipe: str | Recipe, artifact: Artifact | None = None, progress: Progress | None = None) -> float:
    """Folds the recipe's value transforms into `v_proj` and `o_proj` of every layer of a transformers model, in place. Returns by
    how much its logits changed, relatively: by rounding.

    Refuses, and leaves the model as it was, where the weights are not plain linear layers, where the transforms remove
    a mean (the output would need a bias), or where the folded model does not give the logits that it gave before.
    """
    recipe = recipes.get(recipe)
    check_recipe(recipe)
    name = model.config.model_type
    if quantized(model.config):
        raise ValueError(f"cannot fold into this {name}: its weights are quantized")
    if folded(model.config) is not None:
        raise ValueError(f"cannot fold into this {name}: value transforms have been folded into it already")
    layers = _attention_layers(model)
    head_dim = layers[0].head_dim
    heads = layers[0].v_proj.out_features // head_dim
    base = fingerprint(model)
    if artifact is not None:
        artifact.check(recipe, len(layers), heads, head_dim, base)
    elif any(part.calibrated for part in recipe.value.transforms):
        raise ValueError(f"recipe {recipe.name} is fitted offline: it needs an artifact made by kvant calibrate")
    maps = [value_map(recipe, artifact, i, heads, head_dim) for i in range(len(layers))]
    linears = [linear for layer in layers for linear in (layer.v_proj, layer.o_proj)]
    before = [{key: p.detach().to("cpu", copy=True) for key, p in linear.named_parameters()} for linear in linears]
    wanted = _logits(model)
    with torch.no_grad():
        for place, (layer, matrix) in enumerate(zip(layers, maps, strict=True)):
            fold_values(layer.v_proj.weight, layer.v_proj.bias, matrix)
            fold_output(layer.o_proj.weight, matrix)
            if progress is not None:
                progress("folding", place + 1, len(layers))
        missed = float((_logits(model) - wanted).norm() / wanted.norm())
        if not missed < TOLERANCE.get(model.dtype, 0.1):
            for linear, saved in zip(linears, before, strict=True):
                for key, parameter in linear.named_parameters():
                    parameter.copy_(saved[key])
            raise ValueError(
                f"cannot fold into this {name}: its logits would change by {missed:.1e}; what lies between its value "
                "and output projections is not linear. The model was left as it was"
            )
    named = {
        "transforms": mark(recipe, artifact),
        "recipe": recipe.name,
        "artifact": None if artifact is None else artifact.digest,
        "layers": len(layers),
        "base": base,
        "weights": fingerprint(model),
    }
    setattr(model.config, MARK, named)
    return missed


def round_weights(model: Any, dtype: torch.dtype) -> float:
    """Rounds the weights of a folded model to another type. Returns by how much its logits change, relatively, where everything but
    the weights is computed in the type that it had."""
    wanted, kept = _logits(model), model.dtype
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
        changed = float((_logits(model) - wanted).norm() / wanted.norm())
        if dtype != kept:
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
    named = getattr(model.config, MARK)
    delattr(model.config, MARK)  # what the weights themselves are called
    setattr(model.config, MARK, {**named, "weights": fingerprint(model)})
    return changed


def check_recipe(recipe: Recipe) -> None:
    """Refuses a recipe that has nothing to fold."""
    if isinstance(recipe, MixedRecipe):
        raise ValueError(f"cannot fold recipe {recipe.name}: its layers have different recipes")
    if not recipe.value.transforms:
        raise ValueError(f"recipe {recipe.name} has no value transforms to fold")


def quantized(config: Any) -> bool:
    """Whether the weights of a model are quantized, by its config."""
    return any(getattr(each, "quantization_config", None) is not None for each in _with_text_config(config))


def _with_text_config(config: Any) -> list[Any]:
    """A config, and the one of its language model where that is another: it may have the marks."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return [config] if text is config else [config, text]


def folded(config: Any) -> str | None:
    """What was folded into the model of a config: a digest of the transforms and the artifact, or None."""
    found = _mark_of(config)
    if not isinstance(found, Mapping):
        return found  # none; older marks are the digest alone
    if not isinstance(found.get("transforms"), str):
        raise ValueError(f"the model's config says {MARK}: {found!r}, which names no transforms; fold the model anew")
    return str(found["transforms"])


def _mark_of(config: Any) -> Any:
    return next(filter(None, (getattr(each, MARK, None) for each in _with_text_config(config))), None)


def described(config: Any) -> str:
    """The recipe and the artifact that were folded into the model of a config, in words."""
    found = _mark_of(config)
    if not isinstance(found, Mapping) or "recipe" not in found:
        return "value transforms"
    artifact = found.get("artifact")
    return f"the value transforms of recipe {found['recipe']}{f' with artifact {artifact[:16]}' if artifact else ''}"


def mark(recipe: Recipe, artifact: Artifact | None) -> str:
    """Names the value transforms of a recipe with their tensors."""
    specs = [transform.to_dict() for transform in recipe.value.transforms]
    fitted = artifact is not None and any(transform.calibrated for transform in recipe.value.transforms)
    data = json.dumps([specs, artifact.digest if fitted else None], sort_keys=True)  # type: ignore[union-attr]
    return hashlib.sha256(data.encode()).hexdigest()


def served(recipe: Recipe, artifact: Artifact | None, config: Any) -> Recipe:
    """The recipe as a cache of this model has to apply it: without its value transforms where the model has them in its
    weights. A recipe that stores values as they come (`full`, `int4`) serves a folded model as it serves any. Refused are a recipe
    with other value transforms, which would transform values twice, and one whose value stream was fitted to the model before it
    was folded."""
    found = folded(config)
    if found is None:
        return recipe
    if not isinstance(recipe, MixedRecipe) and found == mark(recipe, artifact):
        return without_transforms(recipe)
    each = recipe.recipes if isinstance(recipe, MixedRecipe) else (recipe,)
    if any(one.value.transforms or any(place.startswith("value.") for place in one.fits) for one in each):
        given = "without an artifact" if artifact is None else f"with artifact {artifact.digest[:16]}"
        raise ValueError(
            f"the model's weights have other value transforms folded in than those of recipe {recipe.name} {given}: "
            f"{described(config)}. Serve that recipe, or load the model as it was before"
        )
    return recipe


def without_transforms(recipe: Recipe) -> Recipe:
    """The recipe without its value transforms, which the model's weights have."""
    return dataclasses.replace(recipe, value=dataclasses.replace(recipe.value, transforms=()))


def _attention_layers(model: Any) -> list[Any]:
    """The attention modules in order; refuses a model whose projections cannot be folded."""
    name = model.config.model_type
    found: dict[int, Any] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and hasattr(module, "o_proj"):
            found[index] = module
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for index in range(count):
        for part in ("v_proj", "o_proj"):
            linear = getattr(found.get(index), part, None)
            if type(linear) is not torch.nn.Linear:
                kind = "none" if linear is None else f"a {type(linear).__name__}"
                raise ValueError(
                    f"cannot fold into this {name}: layer {index} needs a linear {part} of its own, it has {kind}"
                )
    return [found[index] for index in range(count)]


def value_map(recipe: Recipe, artifact: Artifact | None, layer: int, heads: int, head_dim: int) -> Tensor:
    """The matrix A of the value stream, read off the unit vectors: float64 [heads, head_dim, head_dim]."""
    prefix = "value."
    tensors = {} if artifact is None else artifact.tensors[layer]
    own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    stream = BoundStream.of(recipe.value, head_dim, "float32", "cpu", own)
    eye = torch.eye(head_dim, dtype=torch.float64)[:, None, :].expand(head_dim, heads, head_dim)
    if bool(stream.forward(torch.zeros_like(eye[:1])).any()):
        raise ValueError(f"cannot fold recipe {recipe.name}: its value transforms remove a mean, which needs biases")
    return stream.forward(eye).permute(1, 0, 2)


def fold_values(weight: Tensor, bias: Tensor | None, matrix: Tensor) -> None:
    """W_v A, in place, for a weight [heads * head_dim, hidden] and a map [heads, head_dim, head_dim] of row vectors."""
    heads, dim, _ = matrix.shape
    matrix = matrix.to(weight.device)
    weight.copy_(torch.einsum("hde,hdx->hex", matrix, weight.double().view(heads, dim, -1)).flatten(0, 1))
    if bias is not None:
        bias.copy_(torch.einsum("hde,hd->he", matrix, bias.double().view(heads, dim)).flatten())


def fold_output(weight: Tensor, matrix: Tensor) -> None:
    """A^-1 W_o, in place, for a weight [hidden, query heads * head_dim]; the query heads of a KV head are neighbours."""
    heads, dim, _ = matrix.shape
    back = torch.linalg.inv(matrix).to(weight.device)
    weight.copy_(torch.einsum("hed,xhgd->xhge", back, weight.double().view(len(weight), heads, -1, dim)).flatten(1))


def _logits(model: Any) -> Tensor:
    """Logits of a few arbitrary tokens, to see that nothing changed."""
    embedding = model.get_input_embeddings()
    ids = torch.arange(16, device=embedding.weight.device)[None] * 7919 % embedding.num_embeddings
    with torch.no_grad():
        return model(ids, use_cache=False).logits.double().cpu()
