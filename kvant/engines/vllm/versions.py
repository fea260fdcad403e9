"""The versions of vLLM that kvant supports. Its backend uses hooks that vLLM may change in any release."""

from __future__ import annotations

KNOWN = ("0.26", "0.29", "0.30", "0.31", "0.32", "0.33")
NAMED = "0.26.x and 0.29.x to 0.33.x"


# What kvant serves from a version of vLLM on: the version that it has been tested with first.
SLIDING, HYBRID = "0.29", "0.32"


def older(version: str, release: str) -> bool:
    """Whether a version is older than a release, such as 0.29."""
    return [int(part) for part in version.split(".")[:2]] < [int(part) for part in release.split(".")]


def check(version: str) -> None:
    """Refuses a version that has not been tested."""
    if ".".join(version.split(".")[:2]) not in KNOWN:
        raise ValueError(f"kvant is known to work inside vLLM {NAMED}, this is vLLM {version}")
