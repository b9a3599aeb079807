"""The catalogue's charts and tables, from the frames of `perfmodel.catalogue`.

Every mark and every cell has its source in what hovering shows. Texts of cards are only ever data
of a chart, or escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt
import pandas as pd

from perfmodel import api
from perfmodel.catalogue import (
    CAPEX,
    MACHINE_METRICS,
    MODEL_METRICS,
    PRICES,
    kilo,
    pick,
    total_of,
)
from perfmodel.charts import COLOURS, ZERO, finish
from perfmodel.show import number
from perfmodel.text import si

SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")

FAMILIES = {  # tensor class: what the bar of weights shows together
    "experts": "routed experts",
    "shared": "shared and dense FFN",
    "dense": "shared and dense FFN",
    "attention": "attention",
    "attention_out": "attention",
    "compressor": "attention",
    "indexer": "attention",
    "head": "head and embedding",
    "embedding": "head and embedding",
    "vision": "vision tower",
}
OTHER = "router, latent, residual, other"
FAMILY_ORDER = (*dict.fromkeys(FAMILIES.values()), OTHER)


def by_value(rows: pd.DataFrame) -> list[str]:
    """Labels by their largest value, the largest first; those without a value last."""
    most = rows.groupby("label", sort=False)["value"].max()
    return [str(x) for x in most.sort_values(ascending=False, kind="stable").index]


def _y(order: Sequence[str], shown: bool = True, grid: bool = False) -> alt.Y:
    axis = alt.Axis(
        labelLimit=230, ticks=False, domain=False, grid=grid, gridOpacity=0.25, labels=shown,
        labelPadding=6,
    )  # fmt: skip
    return alt.Y(
        "label:N", title=None, sort=list(order), scale=alt.Scale(domain=list(order)), axis=axis
    )


def _tips(*named: tuple[str, str]) -> list[alt.Tooltip]:
    every = (("name", "Card"), *named, ("shown", "Value"), ("span", "Range"), ("source", "Source"))
    return [alt.Tooltip(f"{column}:N", title=title) for column, title in every]


def _worded(rows: pd.DataFrame, scale: float, unit: str) -> pd.DataFrame:
    """Rows with value, low and high times `scale`, and the columns that tooltips show."""
    out = rows.copy()
    for column in ("value", "low", "high"):
        out[column] = out[column] * scale
    pairs = zip(out["value"], out["missing"], strict=True)
    out["shown"] = [why or f"{number(v)} {unit}".strip() for v, why in pairs]
    ends = zip(out["low"], out["high"], strict=True)
    out["span"] = [f"{number(a)} to {number(b)}" if a == a else "none" for a, b in ends]
    return out


def _ticks(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis: 1, 2, 5 of each decade, or 1 only where there are many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if math.log10(high / low) < 3 else (1,)
    every = (float(f"{k}e{n}") for n in range(first, last + 1) for k in steps)
    return [x for x in every if low / 1.2 <= x <= high * 1.2]


def dots(
    rows: pd.DataFrame,
    *,
    title: str,
    unit: str,
    series: Sequence[str],
    by: str = "part",
    legend: str = "",
    scale: float = 1.0,
    order: Sequence[str] | None = None,
    nested: bool = False,
    width: int = 470,
    step: int = 19,
    description: str,
) -> Any:
    """Return a row a card and a mark a series over a logarithmic axis; ranges as wide bars.

    `rows` are of a frame; `by` is the column whose values `series` are, in the order of the legend.
    Values are shown times `scale`, in `unit`. `nested` makes the marks of later series smaller, so
    that those at one place are all seen, and lists all of a card's in the tooltip.
    """
    names = [str(s) for s in series]
    data = _worded(rows, scale, unit)
    data["series"] = [str(x) for x in data[by]]
    order = list(order or by_value(data))
    found = data.dropna(subset=["value"])
    found = found[found["value"] > 0]  # a logarithm has no place for nothing
    place = [names.index(x) for x in found["series"]]
    found = found.assign(
        shade=[COLOURS[i % len(COLOURS)] for i in place],
        size=[240 / 1.7**i if nested else 62 for i in place],
    )
    extent = pd.concat([found[k].dropna() for k in ("value", "low", "high")])
    x = alt.X(
        "value:Q", title=title, scale=alt.Scale(type="log", nice=False, padding=14),
        axis=alt.Axis(format=",~r", values=_ticks(extent.min(), extent.max())),
    )  # fmt: skip
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(names))]
    shapes = [SHAPES[i % len(SHAPES)] for i in range(len(names))]
    key = alt.Legend(title=legend or None, orient="top", symbolSize=90, columns=6)
    colour = alt.Color("series:N", scale=alt.Scale(domain=names, range=colours), legend=key)
    y = _y(order, grid=True)
    line = (
        alt.Chart(found)
        .mark_line(color="#888888", strokeWidth=1, opacity=0.6)
        .encode(x=x, y=y, detail="label:N", order="value:Q")
    )
    spans = (
        alt.Chart(found.dropna(subset=["low"]))
        .mark_rule(strokeWidth=6, opacity=0.35)
        # colours without a scale, so that the legend stays that of the marks
        .encode(
            x=alt.X("low:Q", title=title), x2="high:Q", y=y,
            stroke=alt.Stroke("shade:N", scale=None),
        )
    )  # fmt: skip
    tips = [("series", legend or "What")]
    if nested:
        found = found.assign(
            every=[
                "; ".join(f"{s}: {v}" for s, v in zip(r["series"], r["shown"], strict=True))
                for r in (found[found["label"] == x] for x in found["label"])
            ]
        )
        tips.append(("every", "All"))
    points = (
        alt.Chart(found)
        .mark_point(filled=True, opacity=1)
        .encode(
            x=x, y=y, color=colour,
            shape=alt.Shape("series:N", scale=alt.Scale(domain=names, range=shapes), legend=key),
            size=alt.Size("size:Q", scale=None), tooltip=_tips(*tips),
        )
    )  # fmt: skip
    chart = alt.layer(line, spans, points).properties(width=width, height=alt.Step(step))
    return finish(chart, description)


def bars(
    panels: Sequence[tuple[str, pd.DataFrame, float, str]],
    *,
    description: str,
    width: int = 215,
    step: int = 19,
) -> Any:
    """Return panels of bars beside each other, one row a card, ordered by the first panel.

    A panel is (axis title, rows of a frame, factor that the values are shown times, unit). A card
    without the number keeps its row, and the row says why. Ranges are thin lines.
    """
    order = by_value(panels[0][1])
    drawn = []
    for n, (title, rows, scale, unit) in enumerate(panels):
        data = _worded(rows, scale, unit)
        ends = zip(data["value"], data["high"], data["missing"], strict=True)
        data["end"] = [0.0 if why else max(v, h) if h == h else v for v, h, why in ends]
        data["text"] = [
            why.removesuffix(" on the card") or number(v)
            for v, why in zip(data["value"], data["missing"], strict=True)
        ]
        y = _y(order, shown=n == 0)
        x = alt.X(
            "value:Q", title=title, scale=alt.Scale(zero=True, nice=True),
            axis=alt.Axis(tickCount=4, format=",~r"),
        )  # fmt: skip
        found = data.dropna(subset=["value"])
        bar = alt.Chart(found).mark_bar(color=COLOURS[n], height={"band": 0.7})
        ranged = alt.Chart(found.dropna(subset=["low"]))
        # dark on light, so that it is seen on the bar and on any page
        spans = [
            ranged.mark_rule(strokeWidth=w, color=colour).encode(
                x=alt.X("low:Q", title=title), x2="high:Q", y=y
            )
            for w, colour in ((4, "#ffffff"), (2, "#333333"))
        ]
        words = alt.Chart(data).mark_text(align="left", dx=5, fontSize=10)
        layers = alt.layer(
            bar.encode(x=x, y=y, tooltip=_tips()),
            *spans,
            words.encode(x=alt.X("end:Q", title=title), y=y, text="text:N", tooltip=_tips()),
        )
        drawn.append(layers.properties(width=width, height=alt.Step(step)))
    return finish(alt.hconcat(*drawn, spacing=44), description)


def stacked(
    rows: pd.DataFrame,
    *,
    title: str,
    unit: str,
    groups: Sequence[str],
    scale: float = 1.0,
    share: bool = False,
    tips: Sequence[tuple[str, str]] = (),
    width: int = 470,
    step: int = 19,
    description: str,
) -> Any:
    """Return one bar a card, its parts behind each other in the order of `groups`, and the sum.

    Column `group` says which of `groups` a part belongs to. With `share` every bar is as long as
    the others; the sum stands beside it all the same. `tips` are more (column, title) to hover.
    """
    data = _worded(rows, scale, unit)
    data["rank"] = [list(groups).index(g) for g in data["group"]]
    found = data.dropna(subset=["value"])
    sums = data.groupby("label", sort=False)["value"].sum(min_count=1)
    order = [str(x) for x in sums.sort_values(ascending=False, kind="stable").index]
    found = found.assign(
        of=[v / sums[x] for v, x in zip(found["value"], found["label"], strict=True)]
    )
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(groups))]
    y = _y(order)
    value = "of:Q" if share else "value:Q"
    axis = alt.Axis(format="%" if share else ",~r", tickCount=5, labelExpr=ZERO)
    x_scale = alt.Scale(domain=[0, 1]) if share else alt.Scale(zero=True)
    bar = (
        alt.Chart(found)
        .mark_bar(stroke="white", strokeWidth=0.4 if share else 0, height={"band": 0.75})
        .encode(
            x=alt.X(value, title=title, stack="zero", scale=x_scale, axis=axis),
            y=y,
            color=alt.Color(
                "group:N",
                scale=alt.Scale(domain=list(groups), range=colours),
                legend=alt.Legend(title=None, orient="top", columns=3, labelLimit=220),
            ),
            order=alt.Order("rank:Q"),
            tooltip=[
                *(t for t in _tips(("part", "Part"), *tips) if t.title != "Range"),
                alt.Tooltip("of:Q", title="Share", format=".1%"),
            ],
        )
    )
    why = dict(zip(data["label"], data["missing"], strict=True))
    total = pd.DataFrame(
        {
            "label": order,
            "end": [(1.0 if share else sums[x]) if sums[x] == sums[x] else 0.0 for x in order],
            "text": [f"{number(sums[x])} {unit}" if sums[x] == sums[x] else why[x] for x in order],
        }
    )
    words = (
        alt.Chart(total)
        .mark_text(align="left", dx=5, fontSize=10)
        .encode(x=alt.X("end:Q", title=title), y=y, text="text:N")
    )
    chart = alt.layer(bar, words).properties(width=width, height=alt.Step(step))
    return finish(chart, description)


# ---- the charts of the notebook


def ridge_chart(frame: pd.DataFrame) -> Any:
    """Ridge points of machines, one mark a precision."""
    rows = pick(frame, "ridge")
    return dots(
        rows, title="Ridge point (FLOP per byte of HBM)", unit="FLOP/B",
        series=list(dict.fromkeys(rows["part"])), legend="Precision",
        description="Dot chart: ridge point of each machine, in FLOP per byte, by precision.",
    )  # fmt: skip


def bytes_per_flop_chart(frame: pd.DataFrame, precision: str) -> Any:
    """Bytes that memory and links move per FLOP at a precision's peak."""
    rows = pick(frame, "bytes_per_flop", precision=precision)
    return dots(
        rows, title=f"Bytes per 1000 FLOP at the {precision.upper()} peak", unit="B/kFLOP",
        scale=1e3, series=list(dict.fromkeys(rows["part"])), legend="Tier",
        order=by_value(pick(rows, "bytes_per_flop", part="HBM")),
        description="Dot chart: bytes per thousand FLOP of memory, scale-up and scale-out links.",
    )  # fmt: skip


def memory_size_chart(frame: pd.DataFrame) -> Any:
    """HBM of one GPU and of all in a scale-up domain."""
    rows = pick(frame, "memory")
    return dots(
        rows, title="HBM (GB)", unit="GB", scale=1e-9, series=["one GPU", "scale-up domain"],
        legend="HBM of", description="Dot chart: HBM of one GPU and of its scale-up domain, in GB.",
    )  # fmt: skip


def power_chart(frame: pd.DataFrame, precision: str, power_set: str) -> Any:
    """Watts per TFLOP/s at a precision and per TB/s, in a named power set."""
    flops = pick(frame, "power_per_flops", precision=precision)
    return bars(
        [
            (f"W per TFLOP/s, {precision.upper()} peak", flops, 1e12, "W/(TFLOP/s)"),
            ("W per TB/s of HBM", pick(frame, "power_per_bandwidth"), 1e12, "W/(TB/s)"),
        ],
        description=f"Bar chart: power per peak and per bandwidth; {api.POWER_BASES[power_set]}.",
    )


def price_chart(frame: pd.DataFrame, precision: str, price_set: str) -> Any:
    """Dollars per PFLOP/s at a precision and per TB/s, in a named price set."""
    flops = pick(frame, "price_per_flops", precision=precision)
    money = "USD" if price_set == CAPEX else "USD/h"
    return bars(
        [
            (f"{money} per PFLOP/s, {precision.upper()} peak", flops, 1e15, f"{money}/(PFLOP/s)"),
            (
                f"{money} per TB/s of HBM",
                pick(frame, "price_per_bandwidth"),
                1e12,
                f"{money}/(TB/s)",
            ),
        ],
        description=f"Bar chart: price per peak and per bandwidth; {PRICES[price_set]}.",
    )


def parameters_chart(frame: pd.DataFrame) -> Any:
    """Total and active parameters, computed."""
    rows = frame[frame["metric"].isin(["total", "active"])]
    return dots(
        rows, by="metric", series=["active", "total"], title="Parameters (billions)", unit="G",
        scale=1e-9, legend="Parameters",
        description="Dot chart: active and total parameters of each model, in billions.",
    )  # fmt: skip


def _over_contexts(
    rows: pd.DataFrame, title: str, description: str, unit: str, scale: float, nested: bool = False
) -> Any:
    rows = rows.assign(at=[kilo(t) for t in rows["context"]])
    at = [kilo(t) for t in sorted(set(rows["context"]))]
    return dots(
        rows, by="at", series=at, title=title, unit=unit, scale=scale, legend="Context (tokens)",
        nested=nested, description=description,
    )  # fmt: skip


def kv_chart(frame: pd.DataFrame) -> Any:
    """Cache bytes that grow with the context, resident per token of context."""
    return _over_contexts(
        pick(frame, "kv_per_token"), "KV cache (kB per token of context, resident)",
        "Dot chart: resident KV bytes per token of context, by context length.", "kB/token", 1e-3,
        nested=True,  # but for windows and compressed caches it is one number at every context
    )  # fmt: skip


def read_chart(frame: pd.DataFrame) -> Any:
    """Cache bytes moved for one decoded token, by context."""
    return _over_contexts(
        total_of(pick(frame, "read")), "Cache moved per decoded token (MB)",
        "Dot chart: cache bytes read per decoded token, by context length.", "MB/token", 1e-6,
    )  # fmt: skip


FLOP_GROUPS = {"linear": "weights", "core": "attention over the cache", "indexer": "indexer"}


def flops_chart(frame: pd.DataFrame, context: int) -> Any:
    """FLOPs of one decoded token at a context, by what they are spent on."""
    rows = pick(frame, "flops", context=context)
    rows["group"] = [FLOP_GROUPS.get(p, p) or "weights" for p in rows["part"]]
    return stacked(
        rows, title=f"GFLOP per decoded token, {kilo(context)} context", unit="GFLOP", scale=1e-9,
        groups=list(dict.fromkeys([*FLOP_GROUPS.values(), *rows["group"]])),
        description="Stacked bar chart: FLOPs of a decoded token on weights, cache and indexer.",
    )  # fmt: skip


def weights_chart(frame: pd.DataFrame, share: bool = True) -> Any:
    """Weights by tensor class, as shares of the whole or in GB."""
    rows = pick(frame, "weights")
    rows["group"] = [FAMILIES.get(p, OTHER) for p in rows["part"]]
    count = pick(frame, "parameters").set_index(["id", "part"])["value"]
    keys = zip(rows["id"], rows["part"], rows["value"], strict=True)
    rows["each"] = [f"{number(size / count[card, part])} B" for card, part, size in keys]
    return stacked(
        rows, tips=[("each", "A parameter")], unit="GB",
        title="Share of the weights' bytes" if share else "Weights (GB)",
        scale=1e-9, groups=FAMILY_ORDER, share=share,
        description="Stacked bar chart: bytes of the weights of each model by tensor class.",
    )  # fmt: skip


# ---- tables

Cell = tuple[str, str]  # what is shown, what hovering says


def html_table(head: Sequence[Cell], rows: Iterable[Sequence[Cell]], caption: str) -> str:
    """Return a table whose first column names the card; every text is escaped."""

    def cell(tag: str, text: str, title: str, n: int, scope: str) -> str:
        kept = "position:sticky;left:0;background:var(--jp-layout-color0,#fff)" if n == 0 else ""
        style = f"text-align:{'left' if n == 0 else 'right'};padding:2px 8px;{kept}"
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
        '<div class="perfmodel-table" style="overflow-x:auto" tabindex="0"><table style="'
        "white-space:nowrap;font-size:12px;font-variant-numeric:tabular-nums;cursor:help;"
        f'line-height:1.35"><caption style="text-align:left;white-space:normal">'
        f"{html.escape(caption)}</caption><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
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
