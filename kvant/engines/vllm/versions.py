"""The versions of vLLM that kvant supports. Its backend uses hooks that vLLM may change in any release."""

from __future__ import annotations

KNOWN = ("0.26", "0.32")


def check(version: str) -> None:
    """Refuses a version that has not been tested."""
    if ".".join(version.split(".")[:2]) not in KNOWN:
        known = " and ".join(f"{release}.x" for release in KNOWN)
        raise ValueError(f"kvant is known to work inside vLLM {known}, this is vLLM {version}")
