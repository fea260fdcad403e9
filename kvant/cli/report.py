"""kvant report: a page of results that were written before."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from kvant.cli.html import add_html_options, target_of

if TYPE_CHECKING:
    from kvant.report import Report


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        examples=(
            "kvant report text.json tasks.json --html report.html",
            "kvant report text.json --html report.html --request-context 32768 --requests 16",
        ),
        help="make a page with charts from results of kvant eval",
        description="Puts JSON files of kvant eval --text and --task of one model on one page, with charts and tables.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON files that kvant eval wrote")
    parser.add_argument(
        "--model",
        metavar="M",
        help="the model, where the files do not name it or do not have its shape: a preset of kvant plan, a Hugging Face "
        "directory or id, a .gguf file, or smollm2; only its config is read",
    )
    parser.add_argument(
        "--recipe",
        metavar="R[,R...]",
        help="show these recipes only, as the results name them; all: those without options (default: whatever the files have)",
    )
    add_html_options(parser, required=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    target = target_of(args)
    assert target is not None  # --html is required
    from kvant.report import combine, load, report_of

    report = combine([(path, report_of(load(path), path)) for path in args.files], args.model)
    if args.model is not None and args.model != report.model:
        raise ValueError(f"--model {args.model!r}: the results are of {report.model!r}")
    if report.shape is None and report.model is not None:
        from kvant.cli.plan import find
        from kvant.plan import PRESETS, shape_of

        if args.model is not None or report.model in PRESETS:
            report = dataclasses.replace(report, shape=shape_of(find(report.model)))
    if args.recipe is not None:
        report = _only(report, args.recipe)
    target.write(report)
    return 0


def _only(report: Report, asked: str) -> Report:
    from kvant import recipes
    from kvant.report import only

    names = recipes.split(asked)
    missing = [name for name in names if name not in report.recipes]
    if asked.strip() != "all" and missing:
        raise ValueError(f"--recipe: the results have no {', '.join(missing)}; they have {', '.join(report.recipes)}")
    if set(names) <= set(missing):
        raise ValueError(f"--recipe all: the results have options in all names: {', '.join(report.recipes)}")
    return only(report, names)
