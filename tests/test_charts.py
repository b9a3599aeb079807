"""Each chart turns into a picture without a browser, with the marks and words it promises."""

import base64
import re

import altair as alt
import numpy as np
import pandas as pd
import pytest

from perfmodel import charts


def frontier_rows():
    batch = np.geomspace(1, 1024, 12)
    return pd.concat(
        pd.DataFrame(
            {
                "system": name,
                "plan": "TP8",
                "batch": batch,
                "interactivity_tok_s_user": scale * 200 / (1 + batch / 200),
                "throughput_tok_s_mw": scale * 1e4 * batch / (1 + batch / 200),
                "bound": "memory",
            }
        )
        for name, scale in (("old box", 1), ("new rack", 2))
    )


OPERATORS = pd.DataFrame(
    {
        "operator": ["experts", "experts", "attention", "all-reduce"],
        "layer_kind": ["first", "rest", "rest", "rest"],
        "seconds": [1e-3, 4e-3, 2e-3, 5e-4],
        "bound": ["memory", "memory", "compute", "link"],
    }
)
PARTS = pd.DataFrame({"name": ["weights", "cache"], "bytes": [60e9, 40e9]})


def svg(chart):
    return charts.vector_bundle(chart.to_dict())["image/svg+xml"]


def bars(text):
    return len(re.findall(r'aria-roledescription="bar"', text))


@pytest.mark.parametrize("log", [False, True])
def test_frontier_has_a_line_and_a_dash_for_each_system(log):
    text = svg(charts.frontier_chart(frontier_rows(), power_basis="chip TDP", log_x=log, log_y=log))
    assert len(re.findall(r'aria-roledescription="line mark"', text)) == 2
    assert len(re.findall(r'aria-roledescription="circle"', text)) == 24
    assert "Interactivity (tok/s/user)" in text
    assert "Output throughput per MW (tok/s/MW, chip TDP)" in text
    assert "old box" in text and "new rack" in text
    assert len(set(re.findall(r'stroke-dasharray="([^"]+)"', text))) == 2
    assert "NaN" not in text


def test_a_system_keeps_its_colour_when_another_goes():
    rows = frontier_rows()
    new = rows[rows.system == "new rack"]
    text = svg(charts.frontier_chart(new, systems=["old box", "new rack"]))
    assert charts.COLOURS[1] in text.upper().replace("STROKE", "stroke")


def test_breakdown_has_a_bar_for_each_row_longest_first():
    text = svg(charts.breakdown_chart(OPERATORS))
    assert bars(text) == 4
    labels = re.findall(r">(experts|attention|all-reduce)</text>", text)
    assert labels == ["experts", "attention", "all-reduce"]
    assert "Time in a step (ms)" in text


def test_memory_shows_parts_and_the_capacity():
    text = svg(charts.memory_chart(PARTS, capacity_bytes=141e9))
    assert bars(text) == 2
    assert len(re.findall(r'aria-roledescription="rule mark"', text)) == 1
    assert ">60.0<" in text and "Memory of one GPU (GB)" in text
    assert 'aria-roledescription="rule mark"' not in svg(charts.memory_chart(PARTS))


@pytest.mark.parametrize(
    "chart",
    [
        charts.frontier_chart(frontier_rows()),
        charts.breakdown_chart(OPERATORS),
        charts.memory_chart(PARTS, capacity_bytes=141e9),
    ],
)
def test_bundle_has_svg_pdf_and_a_description(chart):
    bundle = charts.vector_bundle(chart.to_dict())
    assert set(bundle) == {"image/svg+xml", "application/pdf", "text/plain"}
    assert base64.b64decode(bundle["application/pdf"]).startswith(b"%PDF")
    assert bundle["text/plain"].split()[1].startswith("chart")
    assert charts.FONT in bundle["image/svg+xml"]
    assert chart.to_dict()["description"]


def test_live_charts_take_named_data():
    for make in (charts.frontier_chart, charts.breakdown_chart, charts.memory_chart):
        assert make(alt.NamedData(name="rows")).to_dict()["description"]
