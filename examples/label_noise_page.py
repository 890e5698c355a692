"""The page of `label_noise.py`: a self-contained HTML file."""

import base64
import struct
import zlib
from html import escape
from pathlib import Path

import numpy as np

WIDTH, HEIGHT, MARGIN = 460, 260, 44
COLORS = {
    "no weights": "#777777",
    "cleanlab's filter": "#d08a1d",
    "learned weights": "#1f5fae",
    "learned loss": "#8a3fa0",
    "clean labels": "#2e8b57",
}
WORST, SCALE = 40, 2
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "figure{display:inline-block;margin:.3rem;text-align:center;font-size:.8rem}td,th{padding:.2rem 1rem .2rem 0;"
    "text-align:left}img{image-rendering:pixelated}svg{max-width:100%;height:auto}"
)


def write(data, runs, logits, right, table, about, page=None, figure=None):
    """Write the page, or only two pictures, from the runs of one seed, the logits of their weights, and the table."""
    curves, *histograms = draw_curves(runs), *(draw_histogram(kind, right) for kind in logits.values())
    if figure:
        Path(figure).write_text(beside(curves, histograms[0]), encoding="utf-8")
    if page:
        by_kind = zip(logits, histograms, strict=True)
        weights = "".join(f"<h2>Weights of right and of wrong labels: {escape(k)}</h2>{drawn}" for k, drawn in by_kind)
        parts = (
            f"<h1>Images with wrong labels</h1><p>{escape(about)}.</p>",
            draw_table(table),
            f"<h2>Test error along the runs of the last seed</h2>{curves}",
            weights,
            f"<h2>The {WORST} rows with the lowest weights</h2>{draw_worst(data, next(iter(logits.values())))}",
        )
        head = f"<meta charset='utf-8'><title>Images with wrong labels</title><style>{STYLE}</style>"
        document = f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>"
        Path(page).write_text(document, encoding="utf-8")


def draw_table(table):
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{value}</td></tr>" for name, value in table.items())
    return f"<table><tr><th></th><th>test error, or what is named</th></tr>{rows}</table>"


def draw_curves(runs):
    """Draw test errors against steps on a log scale; a dot marks the selected point."""
    last = max(run.history["step"][-1] for run in runs.values())
    values = np.concatenate([run.history["test_error"][1:] for run in runs.values()])
    low, high = max(values.min(), 1e-4), max(values.max(), 2e-4)

    def place(step, error):
        share = np.log(np.clip(error, low, high) / low) / np.log(high / low)
        return MARGIN + step / last * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN)

    marks = [_text(4, place(0, value)[1] + 4, f"{100 * value:.2g} %") for value in np.geomspace(low, high, 4)]
    for number, (name, run) in enumerate(runs.items()):
        color = COLORS[name]
        spots = [place(*pair) for pair in zip(run.history["step"][1:], run.history["test_error"][1:], strict=True)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        x, y = place(run.history["step"][run.best_row], run.history["test_error"][run.best_row])
        marks.append(f"<polyline points='{line}' fill='none' stroke='{color}' stroke-width='2'/>")
        marks.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='{color}'/>")
        marks.append(_text(MARGIN + 150 * (number // 2), 16 + 15 * (number % 2), name, color))
    marks += [_text(MARGIN, HEIGHT - 12, "step 0"), _text(WIDTH - MARGIN - 40, HEIGHT - 12, f"{last:,}")]
    return _svg("Test error against steps", marks)


def draw_histogram(logits, right, bins=30):
    """Draw histograms of the weights of rows with wrong labels and with correct labels."""
    weights = (1 + np.tanh(logits / 2)) / 2
    marks, width = [], (WIDTH - 2 * MARGIN) / bins
    counts = [np.histogram(weights[part], bins, (0, 1))[0] / max(1, part.sum()) for part in (right, ~right)]
    highest = max(count.max() for count in counts)
    for number, (count, color, name) in enumerate(zip(counts, ("#1f5fae", "#d08a1d"), ("right", "wrong"), strict=True)):
        for place, share in enumerate(count):
            tall = share / highest * (HEIGHT - 2 * MARGIN)
            box = f"x='{MARGIN + place * width:.1f}' y='{HEIGHT - MARGIN - tall:.1f}' width='{width:.1f}'"
            marks.append(f"<rect {box} height='{tall:.1f}' fill='{color}' fill-opacity='0.55'/>")
        marks.append(_text(WIDTH // 2 - 40, 16 + 15 * number, f"{name} labels", color))
    marks += [_text(MARGIN - 4, HEIGHT - 24, "0"), _text(WIDTH // 2 - 20, HEIGHT - 12, "weight")]
    return _svg("Histogram of learned weights", [*marks, _text(WIDTH - MARGIN - 4, HEIGHT - 24, "1")])


def draw_worst(data, logits):
    """Show the rows with the lowest weights, with given and true labels."""
    images, given = data.train
    return "".join(
        f"<figure><img src='{png(images[row])}' width='{28 * SCALE}' height='{28 * SCALE}' alt='a digit'>"
        f"<figcaption>{given[row]}, true {data.true[row]}</figcaption></figure>"
        for row in np.argsort(logits)[:WORST]
    )


def png(image):
    """Return a gray image with values in [0, 1] as a data URI."""
    height, width = image.shape
    pixels = np.round(255 * (1 - image)).astype(np.uint8)
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()


def beside(first, second):
    """Return two pictures as one SVG."""
    moved = second.replace("<svg ", f"<svg x='{WIDTH}' ", 1)
    size = f"width='{2 * WIDTH}' height='{HEIGHT}' viewBox='0 0 {2 * WIDTH} {HEIGHT}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size}>{first}{moved}</svg>\n"


def _svg(title, marks):
    size = f"width='{WIDTH}' height='{HEIGHT}' viewBox='0 0 {WIDTH} {HEIGHT}'"
    frame = f"x='{MARGIN}' y='{MARGIN}' width='{WIDTH - 2 * MARGIN}' height='{HEIGHT - 2 * MARGIN}'"
    box = f"<rect {frame} fill='none' stroke='#999'/>"
    opening = f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img' aria-label='{escape(title)}'>"
    return f"{opening}<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>{box}{''.join(marks)}</svg>"


def _text(x, y, words, color="#333"):
    place = f"x='{x:.1f}' y='{y:.1f}' font-size='11' font-family='sans-serif'"
    return f"<text {place} fill='{color}'>{escape(words)}</text>"
