"""--html: a page of results, for commands that have them."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvant.cli.common import check_writable, say
from kvant.cli.parsers import tokens
from kvant.files import replacing

if TYPE_CHECKING:
    from kvant.report import Report, Request, Speed


def add_html_options(parser: argparse.ArgumentParser, required: bool = False) -> None:
    parser.add_argument(
        "--html",
        metavar="FILE",
        required=required,
        help="write a page with charts and tables here (needs kvant[report])",
    )
    parser.add_argument(
        "--bench",
        metavar="FILE",
        help="with --html: a JSON file of kvant bench attention",
    )
    parser.add_argument(
        "--request-context",
        type=tokens,
        metavar="N",
        help="with --html: count memory for requests of N tokens (default 8k, 8192)",
    )
    parser.add_argument(
        "--requests", type=int, metavar="R", help="with --html: count memory for R requests at a time (default 1)"
    )


@dataclasses.dataclass(frozen=True)
class Target:
    """Where a page goes, and what it has besides results."""

    path: str
    request: Request
    speeds: tuple[Speed, ...]

    def write(self, results: Report | Mapping[str, Any]) -> None:
        """Writes the page of a report, or of what a command writes as JSON."""
        from kvant.report import Report, render, report_of

        report = results if isinstance(results, Report) else report_of(results, "results")
        page = render(dataclasses.replace(report, speeds=self.speeds), self.request)
        with replacing(Path(self.path)) as temporary:
            temporary.write_text(page, encoding="utf-8")
        say(f"wrote {self.path}")


def target_of(args: argparse.Namespace) -> Target | None:
    """What --html and its companions ask for, checked before the work starts; None where there is no --html."""
    if args.html is None:
        given = {"--bench": args.bench, "--request-context": args.request_context, "--requests": args.requests}
        extra = [name for name, value in given.items() if value is not None]
        if extra:
            raise ValueError(f"{', '.join(extra)}: only for a page; give --html FILE too")
        return None
    from kvant.report import Request, bench_of, load, require_plotly

    require_plotly()
    check_writable(args.html, "--html")
    given = {"context": args.request_context, "requests": args.requests}
    request = Request(**{name: value for name, value in given.items() if value is not None})
    speeds = () if args.bench is None else bench_of(load(args.bench, "--bench"), f"--bench {args.bench!r}")
    return Target(args.html, request, speeds)


def shape_of(model: Any) -> dict[str, Any]:
    """A model's shape as results have it: what bits and memory are counted from. Layers without attention are left out."""
    from kvant.shape import ModelShape

    return dataclasses.asdict(ModelShape.of(model, hybrid=True).packed)
