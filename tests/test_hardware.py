"""Machine cards: values that cannot be, and errors of one clear line."""

import tomllib
from pathlib import Path

import pytest

from perfmodel import api, catalog
from perfmodel.errors import CardError, InputError
from perfmodel.hardware import System
from perfmodel.model import Model
from perfmodel.paths import data_dir
from perfmodel.roofline import machine_numbers

GB300 = (data_dir("hardware") / "gb300-nvl72.toml").read_text()


def refuse(tmp_path: Path, text: str) -> CardError:
    path = tmp_path / "card.toml"
    path.write_text(text)
    with pytest.raises(CardError) as e:
        catalog.read_card(System, path)
    assert "\n" not in str(e.value) and str(path) in str(e.value)
    return e.value


def swap(old: str, new: str) -> str:
    assert old in GB300, old
    return GB300.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"8.0 TB/s"', '"8 GB/s"', ("memory.bandwidth", "8 GB/s", "at most")),
        ('"8.0 TB/s"', '"8 Tb/s"', ("memory.bandwidth", "8 Tb/s", "not bits")),
        ('"5000 TFLOP/s"', '"500 TFLOP/s"', ("chip.peak_fp8", "500 TFLOP/s", "chip.peak_bf16")),
        ('"15 PFLOP/s"', '"1500 TFLOP/s"', ("chip.peak_fp4", "1500 TFLOP/s", "chip.peak_fp8")),
        ('"1.875 kW"', '"1.2 kW"', ("power.rack_it", "1.2 kW", "power.chip")),
    ],
)
def test_impossible_values(tmp_path: Path, old: str, new: str, words: tuple[str, ...]) -> None:
    message = str(refuse(tmp_path, swap(old, new)))
    assert all(w in message for w in words), message


@pytest.mark.parametrize("rate", ["fp8", "fp4"])
def test_efficiencies_need_their_peak(tmp_path: Path, rate: str) -> None:
    lines = GB300.splitlines()
    no_peak = "\n".join(x for x in lines if not x.startswith(f"peak_{rate} "))
    assert f"efficiency.gemm_{rate}" in str(refuse(tmp_path, no_peak))
    no_efficiency = "\n".join(x for x in lines if not x.startswith(f"moe_{rate} "))
    assert f"efficiency.moe_{rate}: missing" in str(refuse(tmp_path, no_efficiency))


def test_many_faults_are_one_line_and_all_listed(tmp_path: Path) -> None:
    error = refuse(tmp_path, 'id = "x"\n[sources]\n[chip]\nname = "x"\n')
    assert len(error.faults) > 5 and f"(and {len(error.faults) - 1} more)" in str(error)


def test_an_empty_card(tmp_path: Path) -> None:
    assert "empty" in str(refuse(tmp_path, "# nothing\n"))


def test_the_wrong_kind_of_card() -> None:
    machine, model = data_dir("hardware") / "h200-nvl8.toml", data_dir("models") / "kimi-k3.toml"
    with pytest.raises(CardError, match="this is a machine card; expected a model card"):
        catalog.read_card(Model, machine)
    with pytest.raises(CardError, match="this is a model card; expected a machine card"):
        catalog.read_card(System, model)


@pytest.mark.parametrize("system", api.list_systems())
@pytest.mark.parametrize("mode", ["calibrated", "speed-of-light"])
def test_every_rate_runs_at_a_peak_of_the_chip(system: str, mode: str) -> None:
    """A chip without FP8 or FP4 runs those operands at the next wider peak and its efficiency."""
    card = api.load_system(system)
    got = machine_numbers(card, mode)
    wider = "bf16"
    for rate in ("bf16", "fp8", "fp4"):
        peak = getattr(card.chip, f"peak_{rate}")
        wider = rate if peak is not None else wider
        assert got[f"P_{rate}"][0] == card.field(f"chip.peak_{wider}").value
        for kind in ("gemm", "moe", "attention_prefill", "attention_decode"):
            # attention has no FP4 form: FP8 at the narrowest
            named = "fp8" if wider == "fp4" and kind.startswith("attention") else wider
            want = card.field(f"efficiency.{kind}_{named}").value
            assert got[f"e_{kind}_{rate}"][0] == (want if mode == "calibrated" else 1)
        if peak is None:
            assert f"no {rate} on this chip: runs at {wider}" in got[f"P_{rate}"][1]
    for name, (value, source) in got.items():
        assert source.strip() and value >= 0
        if mode == "speed-of-light" and name.startswith(("tau_", "e_unhidden")):
            assert value == 0
        elif name.startswith("e_") and "unhidden" not in name:
            assert 0 < value <= 1
            assert value == 1 or mode == "calibrated"


def test_a_fused_kernel_has_a_floor_and_two_rates() -> None:
    for name in api.list_systems():
        s = api.load_system(name)
        parts = (s.floors.fused, s.efficiency.moe_fused, s.efficiency.hbm_moe_fused)
        assert len({x is None for x in parts}) == 1, name


def test_numbers_by_path() -> None:
    s = api.load_system("gb300-nvl72")
    assert s.field("memory.bandwidth").value == 8e12
    assert set(s.quantities()) >= {"floors.kernel", "power.all_in", "host.memory"}
    with pytest.raises(InputError, match="memory.bandwith"):
        s.field("memory.bandwith")


def test_capacity_is_on_one_basis() -> None:
    """Every card's capacity is the data sheet's; what a driver reports is its `high`."""
    for name in api.list_systems():
        capacity = tomllib.loads((data_dir("hardware") / f"{name}.toml").read_text())["memory"][
            "capacity"
        ]
        assert capacity["kind"] == "vendor" and capacity["value"] == capacity["low"]
        assert float(capacity["high"].split()[0]) > float(capacity["value"].split()[0])
