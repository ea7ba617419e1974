"""Links from a page to a file of the repository that is no page lead to the repository."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<=\]\()(?!#|[a-z]+:)([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """``markdown`` with what leaves docs/ as an address below ``extra.repository``."""
    folder = posixpath.dirname(page.file.src_uri)

    def resolved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, link[1]))
        if target.startswith("docs/"):
            return link[0]
        return f"{config.extra['repository']}/blob/main/{target}{link[2] or ''}"

    return _LINK.sub(resolved, markdown)
