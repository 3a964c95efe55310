"""What mkdocs must be told about this repository: links that leave docs/."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!\.)[^)]*\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to source files work in the repository; the site has only docs/, so they become plain text there."""
    if "/" in page.file.src_uri:
        return markdown
    return OUTSIDE.sub(r"\1", markdown)
