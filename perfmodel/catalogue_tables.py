"""The catalogue's tables, from the frames of `perfmodel.catalogue`: HTML, every text escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from perfmodel import api
from perfmodel.catalogue import CAPEX, MACHINE_METRICS, MODEL_METRICS, PRICES, pick, total_of
from perfmodel.show import number
from perfmodel.text import si

Cell = tuple[str, str]  # what is shown, what hovering says


def html_table(head: Sequence[Cell], rows: Iterable[Sequence[Cell]], caption: str) -> str:
    """Return a table whose first column names the card; every text is escaped."""

    def cell(tag: str, text: str, title: str, n: int, scope: str) -> str:
        kept = "position:sticky;left:0;background:var(--jp-layout-color0,#fff)" if n == 0 else ""
        style = f"text-align:{'left' if n == 0 else 'right'};padding:2px 5px;{kept}"
        hover = f' title="{html.escape(title)}"' if title else ""
        return f'<{tag}{scope}{hover} style="{style}">{html.escape(text)}</{tag}>'

    top = "".join(cell("th", *c, n, ' scope="col"') for n, c in enumerate(head))
    lines = [
        "".join(
            cell("td" if n else "th", *c, n, "" if n else ' scope="row"') for n, c in enumerate(row)
        )
        for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f"<div>{html.escape(caption)}</div>"
        '<div class="perfmodel-table" style="overflow-x:auto" tabindex="0"><table style="'
        "white-space:nowrap;font-size:12px;font-variant-numeric:tabular-nums;cursor:help;"
        f'line-height:1.35"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cells(
    frame: pd.DataFrame, columns: Sequence[tuple[str, str, dict[str, Any], float, str]]
) -> list[list[Cell]]:
    """Rows of a table: (head, metric, where, factor, unit) a column, one card a row."""
    out: dict[str, list[Cell]] = {}
    for card, label, name in frame[["id", "label", "name"]].drop_duplicates().itertuples(False):
        out[str(card)] = [(str(label), str(name))]
    for _, metric, where, scale, unit in columns:
        rows = pick(frame, metric, **where)
        if "context" in rows:
            rows = total_of(rows)
        found: dict[str, Any] = {str(r.id): r for r in rows.itertuples()}
        for card, cells in out.items():
            r = found.get(card)
            if r is None:
                cells.append(("–", "not on the card"))
            elif r.missing:
                cells.append(("–", r.source))
            else:
                shown = si(r.value * scale, unit) if unit else number(r.value * scale)
                span = "" if r.low != r.low else f" to {number(r.high * scale)}"
                title = r.source if not span else f"range {number(r.low * scale)}{span}; {r.source}"
                cells.append((shown, title))
    return list(out.values())


def machine_table(frame: pd.DataFrame, precision: str, power_set: str, price_set: str) -> str:
    """Return the machines side by side as HTML; hovering over a number says its source."""
    money = "USD" if price_set == CAPEX else "USD/h"
    at, rate = {"precision": precision}, precision.upper()
    columns: list[tuple[str, str, dict[str, Any], float, str]] = [
        *((f"{p.upper()} peak", "peak", {"part": p}, 1.0, "FLOP/s") for p in _rates(frame)),
        ("HBM bandwidth", "bandwidth", {}, 1.0, "B/s"),
        ("HBM", "memory", {"part": "one GPU"}, 1.0, "B"),
        ("domain GPUs", "domain", {}, 1.0, "1"),
        ("domain HBM", "memory", {"part": "scale-up domain"}, 1.0, "B"),
        *((f"{p.upper()} ridge", "ridge", {"part": p}, 1.0, "") for p in _rates(frame)),
        (f"B/kFLOP, {rate}", "bytes_per_flop", {"part": "HBM", **at}, 1e3, ""),
        ("power", "power", {}, 1.0, "W"),
        (f"W per TFLOP/s, {rate}", "power_per_flops", at, 1e12, ""),
        ("W per TB/s", "power_per_bandwidth", {}, 1e12, ""),
        (money, "price", {}, 1.0, ""),
        (f"{money} per PFLOP/s, {rate}", "price_per_flops", at, 1e15, ""),
        (f"{money} per TB/s", "price_per_bandwidth", {}, 1e12, ""),
    ]
    head = [("machine", "id of the card")]
    head += [(name, MACHINE_METRICS[metric][1]) for name, metric, *_ in columns]
    caption = (
        f"Per GPU, dense peaks. Power: {api.POWER_BASES[power_set]}. Price: {PRICES[price_set]}. "
        "Hover over a number for its source."
    )
    return html_table(head, _cells(frame, columns), caption)


def _rates(frame: pd.DataFrame) -> list[str]:
    return [str(x) for x in pick(frame, "peak")["part"].drop_duplicates()]


def model_table(frame: pd.DataFrame, context: int, precision: str) -> str:
    """Return the models side by side as HTML; hovering over a number says its source."""
    at = {"context": context}
    columns: list[tuple[str, str, dict[str, Any], float, str]] = [
        ("total, G", "total", {}, 1e-9, ""),
        ("published", "total_published", {}, 1e-9, ""),
        ("active, G", "active", {}, 1e-9, ""),
        ("published", "active_published", {}, 1e-9, ""),
        ("weights", "weights", {}, 1.0, "B"),
        ("KV a token", "kv_per_token", at, 1.0, "B"),
        ("fixed state", "state", {}, 1.0, "B"),
        ("cache", "cache", at, 1.0, "B"),
        ("cache moved", "read", at, 1.0, "B"),
        ("FLOP a token", "flops", at, 1.0, "FLOP"),
    ]
    head = [("model", "id of the card")]
    head += [(name, MODEL_METRICS[metric][1]) for name, metric, *_ in columns]
    caption = (
        f"Precision {precision}, context {context:,} tokens; cache of one sequence; G: billions of "
        "parameters. Hover over a number for its source."
    )
    return html_table(head, _cells(frame, columns), caption)
