"""Search: fronts are fronts, limits hold, a coarse pass loses little, the cheapest is cheapest."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfmodel.cheapest import cheapest
from perfmodel.cli import main
from perfmodel.errors import DoesNotFit, InputError
from perfmodel.frontier import AXES, FINE, LESS_IS_BETTER, candidates, frontier
from perfmodel.pools import as_workload, requests, solve

V4: tuple[Any, ...] = ("deepseek-v4-pro", ["gb300-nvl72"], "agentic-coding")
SMALL: tuple[Any, ...] = ("gpt-oss-120b", ["b200-nvl8"], "chat-8k-1k")


def better(v: np.ndarray, name: str) -> np.ndarray:
    return -v if name in LESS_IS_BETTER else v


@pytest.mark.parametrize(("x", "y"), [("interactivity", "total_mw"), ("ttft", "usd_output")])
def test_no_point_of_a_front_beats_another(x: str, y: str) -> None:
    f = frontier(*V4, x=x, y=y)
    a, b = better(f.columns[x], x), better(f.columns[y], y)
    assert len(f.deployments) == a.size > 5
    assert (np.diff(a) > 0).all() and (np.diff(b) < 0).all()
    assert f.columns["fits"].all() and f.columns["settled"].all()


def test_limits_hold_and_cost_something() -> None:
    free = frontier(*V4)
    tight = frontier(*V4, limits={"ttft_s": 1.0, "tpot_s": 0.02, "power_w": 140e3})
    c = tight.columns
    assert (c["ttft"] <= 1).all() and (c["tpot"] <= 0.02).all() and (c["fleet"] <= 140e3).all()
    for x, y in zip(c["interactivity"], c["total_mw"], strict=True):
        as_fast = free.columns["interactivity"] >= x * 0.999
        assert free.columns["total_mw"][as_fast].max() >= y * 0.97


def test_the_coarse_pass_loses_little() -> None:
    """Against every candidate at every load: at each speed nearly all of the best throughput."""
    f = frontier(*SMALL)
    w = as_workload(SMALL[2])
    runs = requests(SMALL[0], SMALL[1][0], w, None, 0, None, {})
    ds = candidates(runs, w, ("aggregated", "disaggregated"), None, "cache-aware", ())
    assert len(ds) == f.tried["deployments"]
    which = np.repeat(np.arange(len(ds)), FINE)
    most = 2e4 ** np.tile(np.linspace(0, 1, FINE), len(ds))
    v = solve(*runs, w, ds, which, most)
    ok = v["fits"] & v["settled"]
    x, y = v["interactivity"][ok], v["total_mw"][ok]
    for i, speed in enumerate(f.columns["interactivity"]):
        beyond = y[x >= speed]
        if beyond.size:
            assert f.columns["total_mw"][i] >= 0.95 * beyond.max()


def test_systems_together_are_the_best_of_each() -> None:
    both = frontier(V4[0], ["gb300-nvl72", "b200-nvl8"], V4[2])
    for s in ("gb300-nvl72", "b200-nvl8"):
        one = frontier(V4[0], [s], V4[2]).columns
        for x, y in zip(one["interactivity"], one["total_mw"], strict=True):
            as_fast = both.columns["interactivity"] >= x * (1 - 1e-9)
            assert both.columns["total_mw"][as_fast].max() >= y * (1 - 1e-9)


def test_disaggregation_is_chosen_only_where_it_helps() -> None:
    both, alone = frontier(*V4), frontier(*V4, pools=("aggregated",))
    assert set(both.columns["pools"]) == {"aggregated", "disaggregated"}
    for x, y in zip(alone.columns["interactivity"], alone.columns["total_mw"], strict=True):
        as_fast = both.columns["interactivity"] >= x * 0.97
        assert both.columns["total_mw"][as_fast].max() >= y * 0.97


def test_cheapest_is_no_dearer_than_any_point_of_the_front() -> None:
    limits = {"ttft_s": 5.0, "tpot_s": 0.03}
    sessions = 5000
    found = cheapest(V4[0], ["h200-nvl8", "gb300-nvl72"], V4[2], sessions=sessions, limits=limits)
    assert [c.usd_s for c in found] == sorted(c.usd_s for c in found) and len(found) == 2
    for c in found:
        v = {k: x[0] for k, x in c.front.columns.items()}
        assert c.replicas * v["sessions"] >= sessions
        assert v["ttft"] <= 5 and v["tpot"] <= 0.03
        assert c.usd_s == pytest.approx(c.replicas * v["cost"])
        front = frontier(V4[0], [str(v["system"])], V4[2], limits=limits).columns
        usd = np.ceil(sessions / front["sessions"]) * front["cost"]
        assert c.usd_s <= usd.min() * 1.05


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(x="speed"), "x: 'speed' is not one of"),
        (dict(x="ttft", y="ttft"), "another metric"),
        (dict(limits={"ttft": 1}), "limit: 'ttft'"),
        (dict(limits={"ttft_s": -1}), "ttft_s: -1"),
        (dict(limits={"ttft_s": float("nan")}), "ttft_s: nan"),
        (dict(pools=("split",)), "pools: 'split'"),
        (dict(systems=[]), "at least one machine"),
        (dict(systems="gb300-nvl72"), "expected a list"),
        (dict(power_basis="rack"), "power_basis"),
        (dict(tiers=("tape",)), "tiers: 'tape'"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], words: str) -> None:
    args: dict[str, Any] = dict(model=V4[0], systems=V4[1], workload=V4[2])
    with pytest.raises(InputError, match=words):
        frontier(**(args | change))


def test_limits_that_nothing_keeps_say_what_came_nearest() -> None:
    with pytest.raises(DoesNotFit, match=r"ttft <= 0\.001: the least of all points is 0\.\d"):
        frontier(*SMALL, limits={"ttft_s": 0.001})
    with pytest.raises(DoesNotFit, match="no plan on l40s holds one sequence"):
        frontier("deepseek-v4-pro", ["l40s"], "agentic-coding", max_gpus=4)


@pytest.mark.parametrize("y", [a for a in AXES if a != "interactivity"])
def test_every_metric_is_an_axis(y: str) -> None:
    f = frontier(*SMALL, y=y, pools=("aggregated",))
    assert np.isfinite(f.columns[y]).all()


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "front.csv"
    args = ["frontier", "gpt-oss-120b", "b200-nvl8", "--workload", "chat-8k-1k"]
    assert main([*args, "--slo", "ttft_s=2", "-o", str(file)]) == 0
    text = capsys.readouterr().out
    assert "ttft_s=2" in text and "all-in utility power" in text
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    assert rows and all(float(r["ttft"]) <= 2 for r in rows)
    assert main([*args, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert {"plan", "bound", "band_low", "total_mw"} <= set(points[0])
    assert main([*args, "--slo", "ttft_s"]) != 0
    assert "expected NAME=NUMBER" in capsys.readouterr().err
    assert main(["plan", *args[1:], "--sessions", "500", "--slo", "tpot_s=0.02"]) == 0
    assert "USD/h/session" in capsys.readouterr().out
    assert main([*args, "-o", str(tmp_path / "no" / "front.csv")]) != 0
    assert "can't be written" in capsys.readouterr().err and [file] == list(tmp_path.iterdir())
