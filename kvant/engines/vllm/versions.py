"""The versions of vLLM that kvant supports. Its backend uses hooks that vLLM may change in any release."""

from __future__ import annotations

KNOWN = ("0.26", "0.29", "0.30", "0.31", "0.32", "0.33")
NAMED = "0.26.x and 0.29.x to 0.33.x"


# How kvant was run on a GPU inside a version. Inside those that are missing it was tested on a CPU alone.
ON_GPU = {"0.26": "without torch.compile", "0.33": "with torch.compile and CUDA graphs, on one GPU"}

# What kvant serves from a version of vLLM on: the version that it has been tested with first.
SLIDING, HYBRID = "0.29", "0.32"


def older(version: str, release: str) -> bool:
    """Whether a version is older than a release, such as 0.29."""
    return [int(part) for part in version.split(".")[:2]] < [int(part) for part in release.split(".")]


def release_of(version: str) -> str:
    """Of a version of vLLM, such as 0.32."""
    return ".".join(version.split(".")[:2])


def on_gpu(version: str) -> str | None:
    """How kvant was run on a GPU inside a version of vLLM; None where it was not."""
    return ON_GPU.get(release_of(version))


def gpu_summary() -> str:
    """Inside which versions kvant was run on a GPU, and inside which it was not."""
    ran = [f"{release} ({ON_GPU[release]})" for release in KNOWN if release in ON_GPU]
    rest = [release for release in KNOWN if release not in ON_GPU]
    return f"kvant was run on a GPU inside vLLM {', '.join(ran)}" + (f"; not inside {', '.join(rest)}" if rest else "")


def check(version: str) -> None:
    """Refuses a version that has not been tested."""
    if release_of(version) not in KNOWN:
        raise ValueError(f"kvant is known to work inside vLLM {NAMED}, this is vLLM {version}")
