"""kvant artifacts: lists, shows and removes cached artifacts."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

from kvant.cli.common import add_json_option


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "artifacts",
        examples=(
            "kvant artifacts",
            "kvant artifacts remove 3f2a91",
        ),
        help="list, show and remove cached artifacts",
        description="Artifacts that commands and kvant.artifact_for have fitted and stored in the user's cache directory. An ID is "
        "the beginning of an artifact's digest, or its directory.",
    )
    add_json_option(parser)
    parser.set_defaults(run=run_list)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    show = actions.add_parser("show", help="print an artifact's metadata")
    show.add_argument("id", metavar="ID")
    add_json_option(show, inherited=True)
    show.set_defaults(run=run_show)
    remove = actions.add_parser("remove", help="remove one, or all")
    remove.add_argument("id", metavar="ID", nargs="?")
    remove.add_argument("--all", action="store_true", help="remove all cached artifacts")
    add_json_option(remove, inherited=True)
    remove.set_defaults(run=run_remove)


@dataclasses.dataclass(frozen=True)
class CachedArtifact:
    """A cached artifact, as the header of its file describes it. `problem`: why it cannot be used, or None."""

    id: str
    model: str
    recipe: str
    text: str
    tokens: int | None
    version: str
    date: str
    bytes: int
    path: str
    problem: str | None = None


def cached_artifacts() -> list[CachedArtifact]:
    """All cached artifacts, newest first. Only headers are read, no tensors."""
    from kvant.artifact import FILE
    from kvant.calibrate.artifact_paths import root

    files = sorted(root().glob(f"*/*/{FILE}"), key=lambda file: (-file.stat().st_mtime, str(file)))
    return [_read(file) for file in files]


def _read(file: Path) -> CachedArtifact:
    from kvant.artifact import read_header

    about = file.stat()
    common: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M", time.localtime(about.st_mtime)),
        "bytes": about.st_size,
        "path": str(file.parent),
    }
    try:
        digest, recipe, source = read_header(file)
    except ValueError as error:
        named = hashlib.sha256(str(file.parent).encode()).hexdigest()
        return CachedArtifact(named[:16], "?", "?", "?", None, "?", **common, problem=str(error))
    text = str(source.get("text", "?"))
    if text == "given":
        text = f"given, sha256 {str(source.get('text_sha256', '?'))[:16]}"
    model = str(source.get("model_name") or source.get("model_type") or "?")
    return CachedArtifact(
        digest[:16], model, recipe, text, source.get("tokens"), str(source.get("version", "?")), **common
    )


def _one(asked: str) -> CachedArtifact:
    kept = cached_artifacts()
    with contextlib.suppress(OSError):
        here = [each for each in kept if Path(each.path) == Path(asked).resolve()]
        if here:
            return here[0]
    found = [each for each in kept if asked and each.id.startswith(asked)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(f"ID {asked!r}: no such artifact is cached; kvant artifacts lists those that are")
    raise ValueError(
        f"ID {asked!r} is ambiguous: it could be {', '.join(f'{e.id} in {e.path}' for e in found)}: name the directory"
    )


def run_list(args: argparse.Namespace) -> int:
    kept = cached_artifacts()
    if args.json:
        print(json.dumps([dataclasses.asdict(each) for each in kept], indent=2))
        return 0
    if not kept:
        from kvant.calibrate.artifact_paths import root

        print(f"no artifacts are cached in {root()}")
        return 0
    from kvant.layout import human_bytes

    for each in kept:
        tokens = "" if each.tokens is None else f"{each.tokens:,} tokens, "
        about = f"text {each.text}, {tokens}" if each.problem is None else "damaged, "
        print(f"{each.id}  {each.recipe}  {each.model}")
        print(f"    {about}{each.date}, {human_bytes(each.bytes)}, {each.path}")
    print(f"{human_bytes(sum(each.bytes for each in kept))} in {len(kept)} artifacts")
    return 0


def run_show(args: argparse.Namespace) -> int:
    from kvant.artifact import Artifact

    found = _one(args.id)
    report: dict[str, Any] = dataclasses.asdict(found)
    if found.problem is None:
        try:
            artifact = Artifact.load(found.path)
        except ValueError as error:
            report["problem"] = str(error)
        else:
            report |= {"digest": artifact.digest, "layers": artifact.layers, "heads": artifact.heads}
            report |= {"head_dim": artifact.head_dim, "source": artifact.source}
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    for key, value in report.items():
        if key == "source":
            for name, each in value.items():
                print(f"{key}.{name}: {each}")
        elif value is not None:
            print(f"{key}: {value}")
    return 0


def run_remove(args: argparse.Namespace) -> int:
    if args.all == (args.id is not None):
        raise ValueError("remove: name one ID, or --all")
    removed = cached_artifacts() if args.all else [_one(args.id)]
    for found in removed:
        shutil.rmtree(found.path)
        with contextlib.suppress(OSError):
            Path(found.path).parent.rmdir()  # the model's directory, if it is empty now
        if not args.json:
            print(f"removed {found.id} of recipe {found.recipe}: {found.path}")
    if args.json:
        print(json.dumps([dataclasses.asdict(found) for found in removed], indent=2))
    return 0
