"""Draw the pictures "which solver?" and "which estimator?".

    python docs/choices.py        # writes docs/which-solver.svg and docs/which-estimator.svg

Questions stand on the left, one under the other. A yes leads to the right, a no to the next question.
"""

from html import escape
from pathlib import Path
from typing import NamedTuple


class Question(NamedTuple):
    """What is asked, and where a yes leads: a name of the library, and why."""

    text: str
    answer: str
    why: str


SOLVERS = (
    Question("Do you want a fitted model with fit and predict?", "an estimator", "it learns its penalties by itself"),
    Question("Are second derivatives out of reach?", "F2SA, F2SAp, FdeHBO", "gradients alone"),
    Question(
        "Is the inner level a network, or not convex?",
        "AutoSRBA",
        "with exact=False; read F, and held-out errors",
    ),
    Question("Is a Hessian over all rows cheap?", "Exact", "a few dozen exact steps"),
    Question("Are there more rows than one device holds?", "problem.sharded(…)", "then any solver, SRBA first"),
    Question("Will you tune steps, with room for tables?", "SABA", "fast once tuned; keeps tables"),
    Question("Will you tune steps, without that room?", "SRBA", "near-optimal; keeps no tables"),
)
ESTIMATORS = (
    Question("Are some labels wrong?", "DataCleaningClassifier", "ranks and weighs rows by how right they are"),
    Question("Are targets times to an event?", "BilevelCoxPH", "scikit-survival's conventions"),
    Question(
        "Should useless features get a coefficient of 0?",
        "BilevelElasticNet",
        "of classes: BilevelSparseLogisticRegression",
    ),
    Question("Are targets classes?", "BilevelLogisticRegression", "give groups where features come in kinds"),
    Question("Are targets counts?", "BilevelPoissonRegressor", "log link"),
    Question("Are targets positive, with errors in proportion?", "BilevelGammaRegressor", "log link"),
    Question(
        "Are there outliers among the targets?", "BilevelHuberRegressor", "residuals count linearly beyond a scale"
    ),
)
PICTURES = {
    "which-solver.svg": ("Which solver?", SOLVERS, Question("", "AutoSRBA", "no tuning; begin here if unsure")),
    "which-estimator.svg": ("Which estimator?", ESTIMATORS, Question("", "BilevelRidge", "one target or thousands")),
}
WIDTH, ROW, TOP = 860, 74, 56
LEFT, ASKED, RIGHT, ANSWERED, HIGH = 14, 400, 494, 352, 48
STYLE = """
text { font: 15px system-ui, sans-serif; fill: #1b1f24; } .title { font-size: 20px; font-weight: 600; }
.name { font: 600 14px ui-monospace, monospace; } .why { font-size: 13px; fill: #4a5560; }
.word { font-size: 12px; fill: #4a5560; } .asked { fill: #eef1f6; stroke: #8a96a8; }
.answer { fill: #e3f1ea; stroke: #3c8a63; } path { stroke: #6b7785; stroke-width: 1.5; fill: none; }
.tip { fill: #6b7785; stroke: none; }
@media (prefers-color-scheme: dark) { .ground { fill: #14181d; } text { fill: #e8ebef; }
.why, .word { fill: #b3bcc7; } .asked { fill: #232a33; stroke: #77849a; } .answer { fill: #17362a; stroke: #58b98a; } }
"""


def text(x, y, words, kind="", anchor="start"):
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x, y, width, kind):
    return f'<rect x="{x}" y="{y}" width="{width}" height="{HIGH}" rx="8" class="{kind}"/>'


def arrow(x, y, across, down):
    """A line to a tip, to the right or downwards."""
    tip = f"l -8 -5 v 10 z M {x + across} {y}" if across else f"l -5 -8 h 10 z M {x} {y + down}"
    return f'<path d="M {x} {y} l {across} {down}"/><path class="tip" d="M {x + across} {y + down} {tip}"/>'


def answer(y, question, x=RIGHT, width=ANSWERED):
    middle = x + width // 2
    words = text(middle, y + 20, question.answer, "name", "middle") + text(
        middle, y + 38, question.why, "why", "middle"
    )
    return box(x, y, width, "answer") + words


def ask(y, question):
    parts = [box(LEFT, y, ASKED, "asked"), text(LEFT + ASKED // 2, y + 29, question.text, anchor="middle")]
    parts += [arrow(LEFT + ASKED, y + 24, RIGHT - LEFT - ASKED - 2, 0), text(LEFT + ASKED + 24, y + 18, "yes", "word")]
    parts += [arrow(LEFT + 60, y + HIGH, 0, ROW - HIGH - 2), text(LEFT + 70, y + HIGH + 17, "no", "word")]
    return "".join([*parts, answer(y, question)])


def draw(title, questions, last):
    """The picture as SVG, with every word of it in its description."""
    height = TOP + ROW * len(questions) + HIGH + 14
    told = " ".join(f"{one.text} {one.answer}." for one in questions) + f" Otherwise {last.answer}."
    rows = [ask(TOP + ROW * place, question) for place, question in enumerate(questions)]
    end = answer(TOP + ROW * len(questions), last, LEFT, ASKED)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    names = f"<title>{escape(title)}</title><desc>{escape(told)}</desc><style>{STYLE}</style>"
    ground = f'<rect class="ground" width="{WIDTH}" height="{height}" rx="10" fill="#ffffff"/>'
    return "\n".join([head, names, ground, text(LEFT, 34, title, "title"), *rows, end, "</svg>", ""])


if __name__ == "__main__":
    for name, picture in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw(*picture), encoding="utf-8")
