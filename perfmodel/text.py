"""Plain text for a terminal: numbers with SI prefixes and aligned tables."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 100
_PREFIXES = {-12: "p", -9: "n", -6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P"}
_PREFIXED = {"B", "B/s", "FLOP", "FLOP/s", "s", "W"}


def si(value: float | None, unit: str = "1") -> str:
    """Return value (in the SI unit `unit`) with three digits, such as "4.80 TB/s" or "37.0 µs".

    Bytes, FLOP, seconds and watts (and rates of them) get an SI prefix; other units keep their
    name, with thousands separated; unit "1" has no name. None is a dash.
    """
    if value is None or not math.isfinite(value):
        return "-"
    if unit not in _PREFIXED:
        return f"{plain(value)} {unit}" if unit != "1" else plain(value)
    if value == 0:
        return f"0 {unit}"
    # Rounded first, so that 999.9 becomes 1.00 k and not 1e+03.
    value = float(f"{value:.2e}")
    power = min(max(3 * math.floor(math.log10(abs(value)) / 3), -12), 15)
    scaled = value / 10.0**power
    if unit in ("B", "FLOP") and power < 0:  # no part of a byte
        return f"{plain(value)} {unit}"
    return f"{_three(scaled)} {_PREFIXES[power]}{unit}"


def _three(value: float) -> str:
    size = abs(value)
    return f"{value:,.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"


def plain(value: float) -> str:
    """Return value with at least four digits and no prefix: "1,234", "0.3412", "1.2e+12"."""
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    if 1000 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    align: str,
    width: int = WIDTH,
    stretch: int = 0,
) -> str:
    """Return an aligned table, at most `width` columns wide.

    align has an "l" or "r" for each column. Column number `stretch` is wrapped (its other lines
    follow below) when the table would be wider than `width`.
    """
    cells = [[str(c) for c in row] for row in rows]
    sizes = [max(len(r[i]) for r in [list(head), *cells]) for i in range(len(head))]
    over = sum(sizes) + 2 * (len(sizes) - 1) - width
    if over > 0:
        sizes[stretch] = max(sizes[stretch] - over, len(head[stretch]), 12)

    def line(row: Sequence[str]) -> list[str]:
        parts = textwrap.wrap(row[stretch], sizes[stretch]) or [""]
        out = []
        for n, part in enumerate(parts):
            shown = [part if i == stretch else (c if n == 0 else "") for i, c in enumerate(row)]
            padded = (
                c.rjust(s) if a == "r" else c.ljust(s)
                for c, s, a in zip(shown, sizes, align, strict=True)
            )
            out.append("  ".join(padded).rstrip())
        return out

    lines = [*line(head), "  ".join("-" * s for s in sizes)]
    for row in cells:
        lines += line(row)
    return "\n".join(lines)


def fields(pairs: Iterable[tuple[str, str]], width: int = WIDTH) -> str:
    """Return "name  value" lines with the values aligned and wrapped at `width` columns."""
    known = list(pairs)
    indent = max((len(name) for name, _ in known), default=0) + 2
    lines = []
    for name, value in known:
        wrapped = textwrap.wrap(value, max(width - indent, 20)) or [""]
        lines.append(f"{name:<{indent}}{wrapped[0]}".rstrip())
        lines += [" " * indent + part for part in wrapped[1:]]
    return "\n".join(lines)
