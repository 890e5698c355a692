"""Keep the site free of other hosts: pages ask none for scripts, styles, fonts or images."""

import re
from typing import Any

from mkdocs.exceptions import PluginError

# Notebook pages are made with loaders of MathJax and Mermaid, neither of which is used here.
_LOADERS = re.compile(r"<!-- Load mathjax -->.*<!-- End of mermaid configuration -->", flags=re.DOTALL)
_ASKED = re.compile(
    r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?https?://[^>]*>|import\(["']https?://[^)]*"""
)


def on_page_content(html: str, **_: Any) -> str:
    """Leave out what notebook pages would load."""
    return _LOADERS.sub("", html)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Refuse a page that asks another host for something."""
    asked = _ASKED.search(output)
    if asked:
        raise PluginError(f"`{page.file.src_uri}` would load `{asked[0]}`: keep what a page needs in `docs/`.")
    return output
