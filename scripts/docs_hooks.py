"""Hooks of mkdocs: links from a document to a file of the repository outside docs/ lead to the repository's host."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]+)?\)")
log = logging.getLogger("mkdocs.hooks.kvant")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    home = Path(page.file.abs_src_path).parent
    docs = Path(config.docs_dir).resolve()

    def outside(match: re.Match[str]) -> str:
        target = (home / match[1]).resolve()
        if target.is_relative_to(docs):
            return match[0]
        if not target.exists() or not target.is_relative_to(ROOT):
            log.warning("%s links to %s, which is not there", page.file.src_path, match[1])  # an error with --strict
            return match[0]
        kind = "tree" if target.is_dir() else "blob"
        return f"]({config.repo_url.rstrip('/')}/{kind}/main/{target.relative_to(ROOT)}{match[2] or ''})"

    return LINK.sub(outside, markdown)
