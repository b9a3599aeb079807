"""Three charts of frames of `perfmodel.catalogue`: dots, bars in panels, stacked bars.

A row a card; every mark has its source in what hovering shows. Texts of cards are only ever data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

from perfmodel.charts import COLOURS, ZERO, finish
from perfmodel.show import number

SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")


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
