"""What must hold for every estimate, on the real cards; and refusals of bad input."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from perfmodel import api
from perfmodel.api import Estimate, Plan
from perfmodel.errors import DoesNotFit, InputError
from perfmodel.hardware import System
from perfmodel.layers import MoE
from perfmodel.operators.collect import collect

MODELS, SYSTEMS = api.list_models(), api.list_systems()
# every model and every machine once: what is enumerated; what is random draws from all pairs
PAIRS = [
    (MODELS[i % len(MODELS)], SYSTEMS[i % len(SYSTEMS)])
    for i in range(max(len(MODELS), len(SYSTEMS)))
]
MIXED = [m for m in MODELS if any(isinstance(f, MoE) for f in api.load_model(m).ffn.values())]
REL = 1 + 1e-9
NEW = 2000  # tokens that a prefill here computes


@cache
def found(model: str, system: str) -> list[Plan]:
    return api.plans(model, system)


@st.composite
def _case(draw: st.DrawFn) -> tuple[str, str, Plan]:
    model, system = draw(st.sampled_from(MODELS)), draw(st.sampled_from(SYSTEMS))
    return model, system, draw(st.sampled_from(found(model, system)))


cases = _case()
batches = st.one_of(st.integers(1, 80), st.integers(1, 20_000))
contexts = st.integers(1, 160_000)  # cut to what the model takes: see `within`
phases = st.sampled_from(["decode", "prefill"])
engines = st.sampled_from(api.list_engines())
overlaps = st.sampled_from(["none", "two-batch", "fused"])
quick = settings(max_examples=60, deadline=None)


def within(model: str, t: int, room: int = NEW) -> int:
    """A context of the model: the drawn one, or what the shorter limit makes of it."""
    return 1 + t % (api.load_model(model).shape.context_tokens - room)


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


def possible(overlap: str, system: str) -> str:
    """`fused` only where the card has such a kernel."""
    lacks = overlap == "fused" and api.load_system(system).floors.fused is None
    return "none" if lacks else overlap


def run(model: str, system: System, plan: Plan, phase: str, b: int, t: int, **kw: Any) -> Estimate:
    if phase == "prefill":
        kw = {"new_tokens": NEW, **kw}
    return api.estimate(model, system, plan, phase=phase, batch=b, context_tokens=t, **kw)


@quick
@given(case=cases, phase=phases, b=batches, t=contexts, engine=engines, overlap=overlaps)
def test_never_faster_than_light_and_sums_add_up(
    case: tuple[str, str, Plan], phase: str, b: int, t: int, engine: str, overlap: str
) -> None:
    model, name, plan = case
    system, t = roomy(name), within(model, t)
    kw = dict(engine=engine, overlap=possible(overlap, name))
    e = run(model, system, plan, phase, b, t, **kw)
    light = run(model, system, plan, phase, b, t, mode="speed-of-light", **kw)
    # Light routes evenly, which touches more experts than the calibrated routing with its popular
    # ones; so their time is compared at as many bytes of weights.
    slower = 0.0
    timed = {(o.layer_kind, o.name): o for o in e.operators}
    for o in light.operators:
        real = timed[o.layer_kind, o.name]
        more = max(1.0, o.weight_bytes / real.weight_bytes) if o.family == "experts" else 1.0
        assert o.time_s <= real.time_s * more * REL, (o.layer_kind, o.name)
        slower += max(0.0, o.time_s - real.time_s)
    assert light.step_time_s > 0 and light.values["t_host"] == 0
    if not slower:
        assert light.step_time_s <= e.step_time_s * REL
    assert sum(x.bytes for x in e.memory) == pytest.approx(e.memory_bytes, rel=1e-9)
    assert light.memory_bytes == e.memory_bytes
    inside = sum(o.time_s for o in e.operators)
    if kw["overlap"] == "none":
        assert inside == pytest.approx(e.values["t_through"], rel=1e-9)
    elif kw["overlap"] == "fused":  # dispatch and combine are inside the expert kernel
        hidden = sum(o.time_s for o in e.operators if o.family == "exchange" and layered(o))
        assert inside - hidden == pytest.approx(e.values["t_through"], rel=1e-9)
    assert e.values["t_through"] + e.outside_operators_s == pytest.approx(e.step_time_s, rel=1e-9)
    # the host: once a step, and for each sequence of the fullest rank
    host = api.load_system(name).floors.step.value
    host += math.ceil(b / plan.dp) * api.load_engine(engine).values.sequence.value
    if plan.pp == 1 or b <= plan.dp:  # one microbatch has nobody to wait for
        assert e.outside_operators_s == pytest.approx(host, abs=1e-9 * e.step_time_s)
    else:
        assert e.outside_operators_s >= host - 1e-9 * e.step_time_s
    for o in e.operators:
        assert o.time_s * REL >= max(o.compute_s, o.memory_s, o.link_s, o.floor_s)
        assert o.time_s <= (o.compute_s + o.memory_s + o.link_s + o.floor_s) * REL
        assert min(o.flops, o.weight_bytes, o.kv_bytes, o.activation_bytes, o.message_bytes) >= 0
    assert e.throughput_tok_s == pytest.approx(e.throughput_tok_s_gpu * plan.gpus)
    money, power = ("c_gpu", "usd_per_mtok"), ("P_gpu", "throughput_mw")  # where cards have none
    priceless = () if e.price_set else money
    priceless += () if e.power_set else power
    assert {k for k, v in e.values.items() if not math.isfinite(v)} == set(priceless)


def layered(o: api.OperatorLine) -> bool:
    return not o.layer_kind.startswith("draft ")


FASTER = (
    "memory.bandwidth", "chip.peak_bf16", "chip.peak_fp8", "chip.peak_fp4", "scale_up.bandwidth",
    "scale_out.bandwidth", "efficiency.hbm_gemm", "efficiency.hbm_moe", "efficiency.hbm_moe_4bit",
    "efficiency.hbm_attention", "efficiency.hbm_sparse", "efficiency.hbm_scan",
    "efficiency.link_all_reduce", "efficiency.link_all_reduce_one", "efficiency.link_all_to_all",
    "efficiency.moe_fused", "efficiency.hbm_moe_fused",
)  # fmt: skip
SMALLER = (
    "kernel", "all_reduce", "all_reduce_two", "all_reduce_rank", "all_to_all", "scale_out", "send",
    "step", "tile_rows", "context_decode", "context_prefill", "sparse_heads", "scan_token", "fused",
)  # fmt: skip
BETTER = [(f, 1) for f in FASTER] + [(f"floors.{f}", -1) for f in SMALLER]
BETTER += [("efficiency.unhidden", -1), ("efficiency.unhidden_attention", -1)]


def there(system: str, path: str) -> bool:
    section, _, name = path.partition(".")
    return getattr(getattr(api.load_system(system), section), name) is not None


@settings(quick, max_examples=100)
@given(
    case=cases, phase=phases, b=batches, t=contexts, overlap=overlaps,
    path=st.sampled_from(BETTER), times=st.floats(1.01, 8),
)  # fmt: skip
def test_a_better_machine_is_never_slower(
    case: tuple[str, str, Plan], phase: str, b: int, t: int, overlap: str,
    path: tuple[str, int], times: float,
) -> None:  # fmt: skip
    model, name, plan = case
    assume(there(name, path[0]))
    system, t = roomy(name), within(model, t)
    better = changed(system, path[0], times ** path[1])
    kw = dict(overlap=possible(overlap, name))
    slow = run(model, system, plan, phase, b, t, **kw).step_time_s
    assert run(model, better, plan, phase, b, t, **kw).step_time_s <= slow * REL


@quick
@given(
    case=cases, phase=phases, b=batches, more=batches, t=contexts, longer=st.integers(0, 3000),
    overlap=overlaps,
)  # fmt: skip
def test_more_work_takes_no_less_time_and_memory(
    case: tuple[str, str, Plan], phase: str, b: int, more: int, t: int, longer: int, overlap: str
) -> None:
    model, name, plan = case
    system, t = roomy(name), within(model, t, NEW + 3000)
    kw = dict(overlap=possible(overlap, name))
    if plan.pp > 1:
        # A mean microbatch stands for all, so one more sequence that starts a second microbatch
        # routes fewer tokens in each: rounds are whole here, where the mean is each of them.
        b, more = plan.dp * plan.pp * b, plan.dp * plan.pp * more
    base = run(model, system, plan, phase, b, t, **kw)
    for other in (
        run(model, system, plan, phase, b + more, t, **kw),
        run(model, system, plan, phase, b, t + longer, **kw),
    ):
        assert other.step_time_s * REL >= base.step_time_s
        assert other.memory_bytes * REL >= base.memory_bytes


@pytest.mark.parametrize(("model", "name"), PAIRS)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_one_gpu_sends_nothing(model: str, name: str, phase: str) -> None:
    e = run(model, roomy(name), Plan(), phase, 8, 4096)
    assert all(o.link_s == 0 and o.message_bytes == 0 for o in e.operators)
    assert not {o.family for o in e.operators} & {"collective", "all_reduce", "exchange", "send"}


@settings(quick, max_examples=30)
@given(case=cases, phase=phases, b=batches, t=contexts)
def test_one_rank_is_no_parallelism(
    case: tuple[str, str, Plan], phase: str, b: int, t: int
) -> None:
    """Sizes of one say what leaving them out says, whatever domain the GPU is in."""
    model, name, _ = case
    system, t = roomy(name), within(model, t)
    one = run(model, system, Plan(), phase, b, t)
    spelt = run(model, system, Plan(tp=1, dp=1, pp=1, ep=1, etp=1, dcp=1), phase, b, t)
    alone = run(model, changed(system, "scale_up.gpus", 1 / system.scale_up.gpus.value), Plan(),
                phase, b, t)  # fmt: skip
    assert one.step_time_s == spelt.step_time_s == alone.step_time_s
    # there is no exchange to hide; kernels are launched twice all the same
    two = run(model, system, Plan(), phase, b, t, overlap="two-batch")
    assert two.values["t_exchange"] == 0 and two.step_time_s * REL >= one.step_time_s
    if possible("fused", name) == "fused" and model not in MIXED:
        fused = run(model, system, Plan(), phase, b, t, overlap="fused")
        assert fused.step_time_s == one.step_time_s


@pytest.mark.parametrize("model", MIXED)
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


@pytest.mark.parametrize("model", sorted(set(MODELS) - set(MIXED)))
def test_dense_models_have_no_experts(model: str) -> None:
    e = run(model, roomy("gb300-nvl72"), Plan(tp=8), "decode", 16, 1000)
    assert not {o.family for o in e.operators} & {"experts", "exchange"}
    assert not any("experts" in x.name or "router" in x.name for x in e.memory)
    assert e.values["t_exchange"] == 0


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
@given(
    case=cases, phase=phases, b=batches, t=contexts, light=st.booleans(), engine=engines,
    overlap=overlaps,
)  # fmt: skip
def test_sweep_is_estimate_and_refusal_is_fits(
    case: tuple[str, str, Plan], phase: str, b: int, t: int, light: bool, engine: str, overlap: str
) -> None:
    model, system, plan = case
    kw: dict[str, Any] = {"phase": phase, "mode": "speed-of-light" if light else "calibrated"}
    kw |= {"engine": engine, "overlap": possible(overlap, system)}
    t = within(model, t)
    if phase == "prefill":
        kw["new_tokens"] = NEW
    s = api.sweep(model, system, plan, batch=[b, 1], context_tokens=[t, t], **kw)
    try:
        e = api.estimate(model, system, plan, batch=b, context_tokens=t, **kw)
    except DoesNotFit as refusal:
        assert not s["fits"][0]
        text = str(refusal)
        assert f"{s['memory_bytes'][0] / 1e9:.1f} GB per GPU needed" in text
        weights = "experts" if model in MIXED else "dense"
        assert "sum" in text and f"weights: {weights}" in text and plan.label in text
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
            # without floors a kink of the fast code is moved by a tiny step (columns.TINY)
            assert s[column][0] == pytest.approx(value, rel=1e-8 if light else 1e-12), column


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


@pytest.mark.parametrize(("model", "system"), PAIRS)
def test_best_is_a_front_of_points_that_fit(model: str, system: str) -> None:
    batch = [2**i for i in range(14)]
    if api.load_system(system).power.all_in is None:
        with pytest.raises(InputError, match=f"power.all_in is not on the card of {system}"):
            api.best(model, system, batch=batch, context_tokens=8192)
        return
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
    for p in found(model, system):  # nothing searched lies beyond the front
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
    ("price_basis", "free"), ("price_basis", 0), ("engine", "ollama"), ("engine", 7),
    ("balance", "uneven"), ("balance", None), ("redundant_experts", -1),
    ("redundant_experts", 0.5), ("redundant_experts", 10**6), ("overlap", "three-batch"),
    ("overlap", None), ("overlap", []),
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


def sum_of(e: Estimate, family: str) -> float:
    return sum(o.time_s for o in e.operators if o.family == family)


@settings(quick, max_examples=30)
@given(b=st.integers(1, 40_000), t=st.integers(1, 40_000), engine=engines, phase=phases,
       model=st.sampled_from(MIXED), dp=st.sampled_from([8, 36, 72]))  # fmt: skip
def test_two_batches_hide_at_most_the_exchange(
    b: int, t: int, engine: str, phase: str, model: str, dp: int
) -> None:
    """Saved is the smaller of exchange and the rest, less a second launch of every kernel."""
    system, t = roomy("gb300-nvl72"), within(model, t)
    plain, two = (
        run(model, system, Plan(dp=dp), phase, b, t, engine=engine, overlap=x)
        for x in ("none", "two-batch")
    )
    exchange = sum_of(plain, "exchange")
    layers = sum(o.time_s for o in plain.operators if o.layer_kind != "ends")
    launches = sum(
        o.floor_s
        for o in plain.operators
        if o.layer_kind != "ends" and o.link_s == 0 and o.message_bytes == 0
    )
    saved = plain.step_time_s - two.step_time_s
    assert saved <= exchange * REL
    assert saved == pytest.approx(
        min(exchange, layers - exchange) - launches, abs=1e-9 * plain.step_time_s
    )
    # at the speed of light a launch is free, so nothing is lost
    light = [
        run(model, system, Plan(dp=dp), phase, b, t, mode="speed-of-light", overlap=x)
        for x in ("none", "two-batch")
    ]
    exchange = sum_of(light[0], "exchange")
    saved = light[0].step_time_s - light[1].step_time_s
    assert -1e-9 * light[0].step_time_s <= saved <= exchange * REL


def test_a_fused_expert_kernel_has_its_own_rates() -> None:
    """V4 Pro on GB300: nothing waits for the exchange; experts run at the card's fused rates."""
    card = api.load_system("gb300-nvl72")
    kw: dict[str, Any] = dict(batch=64 * 128, context_tokens=4000)
    plain, fused = (
        api.estimate("deepseek-v4-pro", "gb300-nvl72", Plan(dp=64), overlap=x, **kw)
        for x in ("none", "fused")
    )
    (o,) = [o for o in fused.operators if o.family == "experts"]
    assert card.floors.fused and card.efficiency.moe_fused and card.efficiency.hbm_moe_fused
    moved = o.weight_bytes + o.activation_bytes
    assert o.memory_s == pytest.approx(moved / 8e12 / card.efficiency.hbm_moe_fused.value)
    assert o.compute_s == pytest.approx(o.flops / 5e15 / card.efficiency.moe_fused.value)
    assert o.floor_s == pytest.approx(61 * card.floors.fused.value)
    # 6 of 384 experts, three matrices; no padding: the kernel packs the tokens of all ranks
    assert o.flops == pytest.approx(61 * 2 * 128 * 6 * 3 * 7168 * 3072)
    (before,) = [o for o in plain.operators if o.family == "experts"]
    assert fused.step_time_s == pytest.approx(
        plain.step_time_s - before.time_s + o.time_s - sum_of(plain, "exchange")
    )


@pytest.mark.parametrize("system", SYSTEMS)
def test_fused_is_refused_where_there_is_no_such_kernel(system: str) -> None:
    model = "deepseek-v4-pro"
    kw: dict[str, Any] = dict(batch=8, context_tokens=1000, overlap="fused")
    if api.load_system(system).floors.fused is not None:
        assert api.estimate(model, roomy(system), Plan(dp=8), **kw).overlap == "fused"
        return
    for f in (api.estimate, api.sweep):
        with pytest.raises(InputError, match=f"overlap: 'fused'.*{system}.*none or two-batch"):
            f(model, system, Plan(dp=8), **kw)


@pytest.mark.parametrize("engine", api.list_engines())
def test_an_engine_adds_what_its_card_says(engine: str) -> None:
    """Llama 70B in FP8 with one scale a tensor: kernels, sequences, and nothing else."""
    values = api.load_engine(engine).values
    card = api.load_system("h200-nvl8")
    kw: dict[str, Any] = dict(batch=37, context_tokens=3000, precision="fp8")
    alone, e = (
        api.estimate("llama-3.1-70b", "h200-nvl8", Plan(tp=4), engine=x, **kw)
        for x in ("kernels", engine)
    )
    kernels = sum(o.floor_s for o in alone.operators if o.message_bytes == 0)
    more = kernels * (values.kernel_scale.value - 1) + 37 * values.sequence.value
    assert e.step_time_s - alone.step_time_s == pytest.approx(more, abs=1e-12)
    assert alone.outside_operators_s == pytest.approx(card.floors.step.value)
    assert kernels / card.floors.kernel.value == pytest.approx(
        round(kernels / card.floors.kernel.value)
    )


def test_quantising_kernels_are_the_engines() -> None:
    """Block-scaled FP8 products of Qwen3 235B: qkv and o of 94 layers; router and head are BF16."""

    def floors(engine: str, precision: str) -> float:
        e = api.estimate("qwen3-235b-a22b", "h200-nvl8", Plan(tp=4), batch=4, context_tokens=99,
                         engine=engine, precision=precision)  # fmt: skip
        one = api.load_system("h200-nvl8").floors.kernel.value
        one *= api.load_engine(engine).values.kernel_scale.value
        return sum(o.floor_s for o in e.operators if o.family == "linear") / one

    for engine in api.list_engines():
        extra = api.load_engine(engine).values.quantise_fp8.value
        assert floors(engine, "fp8") - floors(engine, "native") == pytest.approx(2 * 94 * extra)


@pytest.mark.parametrize("value", ["sgl", "VLLM", "", "typical.toml", 3, None])
def test_unknown_engines_name_the_known(value: Any) -> None:
    for f in (api.estimate, api.sweep):
        with pytest.raises(InputError) as e:
            f(**{**GOOD, "engine": value})
        assert "engine" in str(e.value) or "typical.toml" in str(e.value)
        if value in ("sgl", "VLLM"):
            assert all(name in str(e.value) for name in api.list_engines())


@pytest.mark.parametrize(("model", "system"), PAIRS)
def test_explain_says_what_estimate_says(model: str, system: str) -> None:
    """Every operator's time and parts, in one layer, from the formula that is shown."""
    mixed = model in MIXED
    fused = possible("fused" if mixed else "none", system)
    plan = Plan(dp=8, ep=8) if mixed else Plan(tp=8)
    e = run(model, roomy(system), plan, "decode", 40, 3000, overlap=fused)
    names = api.explain_names(e)
    for metric, value in (("step_time", e.step_time_s), ("tpot", e.tpot_s)):
        assert api.explain(e, metric).value == pytest.approx(value)
    parts = {
        "flops": "flops", "weight_bytes": "weight_bytes", "kv_bytes": "kv_bytes",
        "act_bytes": "activation_bytes", "message_bytes": "message_bytes", "link_s": "link_s",
    }  # fmt: skip
    for o in e.operators[:: 1 if model == "deepseek-v4-pro" else 3] + [
        o for o in e.operators if o.family in ("experts", "exchange", "all_reduce")
    ]:
        name = f"{o.layer_kind}.{o.name}"
        x = api.explain(e, name)
        assert x.value * o.count == pytest.approx(o.time_s), name
        for part, column in parts.items():
            if f"{name}.{part}" in names:
                got = api.explain(e, f"{name}.{part}").value * o.count
                assert got == pytest.approx(getattr(o, column)), (name, part)


@pytest.mark.parametrize("pp", [2, 4, 7])
def test_one_more_sequence_never_shortens_a_pipelined_step(pp):
    batch = np.arange(1, 70)
    v = api.sweep("deepseek-v3", "b200-nvl8", Plan(dp=4, ep=4, pp=pp), batch=batch,
                  context_tokens=4096)  # fmt: skip
    assert (np.diff(v["step_time_s"]) > -1e-12).all()


def test_a_draft_runs_in_its_own_format():
    model = api.load_model("deepseek-v3")
    ops = {o.name: o for o in collect(model, "nvfp4", "decode", "mtp").ops
           if o.layer_kind.startswith("draft")}  # fmt: skip
    main = {o.name: o for o in collect(model, "nvfp4", "decode").ops}
    assert main["experts"].bytes_per_param < 0.6 and ops["experts"].bytes_per_param == 2
    assert ops["router"].bytes_per_param == main["router"].bytes_per_param
    native = {o.name: o for o in collect(model, "native", "decode", "mtp").ops
              if o.layer_kind.startswith("draft")}  # fmt: skip
    assert native["experts"].bytes_per_param < 1.1
