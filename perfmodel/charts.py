"""The charts, as Vega-Lite through Altair: the same ones in the explorer and in the reports.

Every chart takes a DataFrame or an `altair.NamedData` (rows that arrive later, see `live.py`),
carries a text description for screen readers, and never tells things apart by colour alone.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

FONT = "Liberation Sans"  # vl-convert carries it, so print needs no font of the machine

# Okabe and Ito's colours that can be read on white and on black (not their black and yellow).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [12, 4], [4, 1, 1, 1])
BOUNDS = {"compute": "#D55E00", "memory": "#0072B2", "link": "#009E73", "floor": "#999999"}

ZERO = "datum.value === 0 ? '0' : datum.label"  # not "0k"

Rows = pd.DataFrame | alt.NamedData


def vega_lite_version() -> str:
    """Return the Vega-Lite version of Altair's specs as vl-convert wants it, such as "6.4"."""
    return ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])


def finish(chart: Any, description: str) -> Any:
    """Set what all charts share: description, font, no frame, transparent background."""
    return (
        chart.properties(description=description, background="transparent")
        .configure(font=FONT)
        .configure_view(stroke=None)
        .configure_axis(
            labelFontSize=11, titleFontSize=12, titleFontWeight="normal", gridOpacity=0.35
        )
        .configure_legend(labelFontSize=11, titleFontSize=11, titleFontWeight="normal")
    )


def _known(data: Rows, column: str, given: Sequence[str] | None) -> list[str] | None:
    """Return the values of a column in the order of first appearance, or None if not known yet."""
    if given is not None:
        return list(given)
    if isinstance(data, pd.DataFrame):
        return [str(x) for x in data[column].drop_duplicates()]
    return None


def _scale(values: list[str] | None, styles: Sequence[Any]) -> alt.Scale:
    if values is None:
        return alt.Scale(range=list(styles))
    return alt.Scale(domain=values, range=[styles[i % len(styles)] for i in range(len(values))])


def _y_title(power_basis: str) -> str | list[str]:
    """Return the title of the vertical axis, in two lines where one would be too long."""
    head, unit = "Output throughput per MW", f"(tok/s/MW, {power_basis})"
    return f"{head} {unit}" if len(head + unit) < 64 else [head, unit]


def frontier_chart(
    data: Rows,
    *,
    width: int | str = 430,
    height: int = 260,
    power_basis: str = "all-in power",
    log_x: bool = False,
    log_y: bool = False,
    systems: Sequence[str] | None = None,
    interactive: bool = False,
    bands: bool = False,
    shown: Sequence[str] | None = None,
    description: str | None = None,
) -> Any:
    """Return the chart of throughput per megawatt against interactivity, one curve a system.

    Columns: system, plan, batch (sequences), interactivity_tok_s_user (tok/s/user),
    throughput_tok_s_mw (tok/s/MW) and bound.  `power_basis` says in words what counts as power and
    stands in the axis title.  `bands` fills between the columns throughput_tok_s_mw_low and _high.
    `systems` fixes order and colours.  `interactive` adds a click on the
    nearest point (selection "pick"), a ring on the point of the dataset "picked", and the
    signal "shown_systems" (the systems of the legend, at first those of `shown`).
    """
    domain = _known(data, "system", systems)
    legend: dict[str, Any] = {"title": None, "orient": "top", "symbolSize": 260, "columns": 2}
    if interactive:
        legend["values"] = {"expr": "shown_systems"}
    legend["symbolType"] = "stroke"
    key = alt.Legend(**legend)
    x = alt.X(
        "interactivity_tok_s_user:Q",
        title="Interactivity (tok/s/user)",
        scale=alt.Scale(type="log", nice=False, padding=8) if log_x else alt.Scale(zero=True),
        axis=alt.Axis(format="~s", tickCount=6, labelExpr=ZERO),
    )
    y = alt.Y(
        "throughput_tok_s_mw:Q",
        title=_y_title(power_basis),
        scale=alt.Scale(type="log", nice=False, padding=8) if log_y else alt.Scale(zero=True),
        axis=alt.Axis(format="~s", tickCount=6, labelExpr=ZERO),
    )
    tip = [
        alt.Tooltip("system:N", title="System"),
        alt.Tooltip("plan:N", title="Plan"),
        alt.Tooltip("batch:Q", title="Batch (sequences)", format=",.0f"),
        alt.Tooltip("interactivity_tok_s_user:Q", title="tok/s/user", format=",.1f"),
        alt.Tooltip("throughput_tok_s_mw:Q", title="tok/s/MW", format=",.0f"),
        alt.Tooltip("bound:N", title="Bound by"),
    ]
    colour = alt.Color("system:N", scale=_scale(domain, COLOURS), legend=key)
    dash = alt.StrokeDash("system:N", scale=_scale(domain, DASHES), legend=key)
    base = alt.Chart(data)
    line = base.mark_line(strokeWidth=2, clip=True).encode(
        x=x, y=y, color=colour, strokeDash=dash, order=alt.Order("interactivity_tok_s_user:Q")
    )
    dots = base.mark_circle(size=26, opacity=1, clip=True).encode(
        x=x, y=y, color=alt.Color("system:N", scale=_scale(domain, COLOURS), legend=None),
        tooltip=tip,
    )  # fmt: skip
    layers = [line, dots]
    if bands:
        layers = [
            # colours without a scale, so that the legend stays that of the lines
            base.transform_calculate(shade=_shade(domain))
            .mark_area(fillOpacity=0.17, clip=True)
            .encode(
                x=x,
                y=alt.Y("throughput_tok_s_mw_low:Q", title=_y_title(power_basis)),
                y2=alt.Y2("throughput_tok_s_mw_high"),
                fill=alt.Fill("shade:N", scale=None),
                detail="system:N",
            ),
            *layers,
        ]
    params = []
    if interactive:
        dots = dots.add_params(
            alt.selection_point(
                name="pick", on="click", nearest=True, fields=["system", "plan", "batch"]
            )
        )
        ring = (
            alt.Chart(alt.NamedData(name="picked"))
            .mark_point(size=170, strokeWidth=2.5, filled=False, clip=True)
            .encode(
                x=x, y=y, color=alt.Color("system:N", scale=_scale(domain, COLOURS), legend=None)
            )
        )
        layers = [*layers[:-1], ring, dots]
        params = [alt.param(name="shown_systems", value=list(shown or domain or []))]
    chart = alt.layer(*layers).properties(width=width, height=height)
    if params:
        chart = chart.add_params(*params)
    return finish(
        chart,
        description
        or "Line chart: output throughput per megawatt against interactivity in tokens per second"
        " per user, one line for each system"
        + (f" ({', '.join(domain)})." if domain else "."),
    )


def _shade(domain: list[str] | None) -> str:
    """A Vega expression for the colour that `_scale` gives the row's system."""
    return (
        f"{json.dumps(COLOURS)}[indexof({json.dumps(domain or [])}, datum.system) % {len(COLOURS)}]"
    )


def breakdown_chart(
    data: Rows, *, width: int | str = 430, step: int = 15, description: str | None = None
) -> Any:
    """Return where the time of a step goes: one bar an operator, stacked by kind of layer.

    Columns: operator, layer_kind, seconds (s, all layers of the kind together) and bound
    ("compute", "memory", "link" or "floor").  The colour is the bound; the order is by time.
    """
    chart = (
        alt.Chart(data)
        .transform_calculate(ms="datum.seconds * 1000")
        .mark_bar(stroke="#80808080", strokeWidth=0.5)
        .encode(
            y=alt.Y(
                "operator:N",
                title=None,
                sort=alt.EncodingSortField("seconds", op="sum", order="descending"),
                axis=alt.Axis(labelLimit=230, ticks=False, domain=False),
            ),
            x=alt.X("ms:Q", title="Time in a step (ms)", stack="zero", axis=alt.Axis(tickCount=6)),
            color=alt.Color(
                "bound:N",
                scale=alt.Scale(domain=list(BOUNDS), range=list(BOUNDS.values())),
                legend=alt.Legend(title="Bound by", orient="top"),
            ),
            order=alt.Order("layer_kind:N"),
            tooltip=[
                alt.Tooltip("operator:N", title="Operator"),
                alt.Tooltip("layer_kind:N", title="Layers"),
                alt.Tooltip("ms:Q", title="Time (ms)", format=",.4f"),
                alt.Tooltip("bound:N", title="Bound by"),
            ],
        )
        .properties(width=width, height=alt.Step(step))
    )
    return finish(
        chart, description or "Bar chart: time of each operator in one step in milliseconds, "
        "coloured by what bounds it."
    )  # fmt: skip


def memory_chart(
    data: Rows,
    *,
    width: int | str = 430,
    step: int = 17,
    capacity_bytes: float | None = None,
    description: str | None = None,
) -> Any:
    """Return what fills the memory of one GPU: a bar a part, and the capacity as a line.

    Columns: name, bytes (B per GPU) and optionally capacity_bytes (B), which the keyword of the
    same name stands in for.
    """
    if isinstance(data, pd.DataFrame) and capacity_bytes is not None:
        data = data.assign(capacity_bytes=float(capacity_bytes))
    has_capacity = not isinstance(data, pd.DataFrame) or "capacity_bytes" in data.columns
    # Waterfall: each bar starts where the one before ends, so the last end is the total.
    base = (
        alt.Chart(data)
        .transform_calculate(gb="datum.bytes / 1e9")
        .transform_window(end="sum(gb)")
        .transform_calculate(start="datum.end - datum.gb")
    )
    y = alt.Y(
        "name:N", title=None, sort=None, axis=alt.Axis(labelLimit=230, ticks=False, domain=False)
    )
    x = alt.X("start:Q", title="Memory of one GPU (GB)", scale=alt.Scale(zero=True))
    tip = [
        alt.Tooltip("name:N", title="Part"),
        alt.Tooltip("gb:Q", title="GB", format=",.2f"),
        alt.Tooltip("end:Q", title="Sum so far (GB)", format=",.2f"),
    ]
    bars = base.mark_bar(color=COLOURS[0]).encode(y=y, x=x, x2="end:Q", tooltip=tip)
    label = base.mark_text(align="left", dx=4, fontSize=11, color="#808080").encode(
        y=y, x="end:Q", text=alt.Text("gb:Q", format=",.1f")
    )
    layers: list[Any] = [bars, label]
    if has_capacity:
        limit = (
            alt.Chart(data)
            .transform_aggregate(capacity="max(capacity_bytes)")
            .transform_calculate(cap="datum.capacity / 1e9")
        )
        layers.append(
            limit.mark_rule(color=COLOURS[1], strokeWidth=2, strokeDash=[5, 3]).encode(
                x="cap:Q", tooltip=alt.Tooltip("cap:Q", title="Capacity (GB)", format=",.1f")
            )
        )
    return finish(
        alt.layer(*layers).properties(width=width, height=alt.Step(step)),
        description
        or "Bar chart: what fills the memory of one GPU in gigabytes, part after part; "
        "the dashed line is the capacity.",
    )


def vector_bundle(spec: Mapping[str, Any], **metadata: Any) -> dict[str, str]:
    """Return the chart as SVG, PDF (base64) and its description, by MIME type; needs no network.

    `spec` is a Vega-Lite specification with its data.  Also an Altair renderer: see
    `enable_report_renderer`.
    """
    import vl_convert as vlc  # 80 MB library: only where a picture is wanted

    text = json.dumps(spec)
    version = vega_lite_version()
    return {
        "image/svg+xml": vlc.vegalite_to_svg(text, vl_version=version),
        "application/pdf": base64.b64encode(
            vlc.vegalite_to_pdf(text, vl_version=version)
        ).decode(),
        "text/plain": str(spec.get("description", "chart")),
    }  # fmt: skip


def enable_report_renderer() -> None:
    """Make notebooks show Altair charts as vector pictures, for reports."""
    alt.renderers.register("perfmodel-report", vector_bundle)
    alt.renderers.enable("perfmodel-report")
