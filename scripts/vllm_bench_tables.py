"""The tables that scripts/vllm_bench.py prints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from vllm_bench_engine import Point


def pair(found: dict[str, float] | None) -> str:
    """Median and p99, to three digits or whole numbers."""
    return "-" if found is None else "/".join(f"{x:.{0 if x >= 100 else 1 if x >= 10 else 2}f}" for x in found.values())


def number(found: float | None, digits: int = 0) -> str:
    return "-" if found is None else f"{found:,.{digits}f}"


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be: the first to the left, the others to the right. A row of two cells is a remark."""
    whole = [row for row in rows if len(row) == len(head)]
    widths = [max(map(len, column)) for column in zip(head, *whole, strict=True)]
    widths[0] = max(len(row[0]) for row in [head, *rows])
    lines = []
    for row in [head, *rows]:
        rest = (
            row[1:]
            if len(row) < len(head)
            else [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        lines.append("  ".join([row[0].ljust(widths[0]), *rest]).rstrip())
    return "\n".join(["", title, "", *lines])


def work_table(name: str, results: list[dict[str, Any]]) -> str:
    first = results[0]["output_tokens_per_second"].get(name)
    steady = next((found["steady"][name] for found in results if name in found.get("steady", {})), None)
    if steady is not None:
        return steady_table(name, results, first)
    lines = [
        f"\n{name}\n\n| cache | tokens that fit | requests | output tokens/s | against {results[0]['cache']} |\n|---|---|---|---|---|"
    ]
    for found in results:
        speed = found["output_tokens_per_second"].get(name)
        if speed is None:
            if "failed" in found:
                lines.append(f"| {found['cache']} | failed ({found['failed']}) | | | |")
            continue
        against = f"{speed / first:.2f}" if first else ""
        lines.append(
            f"| {found['cache']} | {found['tokens_that_fit']:,} | {found['requests'][name]} | {speed:.1f} | {against} |"
        )
    return "\n".join(lines)


def steady_table(name: str, results: list[dict[str, Any]], first: float | None) -> str:
    lines = [
        f"\n{name}, steady state: so many requests in flight all the time, output tokens of a window after the fill\n",
        "| cache | tokens that fit | running | window s | ended | drafts accepted | output tokens/s "
        f"| against {results[0]['cache']} |",
        "|---" * 8 + "|",
    ]
    for found in results:
        got = found.get("steady", {}).get(name)
        if got is None:
            if "failed" in found:
                lines.append(f"| {found['cache']} | failed ({found['failed']}) | | | | | | |")
            continue
        speed, drafts = got["output_tokens_per_second"], got["drafts_accepted"]
        cells = [
            found["cache"],
            f"{found['tokens_that_fit']:,}",
            f"{got['at_once']}",
            f"{got['seconds']:.0f}",
            f"{got['ended']}",
        ]
        cells += ["-" if drafts is None else f"{drafts:.0%}", f"{speed:.1f}", f"{speed / first:.2f}" if first else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def point_table(point: Point, results: list[dict[str, Any]]) -> str:
    """A measurement of every cache. The last column is a ratio to the first cache: of decode for one long context, else of all."""
    found = {each["cache"]: next((p for p in each["points"] if p["name"] == str(point)), None) for each in results}
    first = found[results[0]["cache"]]
    compared = "output_tokens_per_second" if point.kind == "serving" else "decode_tokens_per_second"
    head = ["cache", "at once", "TTFT s", "TPOT ms", "each", "all", "prefill", "decode", f"x {results[0]['cache']}"]
    if point.hits:
        head.insert(1, "hit")
    rows = []
    for each in results:
        got = found[each["cache"]]
        if got is None:
            if "failed" in each:
                rows.append([each["cache"], f"failed ({each['failed']})"])
            continue
        against = (got[compared] or 0) / first[compared] if first and first[compared] else None
        row = [
            each["cache"],
            f"{got['at_once']}",
            pair(got["ttft_s"]),
            pair(got["tpot_ms"]),
            number((got["output_tokens_per_second_each"] or {}).get("median"), 1),
            number(got["output_tokens_per_second"]),
            number(got["prefill_tokens_per_second"]),
            number(got["decode_tokens_per_second"]),
            number(against, 2),
        ]
        if point.hits:
            row.insert(1, f"{got['cached_tokens'] / got['prompt_tokens']:.0%}")
        rows.append(row)
    size = f"{point.prompt} + {point.output} tokens"
    titles = {
        "serving": f"{point.concurrency} in flight of {point.num}, {size}, {point.hits:.0%} served before",
        "long": f"one request, {size}",
        "fill": f"as many requests as fit, {size}",
    }
    return table(titles[point.kind], head, rows)


def compare_table(args: argparse.Namespace, results: list[dict[str, Any]]) -> str:
    rows = []
    for each in results:
        got = each.get("compare", {})
        if "equal_prefix" not in got:
            rows.append([each["cache"], got.get("skipped") or f"failed ({each.get('failed')})"])
            continue
        rows.append(
            [
                each["cache"],
                f"{got['equal_prefix_share']:.1%}",
                f"{got['equal_choices_share']:.1%}",
                f"{got['equal_answers']} of {got['prompts']}",
            ]
        )
    size = " + ".join(map(str, args.compare_lengths))
    title = f"tokens against transformers, {args.compare_model}, {args.compare} prompts of {size}"
    return table(title, ["cache", "equal prefix", "equal choices", "equal answers"], rows)


def report(args: argparse.Namespace, points: list[Point], results: list[dict[str, Any]]) -> None:
    for point in points:
        print(work_table(point.work, results) if point.kind == "work" else point_table(point, results))
    if any(point.kind != "work" for point in points):
        print(
            "\nTTFT and TPOT: median/p99 of the requests. Tokens/s: each = output of a request (median),\n"
            "all = of all requests, prefill = prompt tokens computed in steps that compute any, decode =\n"
            "output in the other steps. The last column compares all; for long contexts it compares decode."
        )
        rows = [[each["cache"], number(each.get("tokens_that_fit"))] for each in results]
        print(table(f"tokens that {args.kv_gib:g} GiB hold", ["cache", "tokens"], rows))
    if args.compare:
        print(compare_table(args, results))
