"""Every machine card: ranges where sources disagree, named sets of power and price, sane physics."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from perfmodel import api, catalog, deployment, power, report, units
from perfmodel.cli import main
from perfmodel.errors import InputError
from perfmodel.explorer import Explorer
from perfmodel.hardware import Quantity, System
from perfmodel.paths import data_dir
from perfmodel.plan import Plan

SYSTEMS = api.list_systems()
POWERLESS = ("mi455x-helios", "trainium2", "trainium3")  # no power or price is published
MODEL = "gpt-oss-120b"  # fits everywhere: experts, windows, 4-bit weights
machines = pytest.mark.parametrize("system", SYSTEMS)
REL = 1 + 1e-9

# Facts, section 9: where sources disagree a card holds the whole range.
DISAGREE = [
    ("b300-nvl8", "chip.peak_fp4", "12.6 PFLOP/s", "14 PFLOP/s"),
    ("b200-nvl8", "scale_out.bandwidth", "50 GB/s", "100 GB/s"),
    ("gb200-nvl72", "scale_out.bandwidth", "50 GB/s", "100 GB/s"),
    ("b200-nvl8", "host.bandwidth", "64 GB/s", "128 GB/s"),
    ("gb200-nvl72", "host.memory", "240 GB", "467 GB"),
    ("mi455x-helios", "chip.peak_fp8", "10 PFLOP/s", "20.1 PFLOP/s"),
    ("mi455x-helios", "chip.peak_fp4", "20 PFLOP/s", "40.3 PFLOP/s"),
    ("mi455x-helios", "memory.bandwidth", "19.6 TB/s", "23.3 TB/s"),
    ("ascend-910c-cloudmatrix", "chip.peak_bf16", "752 TFLOP/s", "780 TFLOP/s"),
    ("trainium3", "scale_up.bandwidth", "1280 GB/s", "2560 GB/s"),
    *(
        (card, path, low, high)
        for card in ("vr-nvl72", "vr-nvl72-conservative")
        for path, low, high in (
            ("memory.bandwidth", "19.2 TB/s", "22 TB/s"),
            ("scale_up.bandwidth", "1500 GB/s", "1800 GB/s"),
            ("power.chip", "1.8 kW", "2.3 kW"),
            ("power.rack_it", "2.64 kW", "3.19 kW"),
            ("host.memory", "375 GB", "750 GB"),
            ("chip.peak_fp4", "35 PFLOP/s", "50 PFLOP/s"),
        )
    ),
]


@pytest.mark.parametrize(("card", "path", "low", "high"), DISAGREE)
def test_contradictions_are_ranges(card: str, path: str, low: str, high: str) -> None:
    q = api.load_system(card).field(path)
    assert q.low is not None and q.low <= units.parse(low, q.unit) * REL
    assert q.high is not None and q.high >= units.parse(high, q.unit) / REL
    assert q.low < q.high


# Facts, sections 2-4 and 7: BF16, FP8, FP4 (TFLOP/s), HBM (GB, TB/s), scale-up (GPUs, GB/s), NIC
# (GB/s), chip (W).
FACTS: dict[str, tuple[float | None, ...]] = {
    "a100-nvl8": (312, None, None, 80, 2.039, 8, 300, 25, 400),
    "ascend-910c-cloudmatrix": (752, 1504, None, 128, 3.2, 384, 392, 50, 955),
    "b200-nvl8": (2250, 4500, 9000, 180, 7.7, 8, 900, 50, 1000),
    "b300-nvl8": (2250, 4500, 14000, 288, 7.75, 8, 900, 100, 1100),
    "gb200-nvl72": (2500, 5000, 10000, 186, 8.0, 72, 900, 50, 1200),
    "gb300-nvl72": (2500, 5000, 15000, 288, 8.0, 72, 900, 100, 1400),
    "h100-nvl8": (989, 1979, None, 80, 3.35, 8, 450, 50, 700),
    "h20-nvl8": (148, 296, None, 96, 4.0, 8, 450, 50, 400),
    "h200-nvl8": (989, 1979, None, 141, 4.8, 8, 450, 50, 700),
    "h800-nvl8": (989, 1979, None, 80, 3.35, 8, 200, 50, 700),
    "l40s": (362, 733, None, 48, 0.864, 8, 32, 25, 350),
    "mi300x": (1307, 2615, None, 192, 5.3, 8, 448, 50, 750),
    "mi325x": (1300, 2610, None, 256, 6.0, 8, 448, 50, 1000),
    "mi355x": (2500, 5000, 10100, 288, 8.0, 8, 535.5, 50, 1400),
    "mi455x-helios": (5000, 10000, 20000, 432, 23.3, 72, 1800, 299, None),
    "rtx-pro-6000": (467.8, 935.6, 1871, 96, 1.792, 8, 64, 50, 600),
    "rubin-ultra": (8000, 34700, 70000, 1000, 32, 144, 3600, 200, 3000),
    "tpu-v7x": (2307, 4614, None, 192, 7.37, 64, 600, 100, 980),
    "trainium2": (667, 1299, None, 96, 2.9, 64, 640, 25, None),
    "trainium3": (671, 2517, 2517, 144, 4.9, 144, 1280, 25, None),
    "vr-nvl72": (4000, 17500, 35000, 288, 22, 72, 1800, 200, 1800),
    "vr-nvl72-conservative": (4000, 17500, 35000, 288, 19.2, 72, 1500, 200, 2300),
}
PATHS = [
    ("chip.peak_bf16", 1e12), ("chip.peak_fp8", 1e12), ("chip.peak_fp4", 1e12),
    ("memory.capacity", 1e9), ("memory.bandwidth", 1e12), ("scale_up.gpus", 1),
    ("scale_up.bandwidth", 1e9), ("scale_out.bandwidth", 1e9), ("power.chip", 1),
]  # fmt: skip


@machines
def test_a_card_says_what_the_facts_say(system: str) -> None:
    numbers = api.load_system(system).quantities()
    for (path, unit), fact in zip(PATHS, FACTS[system], strict=True):
        q = numbers.get(path)
        got = None if q is None else q.value / unit
        assert got == (None if fact is None else pytest.approx(fact)), path


# SemiAnalysis registry: kW, USD/h owned, neocloud, rental of September 2026; the same of April 2026.
SETS: dict[str, tuple[float | None, ...]] = {
    "h100-nvl8": (1.37, 1.17, 1.55, 2.00, 1.73, 1.30, 1.69, 1.3),
    "h200-nvl8": (1.37, 1.22, 1.59, 2.90, 1.73, 1.41, 1.74, 1.6),
    "b200-nvl8": (1.71, 1.73, 2.07, 3.70, 2.17, 1.95, 2.34, 2.9),
    "b300-nvl8": (1.90, 2.26, 2.52, 4.25, 2.17, 2.34, 2.808, 3.48),
    "gb200-nvl72": (1.87, 1.86, 2.26, 4.00, 2.10, 2.21, 2.75, 3.3),
    "gb300-nvl72": (2.12, 2.31, 2.79, 5.00, 2.10, 2.652, 3.30, 3.96),
    "vr-nvl72": (3.30, 3.61, None, 8.50, None, None, None, None),
    "vr-nvl72-conservative": (3.30, 3.61, None, 8.50, None, None, None, None),
    "mi300x": (1.39, 0.95, 1.16, 1.30, 1.79, None, None, None),
    "mi325x": (1.69, 1.10, 1.32, 1.60, 2.18, None, None, None),
    "mi355x": (2.09, 1.50, 2.09, 2.90, 2.65, None, None, None),
    "rtx-pro-6000": (0.975, 0.68, 0.75, 0.52, None, None, None, None),
    "tpu-v7x": (1.207, 1.21, None, 2.00, None, None, None, None),
}


@pytest.mark.parametrize("system", SETS)
def test_the_two_analyst_sets_are_kept_apart(system: str) -> None:
    card = api.load_system(system)
    new: list[Quantity | None] = [
        card.power.all_in, card.price.owned, card.price.neocloud, card.price.rental
    ]  # fmt: skip
    old = [
        card.power.all_in_old, card.price.owned_old, card.price.neocloud_old, card.price.rental_old
    ]  # fmt: skip
    for quantities, facts, date in ((new, SETS[system][:4], "Sep"), (old, SETS[system][4:], "Apr")):
        for q, fact, scale in zip(quantities, facts, (1e3, 1, 1, 1), strict=True):
            assert (None if q is None else q.value / scale) == (
                None if fact is None else pytest.approx(fact)
            )
            if q is not None:
                assert q.kind == "estimate" and date in q.source and "2026" in q.source


POINT: dict[str, Any] = dict(batch=32, context_tokens=4096)


@pytest.mark.parametrize("basis", api.POWER_BASES)
@pytest.mark.parametrize("price", api.PRICE_BASES)
def test_a_metric_names_its_sets_and_their_dates(basis: str, price: str) -> None:
    card = api.load_system("h200-nvl8")
    e = api.estimate(MODEL, "h200-nvl8", Plan(tp=8), power_basis=basis, price_basis=price, **POINT)
    assert e.power_set is not None and e.price_set is not None
    for words, name, section, known in (
        (e.power_set, basis, "power", api.POWER_BASES),
        (e.price_set, price, "price", api.PRICE_BASES),
    ):
        q = card.field(f"{section}.{name}")
        assert words.startswith(f"{name}: {known[name]}, {q.text} a GPU [{q.kind}]")
        assert q.source in words and re.search(r"\d{4}", words) and card.date in words
    mixed = basis.startswith("all_in") and basis.endswith("_old") != price.endswith("_old")
    assert any("sets of two dates" in n for n in e.notes) == mixed


@pytest.mark.parametrize("system", POWERLESS)
def test_no_power_on_a_card_is_said_and_the_rest_works(
    system: str, capsys: pytest.CaptureFixture[str]
) -> None:
    e = api.estimate(MODEL, system, Plan(tp=8), **POINT)
    assert e.step_time_s > 0 and e.throughput_tok_s_gpu > 0
    assert e.throughput_tok_s_mw is e.power_w is e.power_set is e.usd_per_mtok is None
    missing = f"power.all_in is not on the card of {system}"
    assert any(missing in n for n in e.notes)
    columns = api.sweep(MODEL, system, Plan(tp=8), batch=[1, 2], context_tokens=99)
    assert all(math.isnan(x) for x in columns["throughput_tok_s_mw"])
    for refused in (
        lambda: api.explain(e, "throughput_mw"),
        lambda: api.best(MODEL, system, batch=[1], context_tokens=99),
        lambda: api.check_power(system, "all_in"),
    ):
        with pytest.raises(InputError, match=missing):
            refused()
    with pytest.raises(InputError, match=f"price.owned is not on the card of {system}"):
        api.explain(e, "usd_per_mtok")
    for refused in (lambda: power.drawn_w(e), lambda: power.idle_w(system)):
        with pytest.raises(InputError, match=f"power.chip is not on the card of {system}"):
            refused()
    argv = ["estimate", MODEL, system, "--tp", "8", "--batch", "32", "--context", "4Ki"]
    assert main(argv) == 0
    assert f"no all_in power on the card of {system}" in capsys.readouterr().out


def test_a_set_the_card_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(
        InputError, match=r"power\.all_in_old is not .*tpu-v7x.*chip, rack_it, all_in"
    ):
        api.estimate(MODEL, "tpu-v7x", Plan(tp=8), power_basis="all_in_old", **POINT)


@pytest.mark.parametrize(
    ("option", "known"), [("--power", api.POWER_BASES), ("--price", api.PRICE_BASES)]
)
def test_sets_on_the_command_line(
    option: str, known: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["estimate", MODEL, "h200-nvl8", "--tp", "8", "--batch", "8", "--context", "4Ki"]
    for name, words in known.items():
        assert main([*argv, option, name]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert f"{name}: {words}" in out
    assert main([*argv, option, "wall"]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in known)


# ---- what no machine may do


def changed(card: System, path: str, times: float) -> System:
    section, _, name = path.partition(".")
    part = getattr(card, section)
    q = getattr(part, name)
    better = q.model_copy(update={"value": q.value * times, "low": None, "high": None})
    return card.model_copy(update={section: part.model_copy(update={name: better})})


def times(system: str | System, phase: str, mode: str = "calibrated") -> list[float]:
    out = []
    for plan in (Plan(tp=8), Plan(dp=8, ep=8)):
        kw: dict[str, Any] = dict(
            phase=phase, new_tokens=512 if phase == "prefill" else 1, mode=mode
        )
        e = api.estimate(MODEL, system, plan, batch=64, context_tokens=8192, **kw)
        assert sum(m.bytes for m in e.memory) == pytest.approx(e.memory_bytes)
        out.append(e.step_time_s)
    return out


@machines
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_twice_the_bandwidth_is_never_slower(system: str, phase: str) -> None:
    card = api.load_system(system)
    base = times(card, phase)
    shorter = 0
    for path in (
        "memory.bandwidth", "scale_up.bandwidth", "scale_out.bandwidth",
        *(p for p in card.quantities() if p.startswith("chip.peak")),
    ):  # fmt: skip
        better = times(changed(card, path, 2), phase)
        assert all(b <= a * REL for a, b in zip(base, better, strict=True)), path
        shorter += any(b < a / REL for a, b in zip(base, better, strict=True))
    assert shorter  # something bounds the step


@machines
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_nothing_beats_the_speed_of_light(system: str, phase: str) -> None:
    light = times(system, phase, "speed-of-light")
    assert all(0 < a <= b * REL for a, b in zip(light, times(system, phase), strict=True))


@machines
def test_peaks_and_powers_are_ordered(system: str) -> None:
    """Peaks: on both ends of the ranges too; Rubin's FP8 is 4.4 times its BF16, nothing more."""
    card = api.load_system(system)
    peaks = [q for n in ("bf16", "fp8", "fp4") if (q := getattr(card.chip, f"peak_{n}"))]
    for wide, narrow in zip(peaks, peaks[1:], strict=False):
        for a, b in ((wide.low, narrow.low), (wide.high, narrow.high)):
            assert (a or wide.value) <= (b or narrow.value)
        assert narrow.value <= 4.4 * wide.value
    watts = [card.power.chip, card.power.rack_it, card.power.all_in]
    known = [w.value for w in watts if w is not None]
    assert known[0] <= min(known) if known else system in POWERLESS
    assert card.layout.gpus_per_node.value <= card.scale_up.gpus.value
    for path, q in card.quantities().items():
        if path.startswith("efficiency.") and q.high is not None:
            assert q.high <= 1, path


@machines
def test_shards_of_a_model_add_up(system: str) -> None:
    """Tensor and expert shards of the weights are the whole, on any machine."""
    card = changed(api.load_system(system), "memory.capacity", 1e6)
    whole = {m.name: m.bytes for m in api.estimate(MODEL, card, Plan(), **POINT).memory}
    tp = {m.name: m.bytes for m in api.estimate(MODEL, card, Plan(tp=8), **POINT).memory}
    ep = {m.name: m.bytes for m in api.estimate(MODEL, card, Plan(dp=8, ep=8), **POINT).memory}
    assert 8 * tp["weights: attention"] == pytest.approx(whole["weights: attention"])
    for parts in (tp, ep):
        assert 8 * parts["weights: experts"] == pytest.approx(whole["weights: experts"])


@machines
def test_estimates_carry_a_derivation(system: str) -> None:
    """What nobody measured or claims says in its source where it is from; profiles are marked."""
    card = catalog.read_card(System, data_dir("hardware") / f"{system}.toml")
    for path, q in card.quantities().items():
        assert len(q.source) >= 12, path
    if system in ("rubin-ultra", "mi455x-helios", "vr-nvl72"):
        assert card.profile == "vendor claim"
        assert any("profile: vendor claim" in n for n in api.estimate(
            MODEL, system, Plan(tp=8), **POINT).notes)  # fmt: skip


@pytest.mark.parametrize("plan", ["best", "tp=8"])
def test_explorer_and_report_say_that_power_is_missing(plan: str) -> None:
    explorer = Explorer(model=MODEL, systems=["trainium3", "h200-nvl8"])
    explorer.plan.value = plan
    assert set(explorer.rows["system"]) == {"h200-nvl8"}
    assert "power.all_in is not on the card of trainium3" in explorer.message.value
    with pytest.raises(InputError, match="card of trainium3 has no 'all_in', expected one of none"):
        deployment.check({**report.parameters("deployment"), "systems": ["trainium3"]})
