"""The catalogue's frames against arithmetic of our own; its charts and tables for every card."""

import math

import pytest

from perfmodel import api, catalogue, catalogue_charts, catalogue_tables
from perfmodel.catalogue import CONTEXTS, pick
from perfmodel.errors import InputError


@pytest.fixture(scope="module")
def machines():
    return catalogue.machine_frame()


@pytest.fixture(scope="module")
def models():
    return catalogue.model_frame()


def one(frame, card, metric, **where):
    (row,) = pick(frame, metric, id=card, **where).itertuples()
    return row


def test_every_card_is_in_its_frame_and_every_number_has_a_source(machines, models):
    assert set(machines["id"]) == set(api.list_systems())
    assert set(models["id"]) == set(api.list_models())
    for frame in (machines, models):
        assert frame["source"].str.len().min() > 10
        known = frame["value"].notna()
        assert (frame["missing"].eq("") == known).all()
        assert (frame["value"][known] >= 0).all()
        ranged = frame.dropna(subset=["low"])
        assert (ranged["low"] <= ranged["value"] * (1 + 1e-12)).all()
        assert (ranged["value"] <= ranged["high"] * (1 + 1e-12)).all()


def test_numbers_of_an_h200(machines):
    """Data sheet: 989.5 and 1979 TFLOP/s dense, 4.8 TB/s, 141 GB, eight to a domain, 700 W."""
    ridge = one(machines, "h200-nvl8", "ridge", precision="fp8")
    assert ridge.value == pytest.approx(1979e12 / 4.8e12, rel=2e-3)
    assert one(machines, "h200-nvl8", "bytes_per_flop", part="HBM", precision="fp8").value == (
        pytest.approx(1 / ridge.value)
    )
    link = one(machines, "h200-nvl8", "bytes_per_flop", part="scale-up link", precision="bf16")
    assert link.value == pytest.approx(450e9 / 989.5e12, rel=2e-3)
    whole = one(machines, "h200-nvl8", "memory", part="scale-up domain")
    assert whole.value == pytest.approx(8 * 141e9)
    fp4 = one(machines, "h200-nvl8", "peak", part="fp4")
    assert math.isnan(fp4.value) and "peak_fp4" in fp4.missing


def test_power_and_price_come_from_the_named_set():
    tdp = catalogue.machine_frame(["h200-nvl8"], "chip", "rental")
    assert one(tdp, "h200-nvl8", "power").value == 700
    assert one(tdp, "h200-nvl8", "power_per_bandwidth").value == pytest.approx(700 / 4.8e12)
    assert "price.rental " in one(tdp, "h200-nvl8", "price").source
    assert one(tdp, "h200-nvl8", "price").unit == "USD/h"
    capex = catalogue.machine_frame(["h200-nvl8"], "chip", "capex")
    assert one(capex, "h200-nvl8", "price").unit == "USD"


@pytest.mark.parametrize("sets", [("tdp", "owned"), ("all_in", "cheap")])
def test_unknown_sets_are_refused(sets):
    with pytest.raises(InputError, match="is unknown; known: "):
        catalogue.machine_frame(["h200-nvl8"], *sets)


def test_cache_of_llama_and_deepseek_by_hand(models):
    """Llama 405B: 126 layers, 8 KV heads of 128, key and value, BF16; V3: 61 layers of 576 values."""
    llama = one(models, "llama-3.1-405b", "kv_per_token", context=1 << 16)
    assert llama.value == 126 * 2 * 8 * 128 * 2
    latent = one(models, "deepseek-v3", "kv_per_token", context=1 << 16).value
    assert latent in (61 * 576, 61 * 576 * 2)
    beyond = one(models, "qwen3-32b", "cache", context=1 << 20)
    assert math.isnan(beyond.value) and beyond.missing.startswith("beyond the")


def test_totals_are_those_of_the_parts(models):
    for card, rows in models.groupby("id"):
        parts = pick(rows, "parameters").set_index("part")["value"]
        tables = parts.get("engram_tables", 0.0)
        assert one(rows, card, "total").value == pytest.approx(parts.sum() - tables, rel=1e-12)
    assert one(models, "deepseek-v4.1-flash", "total").value == pytest.approx(552e9, rel=5e-3)
    assert "tables in host memory" in one(models, "deepseek-v4.1-flash", "total").source


def test_cache_grows_with_the_context(models):
    for metric in ("cache", "flops"):
        rows = catalogue.total_of(pick(models, metric)).dropna(subset=["value"])
        for _, of_card in rows.groupby("id"):
            assert of_card.sort_values("context")["value"].is_monotonic_increasing


def test_charts_and_tables_are_made_for_every_set(machines, models):
    draw = catalogue_charts
    for chart in (
        draw.ridge_chart(machines), draw.memory_size_chart(machines),
        *(draw.bytes_per_flop_chart(machines, p) for p in ("bf16", "fp8", "fp4")),
        *(draw.power_chart(machines, p, "all_in") for p in ("bf16", "fp8", "fp4")),
        *(draw.price_chart(machines, p, "owned") for p in ("bf16", "fp8", "fp4")),
        draw.parameters_chart(models), draw.weights_chart(models), draw.kv_chart(models),
        draw.weights_chart(models, share=False), draw.read_chart(models),
        *(draw.flops_chart(models, t) for t in CONTEXTS),
    ):  # fmt: skip
        assert "NaN" not in chart.to_json()
    text = catalogue_tables.machine_table(machines, "fp8", "all_in", "owned")
    assert text.count("<tr>") == 1 + len(api.list_systems())
    text = catalogue_tables.model_table(models, 1 << 16, "native")
    assert text.count("<tr>") == 1 + len(api.list_models())


def test_text_of_cards_is_escaped():
    text = catalogue_tables.html_table([("a", "b")], [[("<b>x</b>", '"><script>')]], "<i>")
    assert "<b>" not in text and "<script>" not in text and "<i>" not in text
