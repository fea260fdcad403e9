"""The model "kvant" of lm-evaluation-harness: its `hf` model, with generation and log-likelihoods from a packed cache.

Importing this module registers the model. Loading, tokenizing, chat templates, truncation and stop sequences are those of the
harness's HFLM. What differs: `generate_until` writes from a `kvant.Cache`, in a CUDA graph where the recipe's kernels can be
captured; log-likelihoods are computed as decode would have (kvant.eval.loglikelihood).
"""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from kvant import models, recipes
from kvant.artifact import Artifact
from kvant.calibrate.artifact_cache import artifact_for
from kvant.engines import graphs
from kvant.engines.hf import Cache
from kvant.engines.hybrid import HybridCache, cache_for, packed_of
from kvant.eval import loglikelihood
from kvant.eval.loglikelihood import Continuation
from kvant.layouts import Layouts
from kvant.shape import ModelShape
from kvant.version import VERSION

Tensor = torch.Tensor
MODEL = "kvant"  # the model's name in the harness
REFUSED = {  # arguments of HFLM that a packed cache cannot serve
    "parallelize": "the cache lies on one device",
    "tp_plan": "the cache holds all heads on one device",
}
log = logging.getLogger(__name__)


@register_model(MODEL)
class KvantLM(HFLM):
    """HFLM from a packed cache. Arguments of HFLM are passed on; those of its own:

    pretrained        as in HFLM, or smollm2, or a .gguf file
    recipe            a recipe's name, with fields where wanted; without it, that of the artifact
    artifact          what `kvant calibrate` wrote. Without it, a recipe that is fitted offline takes a kept artifact, or one is
                      made and kept, as all commands of kvant do.
    calibration_text  a UTF-8 file, the text for an artifact that has to be made
    graph             False: do not decode in CUDA graphs
    """

    def __init__(
        self,
        pretrained: Any,
        recipe: str | None = None,
        artifact: str | None = None,
        calibration_text: str | None = None,
        graph: bool = True,
        **options: Any,
    ) -> None:
        for name, reason in REFUSED.items():
            if options.get(name):
                raise ValueError(f"{name} cannot be served by --model {MODEL}: {reason}")
        loaded = None if artifact is None else Artifact.load(artifact)
        if recipe is None and loaded is None:
            raise ValueError(
                f"--model {MODEL} needs recipe=NAME or artifact=DIR; recipes: {', '.join(recipes.names())}"
            )
        self._check_split(recipe, options)
        self.recipe = loaded.recipe if recipe is None and loaded is not None else recipes.get(str(recipe))
        text = None if calibration_text is None else Path(calibration_text).read_text(encoding="utf-8")
        self._graph, self._cache, self._told = graph, None, False
        if isinstance(pretrained, str):
            pretrained, options = self._resolved(pretrained, options)
        else:
            self._check_shape(pretrained)
        super().__init__(pretrained, **options)
        if self.backend != "causal":
            raise ValueError(f"--model {MODEL} serves causal language models, got backend {self.backend!r}")
        for owner, name in ((self.model, "hf_quantizer"), (self.model.config, "quantization_config")):
            if options.get("gguf_file") and hasattr(owner, name):  # the weights are plain now
                delattr(owner, name)
        self.artifact = artifact_for(self.model, self.tokenizer, self.recipe, text) if loaded is None else loaded
        self._cache = self._new_cache()

    @staticmethod
    def _check_split(recipe: str | None, options: dict[str, Any]) -> None:
        """Refuses a recipe that the harness has cut at its commas."""
        own = inspect.signature(HFLM.__init__).parameters
        for name, value in options.items():
            if recipe is None or ":" not in recipe or name in own:
                continue
            whole = f"{recipe},{name}={value}"
            try:
                recipes.get(whole)
            except ValueError:
                continue
            raise ValueError(
                f"the harness has cut the recipe at a comma, {name}={value} came as an argument of its own: "
                f"put it in quotes, as in --model_args 'pretrained=M,recipe=\"{whole}\"'"
            )

    @staticmethod
    def _resolved(pretrained: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """A name of kvant's command line as HFLM takes it."""
        file = models.gguf_file(pretrained)
        if file is not None:
            return str(file.parent), {**options, "gguf_file": file.name}
        return models.resolve(pretrained) if pretrained == models.SMOLLM2 else pretrained, options

    def _check_shape(self, model_or_config: Any) -> None:
        """Refuses what the recipe cannot serve."""
        shape = ModelShape.of(model_or_config, hybrid=True).packed
        Layouts.of(self.recipe, len(shape.layers), shape.heads, shape.head_dim)

    def _get_config(self, *args: Any, **options: Any) -> None:
        super()._get_config(*args, **options)
        self._check_shape(self.config)  # before the weights are loaded

    def _new_cache(self) -> Cache | HybridCache:
        return cache_for(self.model, self.recipe, artifact=self.artifact)

    @property
    def cache(self) -> Cache | HybridCache:
        """The packed cache, empty between batches."""
        if self._cache is None:
            self._cache = self._new_cache()
        return self._cache

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results."""
        device, packed = self.model.device, packed_of(self.cache)
        return super().get_model_info() | {
            "kvant_version": VERSION,
            "kvant_recipe": self.recipe.name,
            "kvant_artifact": None if self.artifact is None else self.artifact.digest,
            "kvant_bits_per_element": packed.layouts.bits_per_element(),
            "kvant_kernels": {op: packed.implementation(op, device) for op in ("append", "decode", "prefill")},
        }

    # --- generation --------------------------------------------------------------------------------------------------

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """Writes from the packed cache. context [rows, columns] is padded on the left; a batch that does not fit into memory is
        halved."""
        cache = self.cache
        captured = {"custom_generate": graphs.sample} if self._captures(options) else {}
        try:
            cache.reset()
            out = super()._model_generate(context, max_length, stop, past_key_values=cache, **captured, **options)
            cache.reset()
            return out  # type: ignore[no-any-return]
        except torch.OutOfMemoryError:
            if len(context) == 1:
                raise
        del cache
        self._after_out_of_memory(len(context) // 2)
        half = len(context) // 2
        parts = []
        for part in (slice(half), slice(half, None)):
            own = {name: x[part] if isinstance(x, Tensor) else x for name, x in options.items()}
            parts.append(self._model_generate(context[part], max_length, stop, **own))
        columns = max(part.shape[1] for part in parts)
        pad = self.tokenizer.pad_token_id
        return torch.cat([torch.nn.functional.pad(part, (0, columns - part.shape[1]), value=pad) for part in parts])

    def _captures(self, options: dict[str, Any]) -> bool:
        """Whether to decode in a CUDA graph; on a GPU the reason why not is told once."""
        if not self._graph or self.model.device.type != graphs.DEVICE:
            return False
        if isinstance(self.cache, HybridCache):
            reason: str | None = "states of layers that are not attention cannot be captured"
        else:
            reason = graphs.refuse(self.model, self.cache)
        if reason is None and (options.get("num_beams") or 1) > 1:
            reason = "beam search changes the batch between steps"
        if reason is not None and not self._told:
            log.warning("kvant: no CUDA graph, which is slower: %s", reason)
            self._told = True
        return reason is None

    def _after_out_of_memory(self, rows: int) -> None:
        self._cache = None  # its storage goes too
        torch.cuda.empty_cache()
        log.warning("kvant: out of memory, %d rows at a time from here on", rows)

    # --- log-likelihoods ---------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding would have written it) of requests (text, context, continuation); context and
        continuation are token ids."""
        whole = [Continuation.of(context, continuation, self.max_length) for _, context, continuation in requests]
        cut = sum(len(context) > len(one.prompt) + 1 for (_, context, _), one in zip(requests, whole, strict=True))
        if cut:
            log.warning("kvant: %d contexts lost their first tokens, the limit is %d", cut, self.max_length)
        rows = override_bs or (self.max_batch_size if self.batch_size == "auto" else self.batch_size)
        left = loglikelihood.in_order(whole)
        found: dict[int, tuple[float, bool]] = {}
        with tqdm(
            total=len(whole), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests"
        ) as bar:
            while left:
                count = loglikelihood.first_batch([whole[i] for i in left], rows)
                try:
                    scores = self._score([whole[i] for i in left[:count]])
                except torch.OutOfMemoryError:
                    if rows == 1:
                        raise
                    scores = None
                if scores is None:
                    rows = max(1, min(rows, count) // 2)
                    self._after_out_of_memory(rows)
                    continue
                for index, answer in zip(left[:count], scores, strict=True):
                    found[index] = answer
                    if requests[index][0] is not None:  # None: a window of a rolling request
                        self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
                left = left[count:]
                bar.update(count)
        return [found[index] for index in range(len(whole))]

    def _score(self, some: list[Continuation]) -> list[tuple[float, bool]]:
        pad = self.tokenizer.pad_token_id
        mixed = self.mixed_precision_dtype
        with torch.autocast(device_type=self.device.type, dtype=mixed, enabled=mixed is not None):
            return loglikelihood.score(
                self.model, self.cache, some, pad=0 if pad is None else pad, dtype=self.softmax_dtype
            )

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        """batch_size=auto begins with the most rows; a batch that does not fit into memory is halved."""
        return int(self.max_batch_size)

    def _model_call(self, *args: Any, **options: Any) -> Tensor:
        raise RuntimeError("a forward pass without a cache says nothing of a recipe: see _loglikelihood_tokens")
