"""Tables, for people."""

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Lay out a table in plain text: the first `left` columns to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(head), *map(line, rows)])


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Lay out a table in Markdown."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    rule = [":--" if i < left else "--:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))
