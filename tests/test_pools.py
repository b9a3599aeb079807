"""Sessions in steady state: Little's law, limits, and the steps that it is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel import api
from perfmodel.errors import DoesNotFit, InputError
from perfmodel.plan import Plan
from perfmodel.pools import Deployment, Tier, as_workload, serve

WIDE = Plan(dp=64, ep=64)
EIGHT = Plan(tp=8, ep=8)
POOLS = Deployment(decode=Plan(dp=32, ep=32), prefill=EIGHT, prefill_instances=4)
CASES: list[tuple[str, str, Deployment]] = [
    ("deepseek-v4-pro", "gb300-nvl72", Deployment(decode=WIDE)),
    ("deepseek-v4-pro", "gb300-nvl72", POOLS),
    ("kimi-k3", "gb300-nvl72", Deployment(decode=WIDE)),
    ("deepseek-v3", "h200-nvl8", Deployment(decode=EIGHT, decode_instances=4)),
    ("gpt-oss-120b", "b200-nvl8", Deployment(decode=Plan(tp=4, ep=4))),
]
LOADS = np.geomspace(1, 3e4, 25)


@pytest.mark.parametrize("workload", ["agentic-coding", "agentic-coding-10s", "chat-8k-1k"])
@pytest.mark.parametrize(("model", "system", "deployment"), CASES)
def test_identities(model: str, system: str, deployment: Deployment, workload: str) -> None:
    """Little's law, tokens by calls, costs by tokens, no more work than time."""
    w = as_workload(workload)
    o = serve(model, system, deployment, w, sessions=LOADS)
    done = o["settled"]
    assert done.mean() > 0.9
    o = {k: x[done] for k, x in o.items()}
    threads = o["sessions"] * w.session.threads.value
    assert o["X_next"] * (o["e2e"] + w.gap_mean_s) == pytest.approx(threads, rel=0.02)
    assert o["e2e"] == pytest.approx(o["ttft"] + o["t_decode"])
    assert (
        (o["rho"] <= 1).all() and (o["hit"] <= 1).all() and (o["hit_hbm"] <= o["hit"] + 1e-12).all()
    )
    per_call = w.call.input_tokens.value + w.call.output_tokens.value
    assert o["total_gpu"] * o["gpus"] == pytest.approx(o["X_next"] * per_call)
    spent = o["usd_output"] * o["output_rate"]
    assert o["usd_total"] * o["total_rate"] == pytest.approx(spent)
    # a rank cannot prefill for longer than there is time
    servers = (deployment.prefill or deployment.decode).dp * (
        deployment.prefill_instances or deployment.decode_instances
    )
    assert (o["X_next"] * o["t_prefill"] / servers <= 1.02).all()
    # active calls never hold more sequences than fit
    holds = o["t_decode"] + (o["t_first"] if deployment.aggregated else 0)
    assert (o["X_next"] * holds <= o["sequences"] * 1.02).all()


def test_one_chat_is_the_steps_alone() -> None:
    """A single user meets nobody: TPOT is a decode step, TTFT a prefill and the engine's times."""
    w = as_workload("chat-8k-1k")
    o = serve("deepseek-v3", "h200-nvl8", Deployment(decode=EIGHT), w, sessions=1)
    one: dict[str, Any] = dict(batch=1, precision="auto")
    step = api.estimate("deepseek-v3", "h200-nvl8", EIGHT, context_tokens=8192 + 512, **one)
    assert o["tpot"][0] == pytest.approx(step.step_time_s, rel=1e-3)
    pre = api.estimate(
        "deepseek-v3", "h200-nvl8", EIGHT, phase="prefill", context_tokens=0, new_tokens=8192, **one
    )
    engine = api.load_engine("typical").values
    kernels = pre.values["n_kernels"]
    work = pre.step_time_s - kernels * pre.values["tau_kernel"] - pre.values["t_host"]
    expected = (
        work * engine.prefill_scale.value
        + kernels * engine.prefill_kernel.value
        + engine.request.value
        + step.step_time_s
    )
    assert o["ttft"][0] == pytest.approx(expected, rel=1e-3)
    assert o["interactivity"][0] == pytest.approx(1 / o["tpot"][0])


@pytest.mark.parametrize(("model", "system", "deployment"), CASES)
def test_more_sessions_are_slower_each(model: str, system: str, deployment: Deployment) -> None:
    o = serve(model, system, deployment, "agentic-coding", sessions=LOADS)
    assert (np.diff(o["e2e"]) >= -1e-2 * o["e2e"][1:]).all()
    assert (np.diff(o["hit"]) <= 1e-3).all()


@settings(max_examples=15, deadline=None)
@given(sessions=st.floats(1, 2e4), dp=st.sampled_from([8, 16, 32, 64]))
def test_the_speed_of_light_is_never_beaten(sessions: float, dp: int) -> None:
    d = Deployment(decode=Plan(dp=dp, ep=dp))
    args = ("deepseek-v4-pro", "gb300-nvl72", d, "agentic-coding")
    real = serve(*args, sessions=sessions)
    light = serve(*args, sessions=sessions, mode="speed-of-light")
    if real["settled"][0] and light["settled"][0]:
        assert real["X_next"][0] <= light["X_next"][0] * 1.01


def test_memory_below_hbm_moves_the_cliff() -> None:
    """More room for waiting caches keeps the hit rate up to more sessions."""
    bare = Deployment(decode=WIDE)
    tiers = replace(bare, tiers=("host",))
    larger = replace(bare, tiers=("host", Tier("ssd", 1e12, 6e9)))
    loads = np.geomspace(5e3, 2e5, 20)
    args = ("deepseek-v4-pro", "gb300-nvl72")
    found = [
        serve(*args, d, "agentic-coding", sessions=loads)["hit"] for d in (bare, tiers, larger)
    ]
    assert (found[1] >= found[0] - 1e-3).all() and (found[2] >= found[1] - 1e-3).all()
    assert found[1].sum() > found[0].sum() and found[2].sum() > found[1].sum()


def test_random_routing_finds_a_cache_by_chance() -> None:
    aware = Deployment(decode=EIGHT, decode_instances=8)
    args = ("deepseek-v4-pro", "gb300-nvl72")
    a = serve(*args, aware, "agentic-coding", sessions=50)
    b = serve(*args, replace(aware, routing="random"), "agentic-coding", sessions=50)
    assert b["hit"][0] == pytest.approx(a["hit"][0] / 8, rel=0.01)
    assert b["ttft"][0] > a["ttft"][0]


def test_cold_and_warm_starts_bracket() -> None:
    """Both solutions near a knee: starting with empty caches never ends with more in them."""
    loads = np.geomspace(1e3, 4e4, 20)
    args = ("deepseek-v4-pro", "gb300-nvl72", Deployment(decode=WIDE), "agentic-coding")
    warm, cold = serve(*args, sessions=loads), serve(*args, sessions=loads, cold=True)
    assert (cold["hit"] <= warm["hit"] + 1e-3).all()


def test_what_does_not_fit_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(DoesNotFit, match=r"needs [\d.]+ GB per GPU of [\d.]+ GB"):
        serve("kimi-k3", "h200-nvl8", Deployment(decode=EIGHT), "agentic-coding", sessions=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(sessions=0), "sessions"),
        (dict(sessions=[1, np.nan]), "sessions"),
        (dict(sessions=5, engine_name="x"), "option"),
        (dict(sessions=5, workload="agentic"), "workload"),
        (dict(sessions=5, model="gpt-oss-120b", workload="agentic-coding", system="nothing"), "system"),
    ],
)  # fmt: skip
def test_bad_input_is_named(change: dict[str, Any], words: str) -> None:
    args: dict[str, Any] = dict(
        model="deepseek-v4-pro", system="gb300-nvl72", deployment=Deployment(decode=WIDE),
        workload="agentic-coding",
    )  # fmt: skip
    with pytest.raises(InputError, match=words):
        serve(**(args | change))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Deployment(decode="tp=8"),  # type: ignore[arg-type]
        lambda: Deployment(decode=EIGHT, prefill_instances=2),
        lambda: Deployment(decode=EIGHT, prefill=EIGHT),
        lambda: Deployment(decode=EIGHT, decode_instances=0),
        lambda: Deployment(decode=EIGHT, routing="best"),
        lambda: Deployment(decode=EIGHT, tiers=("tape",)),
        lambda: Tier("ssd", -1, 1e9),
        lambda: Tier("ssd", 1e12, float("nan")),
    ],
)
def test_deployments_that_make_no_sense(make: Any) -> None:
    with pytest.raises(InputError):
        make()
