"""Let tutorials link to other pages by their files, as pages do: MkDocs sees to the links of Markdown alone."""

import posixpath
import re
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.utils import get_relative_url

_LINK = re.compile(r'href="(?P<path>[^":#]+\.(?:md|py))(?P<anchor>#[^"]*)?"')


def on_page_content(html: str, *, page: Any, files: Any, **_: Any) -> str:
    """Point the links of a tutorial to built pages, and refuse one that leads nowhere."""
    source = page.file.src_uri
    if not source.endswith(".py"):
        return html

    def pointed(link: re.Match) -> str:
        target = files.get_file_from_path(posixpath.normpath(posixpath.join(posixpath.dirname(source), link["path"])))
        if target is None:
            raise PluginError(f"`{source}` names `{link['path']}`, which is no page; links are relative to the file.")
        return f'href="{get_relative_url(target.url, page.url)}{link["anchor"] or ""}"'

    return _LINK.sub(pointed, html)
