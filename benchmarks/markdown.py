"""Tables as Markdown."""


def table(columns, rows):
    """A table of cells that are strings or None, which is shown as a dash."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join("–" if cell is None else cell for cell in line) + " |" for line in lines)


def number(value, digits=3):
    """A number with so many digits that count, without an exponent where it is of ordinary size."""
    if value is None:
        return None
    if 1e-3 <= abs(value) < 1e6:
        decimals = max(0, digits - 1 - int(f"{value:e}".partition("e")[2]))
        return f"{value:.{decimals}f}"
    return f"{value:.{digits - 1}e}"
