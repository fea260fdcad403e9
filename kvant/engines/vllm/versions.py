"""Which vLLM kvant knows: its hooks are not an interface that vLLM promises to keep."""

from __future__ import annotations

KNOWN = ("0.26", "0.32")


def check(version: str) -> None:
    """Refuses a version that nobody has tried."""
    if ".".join(version.split(".")[:2]) not in KNOWN:
        known = " and ".join(f"{release}.x" for release in KNOWN)
        raise ValueError(f"kvant is known to work inside vLLM {known}, this is vLLM {version}")
