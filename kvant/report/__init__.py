"""A page of results that a person looks at: one HTML file with charts and tables, which needs no network.

`read` checks what `kvant eval --json` and `kvant bench attention --json` wrote, `served` counts bits and bytes at the user's
context, `charts` describes figures to plotly, `tables` are the same numbers as text, and `page` puts all of it into one file.
"""

from __future__ import annotations

from kvant.report.page import render, require_plotly
from kvant.report.read import Report, Speed, bench_of, combine, load, only, report_of
from kvant.report.served import Request

__all__ = ["Report", "Request", "Speed", "bench_of", "combine", "load", "only", "render", "report_of", "require_plotly"]
