"""Warnings at the command line: kvant's own in one line each, once, with what to do; those of libraries not at all.

`python -W default -m kvant ...` or PYTHONWARNINGS shows everything as Python does, TRANSFORMERS_VERBOSITY=warning and
HF_HUB_VERBOSITY=warning what transformers and huggingface_hub log.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

LOGS = ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY")  # how much transformers and huggingface_hub log


@contextmanager
def one_line_warnings() -> Iterator[None]:
    for name in LOGS:
        os.environ.setdefault(name, "error")
    if sys.warnoptions:  # the user has asked for warnings
        yield
        return
    told: set[str] = set()

    def show(message: Warning | str, *_: object) -> None:
        text = getattr(message, "short", None) or " ".join(str(message).split())
        if text not in told:
            told.add(text)
            print(f"kvant: warning: {text}", file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in (UserWarning, RuntimeWarning, DeprecationWarning):
            warnings.filterwarnings("always", category=kind, module=r"kvant(\.|$)")
        warnings.showwarning = show  # type: ignore[assignment]
        yield
