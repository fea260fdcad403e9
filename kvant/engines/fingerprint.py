"""What names a model, so that an artifact or a snapshot made with one is not read with another."""

from __future__ import annotations

import hashlib
import json
from typing import Any

FINGERPRINTED = 8  # weight tensors that name a model, spread over it
COLUMNS = 512  # signs that are looked at in each
VOLATILE = (
    "transformers_version",
    "dtype",
    "torch_dtype",
    "_name_or_path",
    "architectures",
    "use_cache",
    "kvant_folded",
)
FOLDED = (".v_proj.", ".o_proj.")  # change where value transforms are folded into the weights; the model stays the same


def fingerprint(model: Any) -> str:
    """Names a model by its config and the signs of a few weights, which no choice of a floating type changes."""
    config = model.config.get_text_config(decoder=True).to_dict()
    plain = {key: value for key, value in config.items() if key not in VOLATILE}
    found = hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode())
    weights = sorted(
        (name, weight)
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and not any(part in name for part in FOLDED)
    )
    for name, weight in weights[:: max(1, len(weights) // FINGERPRINTED)]:
        found.update(f"{name}:{tuple(weight.shape)}".encode())
        found.update((weight.detach()[0, :COLUMNS] > 0).cpu().numpy().tobytes())
    return found.hexdigest()
