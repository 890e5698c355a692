"""Build `reports/` of the repository into the site; links between reports and pages work in both places."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_FOLDER = Path(__file__).parents[1] / "reports"


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    """Add each report, and its figures, as if it lay in `docs/reports/`."""
    for path in sorted(_FOLDER.rglob("*.*")):
        if path.suffix in (".md", ".png", ".svg", ".csv"):
            name = path.relative_to(_FOLDER).as_posix()
            files.append(File.generated(config, f"reports/{name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links that are right in the repository into links that are right in the site."""
    if page.file.src_uri.startswith("reports/"):
        return markdown.replace("](../docs/", "](../")
    return markdown.replace("](../reports/", "](reports/")
