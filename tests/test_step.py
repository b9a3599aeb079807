"""What must hold for every estimate, on the real cards; and refusals of bad input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from perfmodel import api
from perfmodel.api import Estimate, Plan
from perfmodel.errors import DoesNotFit, InputError
from perfmodel.hardware import System

MODELS, SYSTEMS = api.list_models(), api.list_systems()
PLANS = {(m, s): api.plans(m, s) for m in MODELS for s in SYSTEMS}
REL = 1 + 1e-9

cases = st.sampled_from([(m, s, p) for (m, s), found in PLANS.items() for p in found])
batches = st.integers(1, 20_000)
contexts = st.integers(1, 160_000)
phases = st.sampled_from(["decode", "prefill"])
quick = settings(max_examples=60, deadline=None)


def roomy(system: str) -> System:
    """The system with memory that holds anything, so that time alone is looked at."""
    return changed(system, "memory.capacity", 1e9)


def changed(system: str | System, path: str, times: float) -> System:
    s = api.load_system(system) if isinstance(system, str) else system
    section, _, name = path.partition(".")
    part = getattr(s, section)
    q = getattr(part, name)
    q = q.model_copy(update={"value": q.value * times})
    return s.model_copy(update={section: part.model_copy(update={name: q})})


def run(model: str, system: System, plan: Plan, phase: str, b: int, t: int, **kw: Any) -> Estimate:
    if phase == "prefill":
        kw = {"new_tokens": 2000, **kw}
    return api.estimate(model, system, plan, phase=phase, batch=b, context_tokens=t, **kw)


@quick
@given(case=cases, phase=phases, b=batches, t=contexts)
def test_never_faster_than_light_and_sums_add_up(
    case: tuple[str, str, Plan], phase: str, b: int, t: int
) -> None:
    model, name, plan = case
    system = roomy(name)
    e = run(model, system, plan, phase, b, t)
    light = run(model, system, plan, phase, b, t, mode="speed-of-light")
    assert 0 < light.step_time_s <= e.step_time_s * REL
    assert sum(x.bytes for x in e.memory) == pytest.approx(e.memory_bytes, rel=1e-9)
    inside = sum(o.time_s for o in e.operators)
    assert inside == pytest.approx(e.values["t_through"], rel=1e-9)
    assert inside + e.outside_operators_s == pytest.approx(e.step_time_s, rel=1e-9)
    host = e.values["tau_step"]
    if plan.pp == 1 or b <= plan.dp:  # one microbatch has nobody to wait for
        assert e.outside_operators_s == pytest.approx(host, abs=1e-9 * e.step_time_s)
    else:
        assert e.outside_operators_s >= host - 1e-9 * e.step_time_s
    for o in e.operators:
        assert o.time_s * REL >= max(o.compute_s, o.memory_s, o.link_s, o.floor_s)
        assert min(o.flops, o.weight_bytes, o.kv_bytes, o.activation_bytes, o.message_bytes) >= 0
    assert e.throughput_tok_s == pytest.approx(e.throughput_tok_s_gpu * plan.gpus)
    assert all(math.isfinite(v) for k, v in e.values.items() if k not in ("c_gpu", "usd_per_mtok"))


FASTER = (
    "memory.bandwidth", "chip.peak_bf16", "chip.peak_fp8", "scale_up.bandwidth",
    "scale_out.bandwidth",
)  # fmt: skip


@quick
@given(
    case=cases, phase=phases, b=batches, t=contexts,
    path=st.sampled_from(FASTER), times=st.floats(1.01, 8),
)  # fmt: skip
def test_a_better_machine_is_never_slower(
    case: tuple[str, str, Plan], phase: str, b: int, t: int, path: str, times: float
) -> None:
    model, name, plan = case
    system = roomy(name)
    slow = run(model, system, plan, phase, b, t).step_time_s
    assert run(model, changed(system, path, times), plan, phase, b, t).step_time_s <= slow * REL


@quick
@given(case=cases, phase=phases, b=batches, more=batches, t=contexts, longer=st.integers(0, 3000))
def test_more_work_takes_no_less_time_and_memory(
    case: tuple[str, str, Plan], phase: str, b: int, more: int, t: int, longer: int
) -> None:
    model, name, plan = case
    assume(t + longer <= 160_000)
    system = roomy(name)
    base = run(model, system, plan, phase, b, t)
    for other in (
        run(model, system, plan, phase, b + more, t),
        run(model, system, plan, phase, b, t + longer),
    ):
        assert other.step_time_s * REL >= base.step_time_s
        assert other.memory_bytes * REL >= base.memory_bytes


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_one_gpu_sends_nothing(model: str, name: str, phase: str) -> None:
    e = run(model, roomy(name), Plan(), phase, 8, 4096)
    assert all(o.link_s == 0 and o.message_bytes == 0 for o in e.operators)
    assert not any(o.family == "collective" for o in e.operators)


@pytest.mark.parametrize("model", MODELS)
def test_expert_shards_add_up_to_the_whole(model: str) -> None:
    system = roomy("gb300-nvl72")

    def line(e: Estimate) -> float:
        return next(x.bytes for x in e.memory if x.name == "weights: experts")

    whole = line(run(model, system, Plan(), "decode", 1, 1))
    for plan in (Plan(tp=8, ep=8), Plan(dp=64, ep=64), Plan(tp=8, ep=1, etp=8), Plan(tp=2, dp=4)):
        assert line(run(model, system, plan, "decode", 1, 1)) * plan.gpus == pytest.approx(whole)
    # where the ranks do not divide the experts, the fullest rank holds one more
    moe = load_moe(model)
    uneven = line(run(model, system, Plan(dp=72, ep=72), "decode", 1, 1))
    assert uneven == pytest.approx(whole * math.ceil(moe.experts / 72) / moe.experts)


def load_moe(model: str) -> Any:
    return api.load_model(model).ffn["moe"]


def lines_of(e: Estimate) -> dict[str, float]:
    return {x.name: x.bytes for x in e.memory}


def test_a_draft_keeps_its_cache_resident() -> None:
    """What a draft reads of a cache in one pass over it must be resident."""
    kw: dict[str, Any] = dict(batch=2, context_tokens=500_000)
    plan = Plan(tp=8, ep=8)
    with_draft = api.estimate("kimi-k3", "gb300-nvl72", plan, draft_tokens=3, **kw)
    without = api.estimate("kimi-k3", "gb300-nvl72", plan, **kw)
    read = sum(
        o.kv_bytes
        for o in with_draft.operators
        if o.layer_kind == "draft dspark" and o.name == "core"
    )
    more = lines_of(with_draft)["KV cache and state"] - lines_of(without)["KV cache and state"]
    assert more == pytest.approx(read) and more == 5 * 2 * 500_000 * 1152


def test_only_the_ends_hold_embedding_and_head() -> None:
    """A pipeline does not thin out the head: its last stage holds all of it."""
    one, two, many = (
        lines_of(api.estimate("deepseek-v4-pro", "gb300-nvl72", Plan(tp=8, pp=pp), batch=1,
                              context_tokens=1000, draft_tokens=1))
        for pp in (1, 2, 31)
    )  # fmt: skip
    assert two["weights: head"] == many["weights: head"] == one["weights: head"]
    # the draft embeds its tokens, so the last stage holds the embedding too; else the first does
    assert two["weights: embedding"] == one["weights: embedding"]
    plain = lines_of(api.estimate("deepseek-v4-pro", "gb300-nvl72", Plan(tp=8, pp=2), batch=1,
                                  context_tokens=1000))  # fmt: skip
    assert "weights: embedding" not in plain and plain["weights: head"] == one["weights: head"]
    assert two["weights: draft_projection"] == one["weights: draft_projection"]
    assert two["weights: router"] < one["weights: router"]


def test_every_draft_of_a_card_can_be_chosen() -> None:
    kw: dict[str, Any] = dict(batch=8, context_tokens=1000, draft_tokens=5)
    got = {
        d: api.estimate("deepseek-v4-pro", "gb300-nvl72", Plan(tp=8), draft=d, **kw)
        for d in api.drafts("deepseek-v4-pro")
    }
    assert got["mtp"].acceptance_length == 2.55 and got["dspark"].acceptance_length == 3.61
    assert got["dspark"].memory_bytes > got["mtp"].memory_bytes  # three stages, not one block
    assert api.estimate("deepseek-v4-pro", "gb300-nvl72", Plan(tp=8), **kw).draft == "mtp"
    with pytest.raises(InputError, match="draft: 'eagle'.*mtp, dspark"):
        api.estimate("deepseek-v4-pro", "gb300-nvl72", Plan(tp=8), draft="eagle", **kw)
    with pytest.raises(InputError, match="draft: 'mtp' without draft_tokens"):
        api.estimate("deepseek-v4-pro", "gb300-nvl72", Plan(tp=8), draft="mtp", batch=1,
                     context_tokens=1)  # fmt: skip


def test_a_draft_must_fit_the_plan_and_the_phase() -> None:
    with pytest.raises(InputError, match="64 heads of kimi-k3 draft_mla"):
        api.estimate("kimi-k3", "gb300-nvl72", Plan(tp=12, ep=12), batch=1, context_tokens=9,
                     draft_tokens=1)  # fmt: skip
    with pytest.raises(InputError, match="draft_tokens: 2 in prefill"):
        api.estimate("deepseek-v4-pro", "gb300-nvl72", Plan(tp=8), batch=4, context_tokens=1000,
                     phase="prefill", new_tokens=100, draft_tokens=2)  # fmt: skip
    front = api.best("kimi-k3", "gb300-nvl72", batch=[1, 64], context_tokens=1000, draft_tokens=3)
    assert all(64 % Plan.parse(p).tp == 0 for p in front["plan"])


def test_precision_auto_is_what_the_chip_can_run() -> None:
    for system, want in (("h200-nvl8", "hopper"), ("gb300-nvl72", "native")):
        e = api.estimate("deepseek-v4-pro", system, Plan(tp=8), batch=1, context_tokens=1000)
        assert e.precision == want
        assert any("precision" in n for n in e.notes) == (want != "native")
    e = api.estimate("deepseek-v3.2", "h200-nvl8", Plan(tp=8), batch=1, context_tokens=1000)
    assert e.precision == "native"


@quick
@given(case=cases, phase=phases, b=batches, t=contexts, light=st.booleans())
def test_sweep_is_estimate_and_refusal_is_fits(
    case: tuple[str, str, Plan], phase: str, b: int, t: int, light: bool
) -> None:
    model, system, plan = case
    kw: dict[str, Any] = {"phase": phase, "mode": "speed-of-light" if light else "calibrated"}
    if phase == "prefill":
        kw["new_tokens"] = 2000
    s = api.sweep(model, system, plan, batch=[b, 1], context_tokens=[t, t], **kw)
    try:
        e = api.estimate(model, system, plan, batch=b, context_tokens=t, **kw)
    except DoesNotFit as refusal:
        assert not s["fits"][0]
        text = str(refusal)
        assert f"{s['memory_bytes'][0] / 1e9:.1f} GB per GPU needed" in text
        assert "sum" in text and "weights: experts" in text and plan.label in text
        return
    assert s["fits"][0] and s["bound"][0] == e.bound
    for column, value in (
        ("step_time_s", e.step_time_s), ("tpot_s", e.tpot_s),
        ("interactivity_tok_s_user", e.interactivity_tok_s_user),
        ("throughput_tok_s_gpu", e.throughput_tok_s_gpu),
        ("throughput_tok_s_mw", e.throughput_tok_s_mw), ("memory_bytes", e.memory_bytes),
        ("usd_per_mtok", e.usd_per_mtok),
    ):  # fmt: skip
        if value is not None:
            assert s[column][0] == pytest.approx(value, rel=1e-12), column


def test_chunks_do_not_change_columns() -> None:
    rng = np.random.default_rng(1)
    n = 2 * api.CHUNK + 17
    b, t = rng.integers(1, 5000, n), rng.integers(1, 10**6, n)
    p = Plan(dp=72)
    whole = api.sweep("deepseek-v4-pro", "vr-nvl72", p, batch=b, context_tokens=t)
    for i in (0, api.CHUNK - 1, api.CHUNK, n - 1):
        one = api.sweep("deepseek-v4-pro", "vr-nvl72", p, batch=b[i], context_tokens=t[i])
        for k in whole:
            if whole[k].dtype.kind == "f":
                assert whole[k][i] == pytest.approx(one[k][0], rel=1e-12), k
            else:
                assert whole[k][i] == one[k][0], k


@pytest.mark.parametrize(("model", "system"), list(PLANS))
def test_best_is_a_front_of_points_that_fit(model: str, system: str) -> None:
    batch = [2**i for i in range(14)]
    try:
        r = api.best(model, system, batch=batch, context_tokens=8192)
    except DoesNotFit as refusal:
        assert "GB per GPU" in str(refusal)
        return
    x, y = r["interactivity_tok_s_user"], r["throughput_tok_s_mw"]
    assert r["fits"].all()
    assert (np.diff(x) > 0).all() and (np.diff(y) < 0).all()
    for i in range(len(x)):
        p = Plan.parse(str(r["plan"][i]))
        e = api.estimate(model, system, p, batch=int(r["batch"][i]), context_tokens=8192)
        assert e.throughput_tok_s_mw == pytest.approx(y[i]) and p.gpus == r["gpus"][i]
    for p in PLANS[model, system]:  # nothing searched lies beyond the front
        s = api.sweep(model, system, p, batch=batch, context_tokens=8192)
        for u, v in zip(
            s["interactivity_tok_s_user"][s["fits"]], s["throughput_tok_s_mw"][s["fits"]],
            strict=True,
        ):  # fmt: skip
            assert ((x >= u * (1 - 1e-9)) & (y >= v * (1 - 1e-9))).any()


GOOD: dict[str, Any] = dict(
    model="deepseek-v4-pro", system="gb300-nvl72", plan=Plan(dp=72), batch=576, context_tokens=8192
)
BAD = [
    ("model", "deepseek-v5"), ("model", ""), ("model", "../x"), ("model", 3), ("model", None),
    ("system", "gb200"), ("system", ""), ("system", 3), ("system", None),
    ("plan", Plan(tp=3)), ("plan", Plan(ep=5)), ("plan", "tp=8"), ("plan", None),
    ("batch", 0), ("batch", -1), ("batch", 1.5), ("batch", "8"), ("batch", None), ("batch", True),
    ("batch", math.nan), ("batch", math.inf), ("batch", 10**8), ("batch", [1]),
    ("context_tokens", 0), ("context_tokens", -5), ("context_tokens", 10**9),
    ("context_tokens", math.nan), ("context_tokens", "8k"), ("context_tokens", None),
    ("phase", "train"), ("phase", None), ("phase", []), ("new_tokens", 2), ("new_tokens", 0),
    ("new_tokens", 1.5), ("new_tokens", None),
    ("precision", "fp3"), ("precision", None), ("precision", []), ("mode", "fast"),
    ("mode", None), ("draft_tokens", -1), ("draft_tokens", 33), ("draft_tokens", 0.5),
    ("draft_tokens", "1"), ("acceptance_length", 2.0), ("acceptance_length", math.nan),
    ("acceptance_length", "2"), ("power_basis", "wall"), ("power_basis", None),
    ("price_basis", "free"), ("price_basis", 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda x: repr(x)[:24])
def test_bad_input_is_named(name: str, value: Any) -> None:
    with pytest.raises(InputError) as e:
        api.estimate(**{**GOOD, name: value})
    text = str(e.value)
    assert name in text
    shown = value.label if isinstance(value, Plan) else str(value).strip("'[]")
    numbers = text.replace(",", "")
    assert shown in numbers or str(getattr(value, "tp", "")) in numbers


@pytest.mark.parametrize("value", [0.5, 3.0, math.nan, math.inf, "2", True, -1])
def test_acceptance_length_is_bounded_by_the_draft(value: Any) -> None:
    with pytest.raises(InputError, match="acceptance_length"):
        api.estimate(**GOOD, draft_tokens=1, acceptance_length=value)


@pytest.mark.parametrize("name", ["batch", "context_tokens"])
@pytest.mark.parametrize("value", [[1, -1], [1.5], [math.nan], [math.inf], ["x"], [1, None]])
def test_bad_columns_are_named(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name):
        api.sweep(**{**GOOD, name: value})


def test_columns_that_do_not_broadcast_are_named() -> None:
    with pytest.raises(InputError, match="batch"):
        api.sweep(**{**GOOD, "batch": [1, 2], "context_tokens": [1, 2, 3]})


def test_sweep_refuses_the_contexts_that_estimate_refuses() -> None:
    m = api.load_model("deepseek-v4-pro")
    for keys in (
        dict(phase="decode", context_tokens=0),
        dict(phase="decode", context_tokens=m.shape.context_tokens + 1),
        dict(phase="prefill", context_tokens=m.shape.context_tokens - 1, new_tokens=2),
    ):
        for f in (api.estimate, api.sweep):
            with pytest.raises(InputError, match="context_tokens"):
                f(m, "gb300-nvl72", Plan(dp=8), batch=1, **keys)
