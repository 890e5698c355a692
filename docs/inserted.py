"""Insert numbers of the reports into README.md and the pages.

    python docs/inserted.py

A page names the number, text or table that it needs in a comment: the text between ``<!-- inserted: NAME -->`` and
``<!-- end -->`` is replaced by the text of that name in `TEXTS`. A test fails if a page differs from its reports.
"""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *(f"docs/{name}.md" for name in ("auto", "benchmark", "certificates", "choosing", "estimators")))
PAGES += (*(f"docs/{name}.md" for name in ("gallery", "index", "networks", "performance", "problems", "scale")),)
PAGES += ("docs/solvers.md", "docs/theory.md")
_REGION = re.compile(r"(<!-- inserted: (\w+) -->)(\n?)[^<]*(<!-- end -->)")


@cache
def _read(report):
    return (ROOT / "reports" / report).read_text(encoding="utf-8")


def read_table(report, heading, which=0):
    """Return the rows of a table below a heading, or below a line in bold, as dicts by column."""
    below = re.split(
        rf"^(?:#+ {heading}|\*\*{heading}\*\*|{heading}:)$", _read(report), maxsplit=1, flags=re.MULTILINE
    )[1]
    lines = re.findall(r"^\|.*\n(?:\|.*\n)+", below, re.MULTILINE)[which].splitlines()
    names, _, *rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [dict(zip(names, row, strict=True)) for row in rows]


def cells(report, heading, column, *rows, which=0):
    """Return one cell of each of these rows; a row is given by the texts of its first cells, joined by commas."""
    table = read_table(report, heading, which)
    found = []
    for wanted in rows:
        n_cells = wanted.count(" / ") + 1
        (row,) = [row for row in table if " / ".join([*row.values()][:n_cells]) == wanted]
        found.append(row[column])
    return found


def column(report, heading, name, which=0):
    """Return a column of a table as numbers, without their units."""
    return [float(row[name].split()[0].replace(",", "")) for row in read_table(report, heading, which)]


def quote(report, pattern):
    """Return the groups of a pattern that occurs once in the text of a report, whose lines are joined."""
    (found,) = re.findall(pattern, " ".join(_read(report).split()))
    return found if isinstance(found, tuple) else (found,)


def format_table(header, rows):
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *rows])


def copy_table(report, heading, names=None, which=0):
    """Return a table of a report, or those of its columns that are in a dict from new names to old ones."""
    rows = read_table(report, heading, which)
    names = names or {name: name for name in rows[0]}
    return format_table(list(names), [[row[old] for old in names.values()] for row in rows])


def _speed():
    """Three rows per problem: plain and fused times of one measurement, and the ratio to the reference in another."""
    rows = {}
    for row in read_table("performance.md", "Plain scripts"):
        for mode, name in {"plain": "plain, JAX 0.12", "fused": "fused, JAX 0.10"}.items():
            rows.setdefault(f"{row['problem']}, {mode}", {})[row["solver"]] = row[name]
        rows.setdefault(f"{row['problem']}, reference / ours", {})
    for row in read_table("performance.md", "Beside the field's reference"):
        rows[f"{row['problem']}, reference / ours"][row["solver"]] = f"{float(row['reference / ours, best']):.3g}"
    solvers = list(next(iter(rows.values())))
    return format_table(["µs per step", *solvers], [[name, *map(found.get, solvers)] for name, found in rows.items()])


def _steps_with_reference():
    names = {"problem": "problem", "solver": "solver", "ours, µs": "ours, best µs"}
    names |= {"reference, µs": "reference, best µs", "reference / ours": "reference / ours, best"}
    return copy_table("performance.md", "Beside the field's reference", names)


def _textbook():
    """Return the solvers that have a textbook version, on IJCNN1 and with their usual options."""
    rows = read_table("performance.md", "Time per step")
    rows = [row for row in rows if row["textbook median"] != "–" and "," not in row["solver"]]
    names = "solver", "median µs", "textbook median", "textbook / ours"
    header = ["solver", "ours, µs", "textbook, µs", "textbook / ours"]
    return format_table(header, [[row[name] for name in names] for row in rows])


def _textbook_ratios(*solvers):
    """Return how many times as long textbook versions take on quadratics and cleaning, as a range."""
    rows = [f"{problem} / {solver}" for problem in ("quadratics", "cleaning") for solver in solvers]
    found = cells("performance.md", "Time per step", "textbook / ours", *rows, which=1)
    return _span([*map(float, found)], ".2g")


def _compile_seconds():
    (text,) = quote("performance.md", r"all that a run on logistic selection compiles: (.*?)\. Loops over T")
    return _span([float(one) for one in re.findall(r"[\d.]+$", text.replace(", ", "\n"), re.MULTILINE)])


def _folds():
    """Seconds to 0.1 % of both ways, in one row per problem."""
    found = {}
    for row in read_table("problems.md", "Cross-validation"):
        found.setdefault(row["rows × features, classes"], []).append(row["to 0.1 %"])
    header = ["rows × features, classes", "exact fits", "`AutoSRBA()`"]
    return format_table(header, [[name, *times] for name, times in found.items()])


def _estimators(name, *lists):
    """Return a column of the default estimators on these lists of tables."""
    return [cells("estimators.md", heading, name, "bilevel")[0] for heading in lists]


DEVELOPMENT, LATER = "Sets used during development", "Later sets, used only once"


def _worst(*lists):
    """Return the largest increase of the test loss, such as 1.7 %."""
    texts = (text.split(" (")[0].lstrip("+") for text in _estimators("worst", *lists))
    return max(texts, key=lambda text: float(text[:-2]))


def _count_solvers():
    import bilevel

    return str(len(bilevel.SOLVERS) - 1)  # AutoSRBA is of this library


def _near_the_best():
    return str(sum(gap <= 0.1 for gap in column("auto.md", "Measured", "gap")))


def _examples(*rows, heading, name="test error", which=0):
    """Return the error with what an example learns, then those of what it is compared with."""
    learned, *others = cells("networks.md", heading, name, *rows, which=which)
    return f"{learned}; {', '.join(others)}"


def _auc(model):
    (text,) = cells("cleaning_classifiers.md", "AUC of wrong labels", model, "digits / by class 40 %")
    return f"{float(text):.2f}"


def _megabytes(row):
    """Return the state of a solver in MB."""
    (text,) = cells("performance.md", "Memory", "state, kB", row)
    return f"{float(text) / 1000:.2g}"


def _seconds_to_target(solver, name="median, s"):
    (text,) = cells("performance.md", "Time to a target", name, f"{solver} / 0.2086")
    return f"{float(text):.2g}"


def _span(values, form="g"):
    return f"{min(values):{form}} to {max(values):{form}}"


def _diverged_later():
    """Return the numbers of sets on which a tuned setting diverged in a longer run, as a range over the solvers."""
    rows = read_table("auto.md", "Measured", which=2)
    names = "SRBA tuned", "SABA tuned", "AmIGO tuned"
    return _span([sum(row[name].endswith(", diverged") and row[name][0] != "–" for row in rows) for name in names])


def _kernels(name):
    """Return the kernels of a step of SRBA on the three problems."""
    rows = "IJCNN1 / SRBA", "quadratics / SRBA", "cleaning / SRBA"
    first, second, third = (f"{float(text):g}" for text in cells("performance.md", "Kernels of a step", name, *rows))
    return f"{first}, {second} and {third}"


def _mixture(data, best):
    rows = (f"{data} / {mixture}" for mixture in ("learned", "uniform", best))
    return _examples(*rows, heading="Mixtures of sources", name="test loss")


TEXTS = {
    # README.md and estimators.md
    "n_tables": lambda: str(sum(map(int, _estimators("sets", DEVELOPMENT, LATER)))),
    "n_better": lambda: str(sum(map(int, _estimators("better", DEVELOPMENT, LATER)))),
    "worst_table": lambda: _worst(DEVELOPMENT, LATER),
    "first_tables": lambda: _estimators("sets", DEVELOPMENT)[0],
    "first_better": lambda: _estimators("better", DEVELOPMENT)[0],
    "first_worst": lambda: _worst(DEVELOPMENT),
    "later_tables": lambda: _estimators("sets", LATER)[0],
    "later_better": lambda: _estimators("better", LATER)[0],
    "later_worst": lambda: _worst(LATER),
    "first_fit": lambda: quote("estimators.md", r"first fit of the default took ([\d.]+) times the seconds")[0],
    "later_fit": lambda: quote("estimators.md", r"a later fit (\d+) times")[0],
    "auc_of_cleaning": lambda: _auc("DataCleaningClassifier"),
    "auc_of_confidence": lambda: _auc("cross_val_predict"),
    "cox_better": lambda: quote("cox.md", r"\(by concordance\) on (\d+) of \d+ tables")[0],
    "cox_tables": lambda: quote("cox.md", r"\(by concordance\) on \d+ of (\d+) tables")[0],
    "cox_concordance": lambda: quote("cox.md", r"concordance is higher on (\d+),")[0],
    "n_solvers": lambda: _count_solvers(),
    "speed": _speed,
    # auto.md and choosing.md
    "auto_problems": lambda: str(len(read_table("auto.md", "Measured"))),
    "auto_near": _near_the_best,
    "auto_seconds": lambda: quote("auto.md", r"The untuned run has (\d+) seconds of stepping")[0],
    "diverged_later": _diverged_later,
    "srba_state": lambda: _megabytes("cleaning / SRBA"),
    "saba_state": lambda: _megabytes("cleaning / SABA"),
    "saba_rows_state": lambda: _megabytes("cleaning / SABA, memory of rows"),
    # performance.md
    "steps_with_reference": _steps_with_reference,
    "plain_steps": lambda: copy_table("performance.md", "Plain scripts"),
    "textbook_steps": _textbook,
    "slowest_f2sa": lambda: quote("performance.md", r"on another day, with which the ratio would be (\d+)")[0],
    "compile_seconds": _compile_seconds,
    "textbook_two_loops": lambda: _textbook_ratios("StocBiO", "AmIGO", "MRBO", "VRBO", "F2SA"),
    "textbook_one_loop": lambda: _textbook_ratios("SRBA", "SOBA", "SABA"),
    "kernel_us": lambda: quote("performance.md", r"fit ([\d.]+) µs per kernel")[0],
    "srba_to_target": lambda: _seconds_to_target("SRBA, tuned"),
    "exact_to_target": lambda: _seconds_to_target("Exact"),
    "srba_kb": lambda: f"{float(cells('performance.md', 'Memory', 'state, kB', 'IJCNN1 / SRBA')[0]):g}",
    "sweep_together": lambda: cells("performance.md", "Sweeps", "µs each", "together")[0],
    "sweep_alone": lambda: cells("performance.md", "Sweeps", "µs each", "one by one")[0],
    "sweep_on_gpu": lambda: quote("performance.md", r"\| 200 × 10 \| [\d,]+ \| [\d.]+ \| ([\d.]+)")[0],
    "our_kernels": lambda: _kernels("kernels"),
    "their_kernels": lambda: _kernels("reference, kernels"),
    # scale.md
    "file_gb": lambda: quote("performance.md", r"labels of 8 bits, ([\d.]+) GB")[0],
    "file_memory": lambda: read_table("performance.md", "Rows from a file", 1)[0]["peak with mapped files, MB"],
    "file_pass": lambda: _span(column("performance.md", "Rows from a file", "pass, s")),
    "file_read": lambda: _span(column("performance.md", "Rows from a file", "plain read, s")),
    "file_step": lambda: read_table("performance.md", "Rows from a file", 1)[0]["a step of SOBA, µs"],
    # networks.md
    "network_memory": lambda: copy_table("networks.md", "Memory of a step"),
    "convolutions": lambda: copy_table("networks.md", "Convolutions on a CPU"),
    "noise": lambda: _examples(
        *("learned weights", "no weights", "the rows that cleanlab 2.9.0 keeps", "clean labels, which nobody has"),
        heading="Wrong labels",
    ),
    "noise_all": lambda: _examples(
        "learned weights", "no weights", "clean labels, which nobody has", heading="Wrong labels", which=1
    ),
    "noise_two": lambda: cells("networks.md", "Wrong labels", "test error", "learned loss", which=1)[0],
    "decay": lambda: _examples(
        "learned, one for each array", "searched, one for all", "searched, one for each", heading="Weight decay"
    ),
    "decay_longer": lambda: _examples(
        "learned, one for each array",
        *(f"searched, one for {what}, ten times the seconds" for what in ("all", "each")),
        heading="Weight decay",
    ),
    "text": lambda: _mixture("text", "best of 7"),
    "digits": lambda: _mixture("small digits", "best of 14"),
    "noise_memory": lambda: quote("networks.md", r"with learned weights, ([\d.]+) times as much")[0],
    # certificates.md
    "maid_steps": lambda: f"{sum(map(int, column('certificates.md', 'Steps of MAID', 'accepted steps'))):,}",
    "maid_least": lambda: f"{min(column('certificates.md', 'Steps of MAID', 'smallest decrease')):.0e}",
    "tightness": lambda: str(len(read_table("certificates.md", "How tight the certificates are"))),
    # problems.md
    "folds": _folds,
    "distilled": lambda: copy_table("problems.md", "Distillation"),
    # solvers.md and theory.md
    "acc_factor": lambda: quote("theory.md", r"within a factor of ([\d.]+ to [\d.]+) of what any linear method")[0],
    "gd_factor": lambda: quote("theory.md", r"with one step per loop up to (\d+) times")[0],
    # benchmark.md
    "sweep_ratio": lambda: f"{float(cells('performance.md', 'Sweeps', 'ratio', 'together')[0]):.2g}",
}


def insert(text):
    """Return the text of a page with its regions filled from the reports."""
    return _REGION.sub(lambda found: found[1] + found[3] + TEXTS[found[2]]() + found[3] + found[4], text)


if __name__ == "__main__":
    for name in PAGES:
        path = ROOT / name
        path.write_text(insert(path.read_text(encoding="utf-8")), encoding="utf-8")
