"""Name the search dialog of the theme, for those who hear the page."""

from typing import Any

_DIALOG = 'data-md-component="search" role="dialog"'


def on_post_page(output: str, **_: Any) -> str:
    """Add a label where the theme has none."""
    return output.replace(f"{_DIALOG}>", f'{_DIALOG} aria-label="Search">')
