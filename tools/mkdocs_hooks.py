"""What mkdocs must be told about this repository: optional pages, and links that leave docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

OPTIONAL = {"Library use": "library.md", "Data": "data.md", "Models": "models.md", "Checkpoints": "checkpoints.md"}
"""Entries of the navigation that come after the quick start, if the page exists."""

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!\.)[^)]*\)")


def on_config(config: Any) -> Any:
    """Add the optional pages that are there to the navigation."""
    docs = Path(config["docs_dir"])
    found = [{title: page} for title, page in OPTIONAL.items() if (docs / page).is_file()]
    config["nav"][1:1] = found
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to source files work in the repository; the site has only docs/, so they become plain text there."""
    if "/" in page.file.src_uri:
        return markdown
    return OUTSIDE.sub(r"\1", markdown)
