"""Display helpers for notebooks: right on screen, and carrying what a printed report needs.

Tables and text are shown as Markdown, figures as vector pictures with caption and label in the
output's metadata.  `perfmodel.report` turns them into numbered tables, figures and equations; a
text may point at them with `@fig-...` and `@tbl-...`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape as html_escape
from typing import Any

from IPython.display import display

from perfmodel import charts

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#$|~^@])")


def escape(text: object) -> str:
    """Return text with Markdown's special characters made literal, on one line."""
    out = _SPECIAL.sub(r"\\\1", " ".join(str(text).split()))
    return out.replace("--", r"-\-")  # not a dash


def number(x: float | None, digits: int = 3) -> str:
    """Return x rounded to significant digits, with thousands separators; a dash for None or nan."""
    if x is None or x != x:
        return "–"
    if x in (float("inf"), float("-inf")):
        return "∞" if x > 0 else "−∞"
    if x == 0:
        return "0"
    exponent = int(f"{x:.{digits - 1}e}".split("e")[1])  # after rounding: 999.9 has exponent 3
    return f"{round(x, digits - 1 - exponent):,.{max(0, digits - 1 - exponent)}f}"


def text(markdown: str) -> None:
    """Show Markdown."""
    display({"text/markdown": markdown, "text/plain": markdown}, raw=True)


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str = "",
    label: str = "",
    align: str = "",
) -> None:
    """Show a table; cells are Markdown (see `escape`), floats are shown with 3 digits.

    `align` has one letter a column, l or r; by default the first column is left, the others right.
    Raises ValueError when a row or `align` doesn't have as many entries as `head`.
    """
    align = align or "l" + "r" * (len(head) - 1)
    cells = [
        [number(c) if c is None or isinstance(c, float) else str(c) for c in row] for row in rows
    ]
    for row in [align, *cells]:
        if len(row) != len(head):
            raise ValueError(f"table {label!r}: {len(row)} entries, expected {len(head)}: {row!r}")
    rule = [":---" if a == "l" else "---:" for a in align]
    lines = ["| " + " | ".join(row) + " |" for row in [list(head), rule, *cells]]
    markdown = "\n".join(lines) + "\n"
    if caption:
        markdown += f"\n: {caption}" + (f" {{#{label}}}" if label else "") + "\n"
    display(
        {
            "text/markdown": markdown,
            "text/html": _html(head, cells, caption, align),
            "text/plain": "\n".join("\t".join(row) for row in [list(head), *cells]),
        },
        raw=True,
    )


def _html(head: Sequence[str], cells: list[list[str]], caption: str, align: str) -> str:
    """Return the table for the screen, where Markdown's table captions are unknown."""
    side = {"l": "left", "r": "right"}

    def row(tag: str, values: Sequence[str]) -> str:
        inner = "".join(
            f'<{tag} style="text-align:{side[a]}">{_plain(v)}</{tag}>'
            for a, v in zip(align, values, strict=True)
        )
        return f"<tr>{inner}</tr>"

    body = "".join(row("td", r) for r in cells)
    title = f"<caption>{_plain(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead>{row('th', head)}</thead><tbody>{body}</tbody></table>"


def _plain(markdown: str) -> str:
    """Return the text of simple Markdown (bold, superscripts, escapes) as HTML."""
    out = html_escape(markdown, quote=False)
    out = re.sub(r"(?<!\\)\*\*(.+?)\*\*", r"<b>\1</b>", out)
    out = re.sub(r"(?<!\\)\^(\w+)\^", r"<sup>\1</sup>", out)
    return re.sub(r"\\([^\w\s])", r"\1", out)


def figure(chart: Any, *, caption: str = "", label: str = "") -> None:
    """Show an Altair chart, or its specification, as a vector picture (SVG, PDF in print)."""
    spec = chart if isinstance(chart, dict) else chart.to_dict()
    display(charts.vector_bundle(spec), metadata={"caption": caption, "label": label}, raw=True)


def equations(items: Iterable[tuple[str, str]]) -> None:
    """Show (LaTeX, explanation) pairs as numbered equations, aligned at their first equals sign."""
    parts = [f"$$\n{latex.strip()}\n$$\n\n{doc.strip()}\n" for latex, doc in items]
    markdown = "\n".join(parts)
    # The template makes this a div for refs.lua; a notebook's own Markdown doesn't know divs.
    display(
        {"text/markdown": markdown, "text/plain": markdown},
        metadata={"div": "equations"},
        raw=True,
    )
