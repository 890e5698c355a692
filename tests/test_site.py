"""The site: pages, docstrings, external resources, and the citation file."""

import hashlib
import inspect
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from types import SimpleNamespace

import griffe
import jinja2
import pytest
import yaml
from mkdocs.exceptions import PluginError

import bilevel
from bilevel import estimators, theory
from tests.test_docs import code_blocks, load

ROOT = Path(__file__).parents[1]
VERSION = bilevel.__version__


class Settings(yaml.SafeLoader):
    """A YAML loader that ignores the tags of MkDocs."""


Settings.add_multi_constructor("!", lambda loader, suffix, node: None)


def pages(nav):
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in pages(entry)]


@pytest.fixture(scope="module")
def nav():
    return pages(yaml.load((ROOT / "mkdocs.yml").read_text(), Settings)["nav"])


def test_every_page_and_tutorial_is_in_the_nav_once_and_exists(nav):
    docs = ROOT / "docs"
    written = [*docs.rglob("*.md"), *(docs / "tutorials").glob("*.py")]
    reports = [path.relative_to(ROOT).as_posix() for path in (ROOT / "reports").rglob("*.md")]
    assert sorted(nav) == sorted([*(path.relative_to(docs).as_posix() for path in written), *reports])


def prose():
    """Return Markdown files of the repository with their lines outside of tables and code."""
    folders = (ROOT, ROOT / "docs", ROOT / "docs" / "reference", ROOT / "reports", ROOT / "examples" / "benchopt")
    for path in (path for folder in folders for path in sorted(folder.glob("*.md"))):
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        yield path, [line for line in text.split("\n") if not line.startswith(("|", "    "))]


def test_lines_of_markdown_wrap_at_120():
    # An absolute link and the name of an inserted number cannot be wrapped.
    unbreakable = re.compile(r"\]\(https:[^)]*\)|<!--.*?-->")
    assert not [(path.name, line) for path, lines in prose() for line in lines if len(unbreakable.sub("", line)) > 120]


OLD_WORDS = re.compile(
    r"\b(all-rows|ledgers?|rivals?|referees?|judg(e|ed|es|ing)|drawn? back|go(es|ne|ing)? back|went back|backoffs?|"
    r"safeguards?|cautious(ly)?|chances?|trust|missed|front door|manners|left the finite|whole_loops|labelled|"
    r"centred|colour\w*|\w*(regulari|normali|standardi)s(e|ed|es|ing|ation))\b",
    flags=re.IGNORECASE,
)
WORDED = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "docs", "reports", "examples"]


@pytest.mark.parametrize("where", WORDED)
def test_the_terms_are_those_of_the_field(where):
    files = [path for path in (ROOT / where, *(ROOT / where).rglob("*")) if path.suffix in {".md", ".py", ".cff"}]
    lines = [(path, line) for path in files for line in path.read_text().split("\n")]
    renames = ROOT / "CHANGELOG.md"  # whose table has the old names
    assert files
    assert not [
        (path.name, line)
        for path, line in lines
        if OLD_WORDS.search(line) and not (path == renames and line[:1] == "|")
    ]


def test_reports_and_their_figures_are_built_and_linked_both_ways(tmp_path):
    reports = load(ROOT / "docs" / "reports.py", "reports")
    config = SimpleNamespace(
        site_dir=str(tmp_path), use_directory_urls=True, plugins=SimpleNamespace(_current_plugin="reports")
    )
    added = {file.src_uri for file in reports.on_files([], config=config)}
    shown = [path for path in (ROOT / "reports").rglob("*.*") if path.suffix in (".md", ".png", ".svg", ".csv")]
    assert added == {path.relative_to(ROOT).as_posix() for path in shown}
    page, report = (SimpleNamespace(file=SimpleNamespace(src_uri=uri)) for uri in ("auto.md", "reports/auto.md"))
    assert reports.on_page_markdown("[a](../reports/auto.md#b)", page=page) == "[a](reports/auto.md#b)"
    assert reports.on_page_markdown("[a](../docs/auto.md)", page=report) == "[a](../auto.md)"


def test_every_figure_of_the_reports_is_shown_by_one():
    reports = ROOT / "reports"
    shown = re.findall(r"\]\((\w+\.(?:png|svg))\)", "".join(path.read_text() for path in reports.glob("*.md")))
    assert sorted(shown) == sorted(path.name for path in reports.iterdir() if path.suffix in (".png", ".svg"))


def test_pictures_of_choices_are_up_to_date_and_name_existing_objects():
    choices = load(ROOT / "docs" / "choices.py", "choices")
    for name, (title, questions, last) in choices.PICTURES.items():
        assert (ROOT / "docs" / name).read_text() == choices.draw(title, questions, last)
    named = {word for one in choices.SOLVERS for word in re.findall(r"\b[A-Z]\w*[A-Z]\w*|Exact", one.answer)}
    assert named == {"AutoSRBA", "F2SA", "F2SAp", "FdeHBO", "SRBA", "Exact", "SABA"} <= set(bilevel.SOLVERS)
    _, questions, last = choices.PICTURES["which-estimator.svg"]
    assert {one.answer for one in (*questions, last)} <= set(estimators.__all__)


def reference_page(path):
    return load(ROOT / "docs" / "solver_pages.py", "solver_pages").on_page_markdown(path.read_text())


def test_the_reference_has_every_solver():
    page = reference_page(ROOT / "docs" / "reference" / "solvers.md")
    shown = re.findall(r"::: (bilevel\.solvers[\w.]+)\.(\w+)\n    options:\n      members: false", page)
    assert shown == [(cls.__module__, name) for name, cls in bilevel.SOLVERS.items()]


@pytest.mark.parametrize("name", ["SRBA", "BSA", "HOAG"])
def test_the_reference_shows_every_parameter_of_a_solver_with_its_meaning(name):
    cls = bilevel.SOLVERS[name]
    extensions = griffe.load_extensions(str(ROOT / "docs" / "griffe_meaning.py"))
    shown = griffe.load("bilevel", search_paths=[ROOT], extensions=extensions)[f"{cls.__module__[8:]}.{name}"]
    parameters = entries(sections(shown)["parameters"])
    assert [entry[0] for entry in parameters] == list(inspect.signature(cls).parameters)
    assert all(annotation != "None" and meaning for _, annotation, _, meaning in parameters)


def test_the_reference_has_every_public_name():
    page = "".join(reference_page(path) for path in (ROOT / "docs" / "reference").glob("*.md"))
    shown = set(re.findall(r"::: bilevel[\w.]*?\.(\w+)\n", page))
    listed = {name for group in re.findall(r"members: \[(.*)\]", page) for name in group.split(", ")}
    packages = (bilevel, bilevel.problems, bilevel.datasets, estimators, theory)
    public = {name for package in packages for name in package.__all__} - {"SOLVERS", "PROBLEMS"}
    assert public - {"datasets", "problems"} <= shown | listed


@pytest.mark.parametrize("page", ["docs/index.md", "docs/runs.md"])
def test_the_examples_of_a_page_run_one_after_another(page, capsys):
    scope = {}
    for block in code_blocks(page):
        exec(block.replace("max_seconds=1", "max_steps=300"), scope)
    assert scope["result"].status == "out_of_budget"
    assert scope["result"].history["value"][-1] < scope["result"].history["value"][0]


SMALL = '''
    """Small: a solver.

    With z* and v*, each step

        z ← z*

    ====  =======
    name  meaning
    ====  =======
    """

    import dataclasses


    def solver(cls):
        return dataclasses.dataclass(cls)


    @solver
    class Small:
        """A solver.

        Parameters
        ----------
        step : of z, as in :mod:`small.other`,
            described in two lines
        ratio, size : both
        """

        step: float | None = dataclasses.field(default=0.1, metadata={"rule": None})
        ratio: float = 2.0
        size: int = 3


    def check(low: int, high: float = 1.0, **more: int) -> dict[str, float]:
        """Check v*(x) and z*(x).

        Parameters
        ----------
        low, high : the range of ``x*``,
            described in two lines
        **more : by name

        Returns
        -------
        The error of each kind.

        Raises
        ------
        ValueError : when low is above high
        """
'''


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    (folder / "small_solver.py").write_text(textwrap.dedent(SMALL))
    sys.path.insert(0, str(folder))
    try:
        extensions = griffe.load_extensions(str(ROOT / "docs" / "griffe_meaning.py"))
        yield griffe.load("small_solver", search_paths=[folder], extensions=extensions)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("small_solver", None)


def sections(obj):
    return {section.kind.value: section.value for section in obj.docstring.parse("numpy")}


def entries(section):
    return [(entry.name, str(entry.annotation), entry.value, entry.description) for entry in section]


def test_meanings_become_descriptions_and_types_come_from_annotations(small):
    parsed = sections(small["check"])
    assert entries(parsed["parameters"]) == [
        ("low", "int", None, "the range of ``x*``,\ndescribed in two lines"),
        ("high", "float", "1.0", "See `low`."),
        ("**more", "int", "{}", "by name"),
    ]
    (returned,), (raised,) = parsed["returns"], parsed["raises"]
    assert (str(returned.annotation), returned.description.strip()) == ("dict[str, float]", "The error of each kind.")
    assert (str(raised.annotation), raised.description) == ("ValueError", "when low is above high")


def test_a_solver_has_its_python_signature(small):
    role = '<autoref identifier="small.other" optional>`small.other`</autoref>'
    assert entries(sections(small["Small"])["parameters"]) == [
        ("step", "float | None", "0.1", f"of z, as in {role},\ndescribed in two lines"),
        ("ratio", "float", "2.0", "both"),
        ("size", "int", "3", "both"),
    ]


def test_the_page_of_a_solver_escapes_its_header_for_markdown(small):
    text = sections(small["Small"])["text"]
    assert text.startswith("Small: a solver.\n\nWith z\\* and v\\*, each step\n\n    z ← z*\n\n    ====  =======")
    assert sections(small["check"])["text"] == "Check v\\*(x) and z\\*(x)."


def test_a_page_that_loads_from_another_host_is_refused():
    offline = load(ROOT / "docs" / "offline.py", "offline")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
    kept = '<a href="https://arxiv.org"></a><script src="../assets/own.js"></script>'
    assert offline.on_post_page(kept, page=page) == kept
    for asked in ('<script src="https://cdn.x/y.js">', '<link rel="s" href="http://x/y">', 'import("https://x/y.mjs")'):
        with pytest.raises(PluginError, match=r"page\.md"):
            offline.on_post_page(kept + asked, page=page)


def test_loaders_of_notebook_pages_are_removed():
    offline = load(ROOT / "docs" / "offline.py", "offline")
    loaders = '<!-- Load mathjax -->\n<script src="">\n<!-- End of mermaid configuration -->'
    assert offline.on_page_content(f"<p>before</p>{loaders}<p>after</p>") == "<p>before</p><p>after</p>"


def test_links_of_a_tutorial_lead_to_built_pages_or_are_refused():
    links = load(ROOT / "docs" / "notebook_links.py", "notebook_links")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="tutorials/one.py"), url="tutorials/one/")
    built = {"auto.md": SimpleNamespace(url="auto/"), "tutorials/two.py": SimpleNamespace(url="tutorials/two/")}
    files = SimpleNamespace(get_file_from_path=built.get)
    html = '<a href="../auto.md#measured"></a><a href="two.py"></a><a href="https://a.org/b.md"></a>'
    pointed = '<a href="../../auto/#measured"></a><a href="../two/"></a><a href="https://a.org/b.md"></a>'
    assert links.on_page_content(html, page=page, files=files) == pointed
    with pytest.raises(PluginError, match=r"`auto\.md`, which is no page"):
        links.on_page_content('<a href="auto.md"></a>', page=page, files=files)


def test_the_citation_has_the_version_and_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == VERSION
    assert {"message", "title", "authors"} <= set(citation)
    (paper,) = citation["references"]
    assert [author["family-names"] for author in paper["authors"]] == ["Dagréou", "Moreau", "Vaiter", "Ablin"]
    assert "2302.08766" in paper["identifiers"][0]["value"]
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert (citation["repository-code"], citation["url"]) == (urls["Source"], urls["Documentation"])


def test_the_conda_recipe_of_a_release_has_the_hash_of_its_sdist_and_what_the_package_states(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    (fill,) = [step["run"] for step in release["jobs"]["build"]["steps"] if "sha256sum" in step.get("run", "")]
    for folder in ("dist", "conda"):
        (tmp_path / folder).mkdir()
    (tmp_path / "dist" / "bilevel-0.1.0.tar.gz").write_bytes(b"the sdist")
    shutil.copy(ROOT / "conda" / "meta.yaml", tmp_path / "conda")
    subprocess.run(["/bin/sh", "-ec", fill], cwd=tmp_path, check=True)
    recipe = yaml.safe_load(jinja2.Template((tmp_path / "meta.yaml").read_text()).render(PYTHON="python"))
    assert recipe["package"] == {"name": project["name"], "version": VERSION}
    assert recipe["source"]["sha256"] == hashlib.sha256(b"the sdist").hexdigest()
    assert recipe["source"]["url"].endswith(f"/releases/download/{VERSION}/bilevel-{VERSION}.tar.gz")
    needed = {name: "".join(bounds) for name, *bounds in map(str.split, recipe["requirements"]["run"])}
    stated = dict(re.match(r"([a-z]+)(.*)", one).groups() for one in project["dependencies"])
    assert needed == {"python": project["requires-python"], **stated}
    least = project["requires-python"].removeprefix(">=")
    assert f"python {least}" in recipe["requirements"]["host"] and f"python {least}" in recipe["test"]["requires"]
    about = recipe["about"]
    assert (about["home"], about["summary"]) == (project["urls"]["Homepage"], project["description"])
    assert about["license"] == project["license"] and (ROOT / about["license_file"]).is_file()
    assert recipe["extra"]["recipe-maintainers"] and recipe["build"]["noarch"] == "python"


def test_the_changelog_has_the_version():
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1] == VERSION
