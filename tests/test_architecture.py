"""The size of the package, the order of its imports, duplicate code, and words that are not used."""

import ast
import importlib
import inspect
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import bilevel
from bilevel.solvers import Solver

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "bilevel"
MODULES = sorted(PACKAGE.rglob("*.py"))
PAPER = sorted((ROOT / "paper").rglob("*.py"))  # only in a clone; not counted as lines of the package

# Without the modules that define an algorithm, of which there may be any number.
MOST_MODULES = 85
MOST_LINES = 17_500
MOST_MODULES_IN_TOTAL = 98  # with the capabilities below
# Capabilities that were added later have limits of their own: the lines of these modules and packages together.
MOST_LINES_OF = {
    ("differentiation", "oracles/tasks.py", "problems/tasks.py", "solvers/tasks.py"): 1_300,
    ("problems/distillation.py",): 500,
}
MOST_LINES_OF_BENCHMARKS = 6_000
MOST_BYTES_OF_REPORTS = 3_000_000
# The methods of `Solver` that a solver may override. All others are required, private or final.
OPTIONAL_HOOKS = {"configure", "draw", "init_calls", "monitor", "refresh", "refreshes"}
LONGEST_MODULE = 800  # above that, a module holds two concepts
MEDIAN_FUNCTION = 8  # lines of code; the median must be smaller
MOST_PARAMETERS = 12  # of a public function or method
MOST_SETTINGS = 15  # of a solver or an estimator
SHARED_LINES = 10  # lines of code that no two places may share

ROOMS = [
    ["_core"],
    ["_process"],
    ["datasets"],
    ["oracles"],
    ["problems"],
    ["solvers"],
    ["engine"],
    ["bench", "theory", "estimators", "differentiation"],
    ["cli"],
]
PLACE = {name: place for place, names in enumerate(ROOMS) for name in names}

# Words with better alternatives in the field, and British spellings.
OLD_WORDS = [
    *(r"all-rows", r"ledgers?", r"rivals?", r"referees?", r"judged", r"drawn back", r"gone back", r"back-?off"),
    *(r"left the finite numbers", r"cautious(?:ly)?", r"front door"),
    *(r"\w+isations?", r"\w*regularis\w*", r"\w*normalis\w*", r"\w*minimis\w*", r"\w*maximis\w*", r"penalis\w*"),
    *(r"optimis(?:e|es|ed|er|ers|ing)", r"standardis\w*", r"colour\w*", r"centred", r"labelled"),
]
GONE = re.compile(rf"\b(?:{'|'.join(OLD_WORDS)})\b", re.IGNORECASE)
# Former names of probabilities, residuals and weights.
OLD_NAMES = {"chances", "missed", "trust"}
# Names and titles that are spelled by others.
TITLES: list[str] = []


def names(path):
    return str(path.relative_to(ROOT))


def read(path):
    return path.read_text(encoding="utf-8")


def defines_an_algorithm(path):
    """One file per algorithm; all of `solvers/auto` is one algorithm."""
    in_a_file = path.parent.name == "solvers" and re.search(r"^@solver", read(path), re.MULTILINE) is not None
    return in_a_file or path.parent == PACKAGE / "solvers" / "auto"


def test_the_package_is_small():
    counted = [path for path in MODULES if not defines_an_algorithm(path)]
    assert len(MODULES) - len(counted) >= len(bilevel.SOLVERS)
    assert len(counted) <= MOST_MODULES_IN_TOTAL
    lines, modules, limits = Counter(), Counter(), MOST_LINES_OF | {("",): MOST_LINES}
    for path in counted:
        name = path.relative_to(PACKAGE).as_posix()
        group = next(group for group in limits if name.startswith(group))
        lines[group] += len(read(path).splitlines())
        modules[group] += 1
    assert modules[("",)] <= MOST_MODULES
    assert {group: count for group, count in lines.items() if count > limits[group]} == {}


def test_benchmarks_and_reports_are_small():
    lines = sum(len(read(path).splitlines()) for path in (ROOT / "benchmarks").rglob("*.py"))
    assert lines <= MOST_LINES_OF_BENCHMARKS
    sizes = {path: path.stat().st_size for path in (ROOT / "reports").rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= MOST_BYTES_OF_REPORTS


def test_a_solver_may_override_six_methods():
    found = set()
    for name in dir(Solver):
        member = inspect.getattr_static(Solver, name)
        method = member.fget if isinstance(member, property) else member
        if inspect.isfunction(method) and not name.startswith("_") and not getattr(method, "__final__", False):
            found.add(name)
    assert found - Solver.__abstractmethods__ == OPTIONAL_HOOKS
    assert len(OPTIONAL_HOOKS) <= 6


def test_no_module_is_long():
    lengths = {names(path): len(read(path).splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length > LONGEST_MODULE} == {}


def code_lines(source):
    """Return number and tokens of lines of code, without docstrings, imports, comments and single brackets."""
    passed_over = set()
    for node in ast.walk(ast.parse(source)):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if text or isinstance(node, ast.Import | ast.ImportFrom):
            passed_over |= set(range(node.lineno, node.end_lineno + 1))
    lines = defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP):
            lines[token.start[0]].append(token)
    return [
        (number, " ".join(token.string for token in tokens))
        for number, tokens in sorted(lines.items())
        if number not in passed_over and any(token.type != tokenize.OP for token in tokens)
    ]


def test_functions_are_short():
    lengths = []
    for path in MODULES:
        numbers = [number for number, _ in code_lines(read(path))]
        for node in ast.walk(ast.parse(read(path))):
            if isinstance(node, ast.FunctionDef):
                lengths.append(sum(node.lineno <= number <= node.end_lineno for number in numbers))
    assert statistics.median(lengths) < MEDIAN_FUNCTION


def test_public_functions_have_few_parameters():
    counts = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(read(path))):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                counts[names(path), node.name] = sum(one.arg not in ("self", "cls") for one in arguments)
    assert {place: count for place, count in counts.items() if count > MOST_PARAMETERS} == {}


def test_solvers_and_estimators_have_few_settings():
    estimators = importlib.import_module("bilevel.estimators")
    classes = [*bilevel.SOLVERS.values(), *(getattr(estimators, name) for name in estimators.__all__)]
    counts = {made.__name__: len(inspect.signature(made).parameters) for made in classes if inspect.isclass(made)}
    assert {name: count for name, count in counts.items() if count > MOST_SETTINGS} == {}


def shared(sources, least):
    """Return pairs of places, by source and line, that share ``least`` consecutive lines of code."""
    places, pairs = defaultdict(list), set()
    for name, source in sources.items():
        lines = code_lines(source)
        for i in range(len(lines) - least + 1):
            places[tuple(text for _, text in lines[i : i + least])].append((name, lines[i][0]))
    for found in places.values():
        pairs |= {(found[0], other) for other in found[1:]}
    return sorted(pairs)


def test_no_two_places_share_ten_lines_of_code():
    assert shared({names(path): read(path) for path in [*MODULES, *PAPER]}, SHARED_LINES) == []


def test_shared_lines_are_found_through_comments_and_layout():
    one = '"""A."""\nimport os\n\n\ndef f(a):\n    """Doc."""\n    b = a + 1\n\n    # why\n    return [\n    b,\n]\n'
    other = "x = 1\n\n\ndef f(a):\n    b = a+1\n    return [\n        b,  # why\n    ]\n"
    assert shared({"one": one, "other": other}, 4) == [(("one", 5), ("other", 4))]
    assert shared({"one": one, "other": other}, 5) == []


def test_old_words_are_gone():
    found = {}
    for path in [*MODULES, *PAPER, *sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]:
        text = read(path)
        for title in TITLES:
            text = text.replace(title, "")
        words = sorted({match.group().lower() for match in GONE.finditer(text)})
        if words:
            found[names(path)] = words
    assert found == {}


@pytest.mark.parametrize("path", MODULES, ids=names)
def test_old_names_are_gone(path):
    tokens = tokenize.generate_tokens(io.StringIO(read(path)).readline)
    assert OLD_NAMES & {token.string for token in tokens if token.type == tokenize.NAME} == set()


@pytest.mark.parametrize(
    "text", ["The ledger", "all-rows", "regularisation", "judged", "colour", "optimiser", "Gone back"]
)
def test_old_words_are_recognized(text):
    assert GONE.search(text)


@pytest.mark.parametrize("text", ["regularization", "color", "colors", "optimizer", "a judgement", "all rows"])
def test_other_words_are_not(text):
    assert not GONE.search(text)


def imported(path):
    """Yield the packages from which a module imports anywhere."""
    for node in ast.walk(ast.parse(read(path))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{names(path)}: relative import"
            parts = (node.module or "").split(".")
            if parts[0] == "bilevel":
                yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("bilevel."))


@pytest.mark.parametrize("path", MODULES, ids=names)
def test_imports_point_to_the_left(path):
    here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if here == "__init__":
        return
    for name in imported(path):
        assert name == here or PLACE[name] < PLACE[here], f"{here} imports {name}"


def private_imports(path):
    """Return the names with an underscore that a module imports from libraries, or names of private modules."""
    imports = [node for node in ast.walk(ast.parse(read(path))) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = [(getattr(node, "module", None) or "", alias.name) for node in imports for alias in node.names]
    found = {".".join(pair).strip(".") for pair in modules}
    return {one for one in found if re.match(r"(jax|sklearn|pandas|scipy|numpy)\..*\b_", one)}


def test_private_names_of_libraries_are_not_used():
    sources = [*MODULES, *PAPER, *sorted((ROOT / "tests").rglob("*.py"))]
    assert {names(path): found for path in sources if (found := private_imports(path))} == {}
    used = re.compile(r"\bjax\._src\b")
    assert [names(path) for path in sources if path != Path(__file__) and used.search(read(path))] == []


def test_the_package_does_not_import_what_only_a_clone_has():
    found = re.compile(r"^\s*(?:from|import) (?:paper|benchmarks|tests|docs)\b", re.MULTILINE)
    assert [names(path) for path in MODULES if found.search(read(path))] == []


def test_the_modules_of_the_engine_import_each_other_in_one_direction():
    modules = {path.stem: path for path in (PACKAGE / "engine").glob("*.py")}
    edges = {
        name: {
            node.module.split(".")[-1]
            for node in ast.walk(ast.parse(read(path)))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bilevel.engine.")
        }
        for name, path in modules.items()
    }
    while leaves := {name for name, imports in edges.items() if not imports & set(edges)}:
        edges = {name: imports for name, imports in edges.items() if name not in leaves}
    assert edges == {}, "these modules import each other"


def test_the_engine_imports_no_concrete_solver():
    shared = {"bilevel.solvers", *(f"bilevel.solvers.{name}" for name in ("base", "fields", "host", "moves", "tasks"))}
    for path in sorted((PACKAGE / "engine").glob("*.py")):
        for node in ast.walk(ast.parse(read(path))):
            aliases = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else aliases
            of_solvers = {module for module in modules if module.startswith("bilevel.solvers")}
            assert of_solvers <= shared and not set(bilevel.SOLVERS) & set(aliases), names(path)


def test_importing_the_library_imports_no_extra_and_no_scipy():
    extras = (
        "scipy.optimize",
        "sklearn",
        "matplotlib",
        "rich",
        "pandas",
        "pyarrow",
        "plotly",
        "joblib",
        "typer",
        "optax",
    )
    script = f"import sys, bilevel; print([module for module in {extras} if module in sys.modules])"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_the_library_leaves_the_settings_of_jax_alone():
    script = "import jax, bilevel; print(jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision)"
    environment = {"JAX_ENABLE_X64": "0", "PATH": ""}
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert out.stdout.split() == ["False", "None"]


@pytest.mark.parametrize(
    ("module", "extra"),
    [("matplotlib.figure", "plot"), ("requests", "data")],
)
def test_a_missing_extra_says_how_to_install_it(module, extra, monkeypatch):
    from bilevel._core.extras import require

    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'bilevel\[{extra}\]'"):
        require(module, extra)
