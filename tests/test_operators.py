"""Operators against arithmetic written out here, independent of the formulas they come from."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.api import (
    Estimate,
    OperatorLine,
    Plan,
    estimate,
    load_engine,
    load_model,
    load_system,
)
from perfmodel.operators import families as fam
from perfmodel.request import assumptions

V4, K3, GB300, H200 = "deepseek-v4-pro", "kimi-k3", "gb300-nvl72", "h200-nvl8"
# of V4 Pro: its experts have 4 bits, its attention gathers
EFFICIENCY = {
    "linear": ("gemm", "gemm"), "experts": ("moe", "moe_4bit"), "indexer": ("gemm", "attention"),
    "elementwise": ("gemm", "stream"), "attention": ("attention_decode", "sparse"),
}  # fmt: skip
LIGHT: dict[str, Any] = dict(mode="speed-of-light")


def op(e: Estimate, kind: str, name: str) -> OperatorLine:
    (line,) = [o for o in e.operators if (o.layer_kind, o.name) == (kind, name)]
    return line


def point(model: str, system: str, plan: Plan, **kw: Any) -> Estimate:
    return estimate(model, system, plan, **{"batch": 1, "context_tokens": 1000, **kw})


def touched(experts: int, k: int, ep: int, tokens: float) -> float:
    """Experts with work on the busiest rank: the mean, and so many deviations above it."""
    nu = assumptions()["routing_variance"].value
    held = math.ceil(experts / ep)
    one = 1 - k / experts  # the first token gets exactly k; the others by popularity
    missed = one * (1 - nu * math.log(one) * (tokens - 1)) ** (-1 / nu)
    mean = held * (1 - missed)
    return min(held, mean + math.sqrt(2 * math.log(ep) * mean * (1 - mean / held)))


@pytest.mark.parametrize("system", [GB300, H200])
def test_times_are_work_over_the_cards_rates(system: str) -> None:
    """FLOPs over peak x efficiency, bytes over bandwidth x efficiency, kernels x floor.

    The longer of the two hides the shorter but for a share of it that the card names.
    """
    card = load_system(system)
    e = point(V4, system, Plan(tp=8), batch=8, context_tokens=100_000)
    floor = card.floors.kernel.value * load_engine("typical").values.kernel_scale.value
    checked = set()
    for o in e.operators:
        if o.family not in EFFICIENCY:
            continue
        cls, hbm = EFFICIENCY[o.family]
        peak = card.field(f"chip.peak_{o.precision}").value if o.precision != "fp4" else 15e15
        rate = peak * card.field(f"efficiency.{cls}_{o.precision}").value
        moved = o.weight_bytes + o.kv_bytes + o.activation_bytes
        bandwidth = card.memory.bandwidth.value * card.field(f"efficiency.hbm_{hbm}").value
        assert o.compute_s == pytest.approx(o.flops / rate)
        assert o.memory_s == pytest.approx(moved / bandwidth)
        left = card.efficiency.unhidden
        if o.family == "attention":
            left = card.efficiency.unhidden_attention
        both = sorted((o.compute_s, o.memory_s))
        assert o.time_s == pytest.approx(both[1] + left.value * both[0] + o.floor_s)
        kernels = o.floor_s / o.count / floor
        assert kernels == pytest.approx(round(kernels)) and kernels >= 1
        checked.add((o.layer_kind, o.name))
    assert len(checked) > 25


def test_a_collective_that_leaves_the_domain() -> None:
    """16 GPUs in domains of 8: half of the peers are reached over the network."""
    f = fam.COLLECTIVE.compile()
    keys = dict(x=1e6, v=1.0, D=8.0, W_in=300e9, W_out=40e9, l=10e-6, l_out=30e-6)
    two = f(**keys, g=16.0)
    sent = 1e6 * 15 / 16
    assert two["message_bytes"] == sent
    assert two["t_in"] == pytest.approx(sent / 2 / 300e9)
    assert two["t_out"] == two["link_s"] == pytest.approx(sent / 2 / 40e9)
    assert two["latency_s"] == pytest.approx(40e-6)
    one = f(**keys, g=8.0)
    assert one["link_s"] == pytest.approx(1e6 * 7 / 8 / 300e9) and one["latency_s"] == 10e-6
    alone = f(**keys, g=1.0)
    assert alone["link_s"] == alone["latency_s"] == 0


def test_wide_ep_pays_the_network_on_small_domains() -> None:
    """Dispatch of V4 Pro on 16 H200: 6 experts x 7168 values x 1 byte a token, 8 of 16 by NIC."""
    e = point(V4, H200, Plan(dp=16), batch=16 * 64)
    d, card = op(e, "moe", "dispatch"), load_system(H200)
    sent = 64 * 6 * 7168 * 15 / 16
    assert d.message_bytes == pytest.approx(61 * sent)
    nic = card.scale_out.bandwidth.value * card.efficiency.link_scale_out.value
    assert d.link_s == pytest.approx(61 * 64 * 6 * 7168 * 8 / 16 / nic)


def test_pairs_follow_the_imbalance() -> None:
    pairs = {phi: experts(M=1000, E=384, k=6, ep=64, phi=phi)["pairs"] for phi in (1.0, 1.2)}
    assert pairs[1.0] == pytest.approx(1000 * 6 / 64) and pairs[1.2] == pytest.approx(112.5)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_unbalanced_ranks_wait_for_the_busiest(phase: str) -> None:
    """Its load over the mean is 1 + slope (ep - 1): pairs of V4 Pro on 64 ranks, 6 of 384."""
    kw: dict[str, Any] = dict(batch=64, phase=phase, new_tokens=1 if phase == "decode" else 300)
    even, busy = (
        point(V4, GB300, Plan(dp=64), balance=x, overlap="fused", **kw)
        for x in ("balanced", "unbalanced")
    )
    pair, slope = 2 * 3 * 7168 * 3072 * 61, assumptions()[f"imbalance_slope_{phase}"].value
    pairs = 64 * kw["new_tokens"] * 6 / 64
    rebalanced = assumptions()[f"imbalance_{phase}"].value
    assert op(even, "moe", "experts").flops == pytest.approx(pairs * pair * rebalanced)
    assert op(busy, "moe", "experts").flops == pytest.approx(pairs * pair * (1 + slope * 63))
    light = point(V4, GB300, Plan(dp=64), balance="unbalanced", overlap="fused", **kw, **LIGHT)
    assert op(light, "moe", "experts").flops == pytest.approx(pairs * pair)


def test_replicas_are_held_and_share_the_load() -> None:
    """32 replicas beside 256 experts on 32 ranks: nine on each, the pairs of a rank as before."""
    plain, more = (
        point("deepseek-v3", GB300, Plan(dp=32), batch=320, redundant_experts=r, overlap="fused")
        for r in (0, 32)
    )
    held = [{x.name: x.bytes for x in e.memory}["weights: experts"] for e in (plain, more)]
    assert held[1] == pytest.approx(held[0] * 9 / 8)
    assert op(more, "moe", "experts").flops == pytest.approx(op(plain, "moe", "experts").flops)
    uneven = experts(E=256, R=16, ep=32, M=100)  # 272 / 32 = 8.5: the fullest rank has 9
    assert uneven["held"] == 9 and uneven["pairs"] == pytest.approx(100 * 8 * 9 / 272)
    dense = [point("llama-3.1-8b", GB300, Plan(), redundant_experts=r).step_time_s for r in (0, 32)]
    assert dense[0] == dense[1]


def experts(**kw: float) -> dict[str, float]:
    keys = dict(M=1.0, E=256, k=8, R=0, ep=1, etp=1, h=1, d=1, n_mat=3, w=1, a=1, r=0, phi=1.0,
                nu=1e-6, xi=0.0)  # fmt: skip
    out = fam.EXPERTS.compile()(**{k: float(v) for k, v in (keys | kw).items()})
    return {k: float(v) for k, v in out.items()}


def test_uneven_ranks_take_more_of_the_load() -> None:
    keys: dict[str, float] = dict(M=1e4, E=384, k=6)
    uneven = experts(**keys, ep=72)  # 384 / 72 = 5.33: the fullest rank has 6
    assert uneven["pairs"] == pytest.approx(1e4 * 6 * 6 / 384)
    assert uneven["touched"] == pytest.approx(6, rel=1e-6)
    assert experts(**keys, ep=384)["pairs"] == pytest.approx(1e4 * 6 / 384)


@pytest.mark.parametrize(
    ("e", "k", "tokens", "exact"),
    [
        (256, 8, 1, 8), (384, 6, 1, 6), (896, 16, 1, 16), (128, 4, 1, 4), (512, 10, 1, 10),
        (256, 8, 2, 15.75),  # 8 + 8 - 64/256
        (8, 7, 2, 7.875), (4, 2, 3, 3.5),  # 4 (1 - 1/8)
        (256, 8, 10_000, 256),
    ],
)  # fmt: skip
def test_uniform_routing_is_the_limit(e: int, k: int, tokens: int, exact: float) -> None:
    """As nu goes to 0: E (1 - (1 - k/E)^M), which is k experts for one token."""
    assert e * (1 - (1 - k / e) ** tokens) == pytest.approx(exact)
    limit = [experts(E=e, k=k, M=tokens, nu=nu)["mean_touched"] for nu in (1e-2, 1e-4, 1e-6)]
    assert limit[-1] == pytest.approx(exact, rel=2e-6)  # what the speed of light takes
    errors = [abs(x - exact) for x in limit]
    assert errors == sorted(errors, reverse=True)


def test_unequal_popularity_is_a_mean_over_a_gamma_distribution() -> None:
    """The closed form against the mean of (1 - k/E)^(x M), x drawn from mean 1, variance nu.

    The first token is exact: it gets k experts whatever their popularity.
    """
    rng = np.random.default_rng(5)
    for nu, m in ((0.5, 3), (2.66, 1), (2.66, 40), (2.66, 4000), (5.0, 64)):
        x = rng.gamma(1 / nu, nu, 2_000_000)
        drawn = 384 * (1 - (1 - 6 / 384) * np.mean((1 - 6 / 384) ** (x * (m - 1))))
        assert experts(E=384, k=6, M=m, nu=nu)["mean_touched"] == pytest.approx(drawn, rel=5e-3)


# of every mixture-of-experts model in the catalogue
SHAPES = [(256, 8), (384, 6), (384, 8), (896, 16), (128, 4), (128, 8), (512, 10)]
domains = st.sampled_from(SHAPES)
ranks = st.integers(1, 128)


@given(shape=domains, ep=ranks, m=st.integers(1, 10**6), nu=st.floats(1e-6, 5), r=st.floats(0, 200))
def test_touched_experts_have_bounds(
    shape: tuple[int, int], ep: int, m: int, nu: float, r: float
) -> None:
    """Mean <= busiest <= held; no more than there are pairs; more popular ones, fewer touched."""
    keys: dict[str, float] = dict(E=shape[0], k=shape[1], M=m, ep=ep, r=r)
    busy, mean = (experts(**keys, nu=nu, xi=xi) for xi in (1, 0))
    near = 1 + 1e-9
    assert busy["held"] == math.ceil(shape[0] / ep)
    assert 0 < mean["touched"] == mean["mean_touched"] <= busy["touched"] * near
    assert busy["touched"] <= busy["held"] * near
    assert busy["touched"] <= m * shape[1] * near
    even = experts(**keys, nu=1e-6)["mean_touched"]
    assert mean["touched"] <= even * (1 + 1e-4)
    assert even <= m * shape[1] * busy["held"] / shape[0] * (1 + 1e-4)  # its share of the pairs
    if ep == 1:  # one rank has nobody to wait for
        assert busy["touched"] == mean["touched"]
    assert busy["flops"] >= mean["flops"] and busy["weight_bytes"] >= mean["weight_bytes"]


@given(shape=domains, ep=ranks, m=st.integers(1, 10**5), more=st.integers(0, 10**5),
       nu=st.floats(1e-3, 5))  # fmt: skip
def test_more_tokens_touch_no_fewer_experts(
    shape: tuple[int, int], ep: int, m: int, more: int, nu: float
) -> None:
    a, b = (
        experts(E=shape[0], k=shape[1], M=x, ep=ep, nu=nu, xi=1)["touched"] for x in (m, m + more)
    )
    assert b >= a * (1 - 1e-9)


@given(shape=domains, m=st.integers(1, 10**6), half=st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_more_ranks_share_the_mean(shape: tuple[int, int], m: int, half: int) -> None:
    """The mean rank's experts fall as the ranks rise. The busiest rank's need not: with one rank
    there is none busier than the mean, with two there is, so a step can get longer from ep = 1 to
    ep = 2. It stays below sqrt(2 ln ep) deviations of what the mean rank has.
    """
    one, two = (
        experts(E=shape[0], k=shape[1], M=m, ep=ep, nu=2.66, xi=1) for ep in (half, 2 * half)
    )
    assert two["mean_touched"] == pytest.approx(one["mean_touched"] / 2)
    assert two["pairs"] == pytest.approx(one["pairs"] / 2)
    mean = two["mean_touched"]
    assert two["touched"] <= mean + math.sqrt(2 * math.log(2 * half) * mean) + 1e-9
    assert two["touched"] <= one["held"] / 2 + 1e-9


def test_a_second_rank_can_touch_more_than_half() -> None:
    """One token of 8 experts: 8 on one rank; of two ranks the busier is put at 4 + 2.3 x 2.0."""
    assert experts(k=8, ep=1, xi=1)["touched"] == pytest.approx(8, rel=1e-6)
    two = 4 + math.sqrt(2 * math.log(2) * 4 * (1 - 4 / 128))
    assert experts(k=8, ep=2, xi=1)["touched"] == pytest.approx(two, rel=1e-6) and 6 < two < 8


def all_reduce(x: float, g: int, **kw: float) -> dict[str, float]:
    keys: dict[str, float] = dict(D=8, W_one=200e9, W_two=300e9, W_out=40e9, l_one=3e-6,
                                  l_two=6e-6, l_rank=0.1e-6, l_out=30e-6)  # fmt: skip
    values = {k: float(v) for k, v in (keys | kw | dict(x=x, g=g)).items()}
    out = fam.ALL_REDUCE.compile()(**values)
    return {k: float(v) for k, v in out.items()}


@given(
    x=st.floats(1, 1e9), g=st.integers(1, 8), w1=st.floats(1e9, 1e12), w2=st.floats(1e9, 1e12),
    l1=st.floats(0, 1e-4), l2=st.floats(0, 1e-4),
)  # fmt: skip
def test_all_reduce_takes_the_faster_way(
    x: float, g: int, w1: float, w2: float, l1: float, l2: float
) -> None:
    """One-shot: each rank reads all others; two-shot: twice (g-1)/g, at a higher latency."""
    got = all_reduce(x, g, W_one=w1, W_two=w2, l_one=l1, l_two=l2)
    total = got["link_s"] + got["latency_s"]
    if g == 1:
        assert total == got["message_bytes"] == 0
        return
    one, two = x * (g - 1), 2 * x * (g - 1) / g
    t_one, t_two = one / w1 + l1, two / w2 + l2
    assert total == pytest.approx(min(t_one, t_two) + 0.1e-6 * (g - 2), rel=1e-9)
    if not math.isclose(t_one, t_two, rel_tol=1e-9):
        assert got["message_bytes"] == pytest.approx(one if t_one < t_two else two, rel=1e-9)


def test_all_reduce_at_both_ends() -> None:
    small, large = all_reduce(1, 8), all_reduce(1e9, 8)
    assert small["message_bytes"] == 7 and small["latency_s"] == pytest.approx(3.6e-6)
    assert small["link_s"] == pytest.approx(7 / 200e9)
    assert large["message_bytes"] == 1.75e9 and large["latency_s"] == pytest.approx(6.6e-6)
    assert large["link_s"] == pytest.approx(1.75e9 / 300e9)
    # 7 x / 200e9 + 3 us = 1.75 x / 300e9 + 6 us: at 102,857 bytes both take as long
    x = 3e-6 / (7 / 200e9 - 1.75 / 300e9)
    assert x == pytest.approx(102_857.14)
    below, above = all_reduce(x * 0.999, 8), all_reduce(x * 1.001, 8)
    assert below["message_bytes"] > 6 * x and above["message_bytes"] < 2 * x
    assert below["link_s"] + below["latency_s"] == pytest.approx(
        above["link_s"] + above["latency_s"], rel=2e-3
    )


def test_all_reduce_across_domains_is_two_shot() -> None:
    """16 ranks in domains of 8: half of what is sent goes over the network, however small."""
    for x in (1.0, 1e8):
        got = all_reduce(x, 16)
        assert got["message_bytes"] == pytest.approx(2 * x * 15 / 16)
        assert got["link_s"] == pytest.approx(x * 15 / 16 / 40e9)
        assert got["latency_s"] == pytest.approx(6e-6 + 14 * 0.1e-6 + 30e-6)


def exchange(x: float, g: int, **kw: float) -> dict[str, float]:
    """One exchange of `x` bytes (a copy of a GPU's tokens), 6 experts a token unless said."""
    keys: dict[str, float] = dict(k=6, once=0, tp=1, D=8, W_in=200e9, W_ag=200e9, W_out=40e9,
                                  l=12e-6, l_ag=6e-6, l_out=30e-6)  # fmt: skip
    values = {k: float(v) for k, v in (keys | kw | dict(x=x, g=g)).items()}
    out = fam.EXCHANGE.compile()(**values)
    return {k: float(v) for k, v in out.items()}


@given(
    x=st.floats(1, 1e9), k=st.integers(1, 16), g=st.integers(1, 64), dom=st.integers(1, 64),
    lat=st.floats(0, 1e-4), l_ag=st.floats(0, 1e-4), w=st.floats(1e9, 1e12),
    once=st.integers(0, 1),
)  # fmt: skip
def test_exchange_takes_the_faster_way(
    x: float, k: int, g: int, dom: int, lat: float, l_ag: float, w: float, once: int
) -> None:
    """Straight, or gathered by every rank: the latter only within one domain."""
    got = exchange(x, g, k=k, D=dom, l=lat, l_ag=l_ag, W_ag=w, once=once)
    total = got["link_s"] + got["latency_s"]
    if g == 1:
        assert total == got["message_bytes"] == 0
        return
    domains = math.ceil(g / dom)
    inside, outside = x * k * (min(g, dom) - 1) / g, x * k * max(0, g - dom) / g
    if once:  # to each of the ranks that k experts fall on, and each of their domains, once
        inside = x * (g - 1) * (1 - (1 - 1 / g) ** k)
        outside = x * (domains - 1) * (1 - (1 - 1 / domains) ** k)
    t_s = max(inside / 200e9, outside / 40e9) + lat + (30e-6 if g > dom else 0)
    t_g = x * (g - 1) / w + l_ag
    straight = pytest.approx(inside + outside, rel=1e-6)
    if g > dom:
        assert total == pytest.approx(t_s) and got["message_bytes"] == straight
    else:
        assert total == pytest.approx(min(t_s, t_g))
        if not math.isclose(t_s, t_g, rel_tol=1e-9):
            gathered = pytest.approx(x * (g - 1))
            assert got["message_bytes"] == (straight if t_s < t_g else gathered)


@given(k=st.integers(1, 16), g=st.integers(2, 512), dom=st.integers(1, 512))
def test_a_token_sent_once_is_never_more_bytes(k: int, g: int, dom: int) -> None:
    """Over NVLink once for each rank at most, over the network once for each domain at most."""
    each, once = (exchange(1.0, g, k=k, D=dom, once=x) for x in (0, 1))
    if g % dom == 0:  # of k copies to any of g GPUs, so many leave the domain
        assert once["outside_bytes"] <= k * (g - dom) / g * (1 + 1e-9)
    assert once["inside_bytes"] <= min(k, g - 1) * (1 + 1e-9)
    assert once["outside_bytes"] <= min(k, math.ceil(g / dom) - 1) * (1 + 1e-9)
    assert each["inside_bytes"] + each["outside_bytes"] == pytest.approx(k * (g - 1) / g)
    if k == 1:
        assert once["inside_bytes"] == pytest.approx((g - 1) / g)


def test_exchange_at_both_ends() -> None:
    """8 ranks, 6 experts a token: few tokens are gathered, many go straight; none across."""
    few, many = (exchange(x, 8) for x in (7e3, 7e7))
    assert few["message_bytes"] == pytest.approx(7 * 7e3) and few["latency_s"] == 6e-6
    assert few["link_s"] == pytest.approx(7 * 7e3 / 200e9)
    assert many["message_bytes"] == pytest.approx(6 * 7e7 * 7 / 8) and many["latency_s"] == 12e-6
    assert many["link_s"] == pytest.approx(6 * 7e7 * 7 / 8 / 200e9)
    across = exchange(7e3, 16)
    assert across["message_bytes"] == pytest.approx(6 * 7e3 * 15 / 16)
    assert across["link_s"] == pytest.approx(6 * 7e3 * 8 / 16 / 40e9)  # 8 of 16 are beyond: slower
    assert across["latency_s"] == pytest.approx(42e-6)
    shared = exchange(7e7, 8, tp=2)  # two ranks have the same tokens: each sends half of them
    assert shared["message_bytes"] == pytest.approx(many["message_bytes"] / 2)


def test_small_dispatches_are_gathered_within_a_domain_only() -> None:
    """V4 Pro, 2 tokens a rank: 7168 FP8 values of all 8 ranks; on 16 H200 straight, 6 copies."""
    inside = op(point(V4, H200, Plan(dp=8), batch=16), "moe", "dispatch")
    assert inside.message_bytes == pytest.approx(61 * 2 * 7168 * 7)
    assert inside.floor_s == pytest.approx(61 * load_system(H200).floors.all_reduce_two.value)
    across = op(point(V4, H200, Plan(dp=16), batch=32), "moe", "dispatch")
    assert across.message_bytes == pytest.approx(61 * 2 * 6 * 7168 * 15 / 16)


def test_kda_state_is_read_once_and_written_for_each_token() -> None:
    """868 MB of fp32 state a sequence and step over 69 layers, and the conv state (15.26 MB).

    A verify step keeps the state after every token, so that it can go back to the last accepted.
    """
    e = point(K3, "vr-nvl72", Plan(tp=32, ep=32), batch=2)
    state = 434_110_464 + 15_261_696
    assert op(e, "kda", "core").kv_bytes * 32 == pytest.approx(2 * 2 * state)
    four = point(K3, "vr-nvl72", Plan(tp=32, ep=32), batch=2, draft_tokens=3)
    assert op(four, "kda", "core").kv_bytes * 32 == pytest.approx(2 * (1 + 4) * state)
    # a prefill of any length reads it and writes it, and scans the longest sequence in order
    fill = point(K3, "vr-nvl72", Plan(tp=32, ep=32), batch=2, phase="prefill", new_tokens=500)
    assert op(fill, "kda", "core").kv_bytes * 32 == pytest.approx(2 * 2 * state)
    card, engine = load_system("vr-nvl72"), load_engine("typical").values
    launches = 5 * card.floors.kernel.value * engine.kernel_scale.value
    turns = 500 * card.floors.scan_token.value
    assert op(fill, "kda", "core").floor_s == pytest.approx(69 * (launches + turns))


def test_verified_tokens_gather_each_and_scan_once() -> None:
    """V4 CSA: gathers are per query; index keys and the window are read once a sequence."""
    e = point(V4, GB300, Plan(tp=8), context_tokens=100_000)
    v = point(V4, GB300, Plan(tp=8), context_tokens=100_000, draft_tokens=3)
    assert op(e, "csa", "core").kv_bytes == 30 * 584 * (128 + 1024)
    assert op(v, "csa", "core").kv_bytes == 30 * 584 * (128 + 4 * 1024)
    assert op(v, "csa", "index_scan").kv_bytes == op(e, "csa", "index_scan").kv_bytes
    assert op(e, "csa", "index_scan").kv_bytes == 30 * 68 * 25_000
    assert op(v, "hca", "core").kv_bytes == op(e, "hca", "core").kv_bytes
    assert op(e, "hca", "core").kv_bytes == 31 * 584 * (128 + 100_000 // 128)
    assert op(v, "csa", "core").flops == 4 * op(e, "csa", "core").flops


@pytest.mark.parametrize("light", [False, True])
def test_dense_prefill_attention(light: bool) -> None:
    """K3 gated MLA: full heads, the causal mean of the context, cached latents unfolded again.

    A kernel works in tiles: each query computes so many more entries as the card says.
    """
    t, n = 4000, 1000
    kw = LIGHT if light else {}
    e = point(K3, GB300, Plan(tp=8), phase="prefill", context_tokens=t, new_tokens=n, **kw)
    heads, layers = 96 / 8, 24
    core = op(e, "mla", "core")
    pairs = sum(t + i for i in range(1, n + 1))  # query i attends all before it and itself
    pairs += 0 if light else n * load_system(GB300).floors.context_prefill.value
    assert core.flops == pytest.approx(layers * 2 * heads * pairs * (192 + 128))
    assert core.kv_bytes == pytest.approx(layers * (t + n) * 1152)
    unfold = op(e, "mla", "kv_up")
    assert unfold.flops == pytest.approx(layers * 2 * (t + n) * 512 * heads * 256)


@pytest.mark.parametrize("light", [False, True])
@pytest.mark.parametrize(("t", "n"), [(0, 700), (3000, 3000), (0, 20_000), (90_000, 500)])
def test_sparse_prefill_attention_counts_every_query(t: int, n: int, light: bool) -> None:
    """V4 CSA: the sum over queries of min(1024, context/4) + min(128, context), as an integral.

    The kernel computes more heads (128 on GB300) than the 16 of a rank of eight.
    """
    kw = LIGHT if light else {}
    e = point(V4, GB300, Plan(tp=8), phase="prefill", context_tokens=t, new_tokens=n, **kw)
    seen = sum(min(1024, x / 4) + min(128, x) for x in (t + i + 0.5 for i in range(n)))
    heads = 128 / 8 if light else max(128 / 8, load_system(GB300).floors.sparse_heads.value)
    assert light or heads > 16
    flops = 30 * 2 * heads * seen * 1024
    assert op(e, "csa", "core").flops == pytest.approx(flops, rel=2e-3)
    scored = sum((t + i) / 4 for i in range(1, n + 1))
    assert op(e, "csa", "index_scan").flops == pytest.approx(30 * 2 * 64 * 128 * scored, rel=2e-3)


def test_a_full_pipeline_waits_for_its_slowest_stage() -> None:
    """31 of 61 layers and the ends, twice, where two microbatches are in flight."""
    plan = Plan(tp=8, ep=8, pp=2)
    e = point(V4, GB300, plan, batch=512, context_tokens=8000)
    ends = sum(
        o.time_s for o in e.operators if o.layer_kind == "ends" and o.name != "pipeline_send"
    )
    sends = op(e, "ends", "pipeline_send").time_s
    layers = sum(o.time_s for o in e.operators) - ends - sends
    slowest = layers * 31 / 61 + ends
    assert 2 * slowest > layers + ends + sends
    # the host: once a step and for each of the rank's sequences
    host = load_system(GB300).floors.step.value
    each = load_engine("typical").values.sequence.value
    assert e.step_time_s == pytest.approx(2 * slowest + host + 512 * each)
    alone = point(V4, GB300, plan, batch=1, context_tokens=8000)
    assert alone.step_time_s == pytest.approx(sum(o.time_s for o in alone.operators) + host + each)


def test_a_split_context_reads_less_and_gathers_queries() -> None:
    kw: dict[str, Any] = dict(batch=4, context_tokens=400_000)
    whole, split = (point(K3, GB300, Plan(tp=8, dcp=d), **kw) for d in (1, 8))
    a, b = op(whole, "mla", "core"), op(split, "mla", "core")
    assert b.kv_bytes == pytest.approx(a.kv_bytes / 8) and b.flops == a.flops
    gather = op(split, "mla", "context_gather")
    assert gather.message_bytes == pytest.approx(24 * 2 * 4 * 96 * (576 + 512) * 7 / 8)


@pytest.mark.parametrize("batch", [1, 2048])
def test_tensor_parallel_sums_cross_once_or_twice(batch: int) -> None:
    """Two all-reduces a layer of 7168 BF16 values a token: n-1 whole ones, or 2 (n-1)/n parts."""
    e = point(V4, GB300, Plan(tp=8, ep=8), batch=batch)
    card = load_system(GB300)
    payload = batch * 7168 * 2
    one = payload * 7 / (900e9 * card.efficiency.link_all_reduce_one.value)
    one += card.floors.all_reduce.value
    two = 2 * payload * 7 / 8 / (900e9 * card.efficiency.link_all_reduce.value)
    two += card.floors.all_reduce_two.value
    assert (one < two) == (batch == 1)
    found = [o for o in e.operators if o.name == "all_reduce"]
    assert sum(o.count for o in found) == 2 * 61 and op(e, "moe", "all_reduce").count == 61
    total = sum(o.message_bytes for o in found)
    assert total == pytest.approx(2 * 61 * payload * (7 if batch == 1 else 2 * 7 / 8))
    rest = 6 * card.floors.all_reduce_rank.value
    assert sum(o.time_s for o in found) == pytest.approx(2 * 61 * (min(one, two) + rest))


def test_a_split_context_scores_less() -> None:
    """Index keys, scores and their FLOPs are split over the ranks that hold the context."""
    whole, split = (
        op(point(V4, GB300, Plan(tp=8, dcp=d), batch=2, context_tokens=80_000), "csa", "index_scan")
        for d in (1, 8)
    )
    assert whole.activation_bytes == 30 * 2 * 20_000 * 2 * 2  # two BF16 passes over the scores
    for key in ("activation_bytes", "kv_bytes", "flops"):
        assert getattr(split, key) == pytest.approx(getattr(whole, key) / 8)


def test_dispatch_carries_scales() -> None:
    """K3 sends 16 experts' worth of 3584 MXFP8 values (33 bytes for 32) and gets BF16 back."""
    e = point(K3, GB300, Plan(dp=16), batch=16 * 8)
    # once each to all ranks is as many bytes as 16 copies, and has the lower latency
    values = 92 * 8 * 16 * 3584 * 15 / 16
    assert op(e, "moe", "dispatch").message_bytes == pytest.approx(values * 33 / 32)
    assert op(e, "moe", "combine").message_bytes == pytest.approx(values * 2)
    far = point(K3, "b300-nvl8", Plan(dp=32), batch=32 * 8)  # four domains: always straight
    values = 92 * 8 * 16 * 3584 * 31 / 32
    assert op(far, "moe", "dispatch").message_bytes == pytest.approx(values * 33 / 32)
    assert op(far, "moe", "combine").message_bytes == pytest.approx(values * 2)


def test_work_is_split_over_tensor_parallel_ranks() -> None:
    """K3 at tp 2 on 700 sequences a rank: KDA, shared experts and what dispatch sends."""
    n = 700
    e = point(K3, "vr-nvl72", Plan(tp=2, dp=36, ep=72), batch=36 * n)
    assert op(e, "kda", "core").flops == 69 * n * (96 / 2) * 7 * 128**2
    for name, width in (("shared_gate_up", 2 * 6144), ("shared_down", 6144)):
        assert op(e, "moe", name).weight_bytes == pytest.approx(92 * 7168 * width * 2 / 2)
    assert op(e, "moe", "dispatch").message_bytes == pytest.approx(
        92 * (n / 2) * 16 * 3584 * 33 / 32 * 71 / 72
    )


@pytest.mark.parametrize("light", [False, True])
@pytest.mark.parametrize("batch", [1, 36, 72, 73])
def test_only_tokens_that_exist_are_routed(batch: int, light: bool) -> None:
    """Not those of the fullest rank on all ranks. At the speed of light no rank is busier."""
    e = point(V4, GB300, Plan(dp=72), batch=batch, **(LIGHT if light else {}))
    want = touched(384, 6, 72, batch)
    if light:
        nu, one = assumptions()["routing_variance"].value, 1 - 6 / 384
        want = 6 * (1 - one * (1 - nu * math.log(one) * (batch - 1)) ** (-1 / nu))
    assert op(e, "moe", "experts").weight_bytes == pytest.approx(
        61 * want * 3 * 7168 * 3072 * 17 / 32, rel=1e-5
    )


def test_a_draft_routes_all_ranks_tokens() -> None:
    e = point(V4, GB300, Plan(dp=8), batch=64, draft_tokens=3)
    want = touched(384, 6, 8, 64)  # one token a sequence and pass, three passes
    assert op(e, "draft mtp", "experts").weight_bytes == pytest.approx(
        3 * want * 3 * 7168 * 3072 * 17 / 32
    )
    block = point(V4, GB300, Plan(dp=8), batch=64, draft_tokens=3, draft="dspark")
    want = touched(384, 6, 8, 64 * 3)  # three stages over a block of three
    assert op(block, "draft dspark", "experts").weight_bytes == pytest.approx(
        3 * want * 3 * 7168 * 3072 * 17 / 32
    )


def test_a_tile_is_padded_for_each_touched_expert() -> None:
    """V4 Pro: so many rows as the card says for each touched expert, beside the pairs."""
    e = point(V4, GB300, Plan(dp=8), batch=64)
    rows = 64 * 6 / 8 + load_system(GB300).floors.tile_rows.value * touched(384, 6, 8, 64)
    assert op(e, "moe", "experts").flops == pytest.approx(61 * 2 * rows * 3 * 7168 * 3072)


def test_sends_cross_a_border_or_not() -> None:
    """Each of pp - 1 sends moves its whole payload; those between domains go over the network."""
    card = load_system(H200)
    nic = card.scale_out.bandwidth.value * card.efficiency.link_scale_out.value
    nvl = card.scale_up.bandwidth.value * card.efficiency.link_all_reduce.value
    payload = 2 * 5 * 7168 * 4  # five tokens, four streams, BF16
    for plan, far, near in (
        (Plan(tp=8, pp=2), 1, 0),
        (Plan(tp=4, pp=4), 1, 2),
        (Plan(tp=4, pp=6), 2, 3),
        (Plan(dp=16, pp=2), 1, 0),
    ):
        send = op(point(V4, H200, plan, batch=5 * plan.pp * plan.dp), "ends", "pipeline_send")
        size = payload / plan.tp
        assert send.message_bytes == pytest.approx((far + near) * size)
        assert send.link_s == pytest.approx(far * size / nic + near * size / nvl)
        hop, out = card.floors.send.value, card.floors.scale_out.value
        assert send.floor_s == pytest.approx((far + near) * hop + far * out)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_one_more_sequence_never_costs_a_round(phase: str) -> None:
    """A pipeline with uneven microbatches keeps its throughput (it lost up to 31 % once)."""
    kw: dict[str, Any] = dict(phase=phase, context_tokens=0 if phase == "prefill" else 20_000)
    if phase == "prefill":
        kw["new_tokens"] = 4096
    rate = [
        point(K3, GB300, Plan(tp=8, pp=4), batch=b, **kw).throughput_tok_s for b in range(4, 14)
    ]
    assert all(b > 0.98 * a for a, b in zip(rate, rate[1:], strict=False))


# ---- grouped-query attention and the gated delta rule


@pytest.mark.parametrize("tp", [1, 2, 8, 16, 64])
def test_gqa_ranks_hold_at_least_one_kv_head(tp: int) -> None:
    """Llama 70B: 64 query and 8 KV heads of 128, BF16. Beyond 8 ranks KV heads are copies."""
    e = point("llama-3.1-70b", "rubin-ultra", Plan(tp=tp), batch=3, context_tokens=5000)
    held = 8 / min(tp, 8)
    core, qkv = op(e, "gqa", "core"), op(e, "gqa", "qkv")
    assert core.kv_bytes == pytest.approx(80 * 3 * 5000 * 2 * held * 128 * 2)
    pad = load_system("rubin-ultra").floors.context_decode.value
    assert core.flops == pytest.approx(80 * 2 * 3 * 64 / tp * (5000 + pad) * 256)
    assert qkv.weight_bytes == pytest.approx(80 * 8192 * (64 / tp + 2 * held) * 128 * 2)
    assert op(e, "gqa", "o").weight_bytes == pytest.approx(80 * 8192 * 64 * 128 / tp * 2)
    memory = {x.name: x.bytes for x in e.memory}
    assert memory["KV cache and state"] == pytest.approx(core.kv_bytes)
    assert memory["weights: attention"] == pytest.approx(
        80 * 8192 * 128 * 2 * (64 / tp + 2 * held + 64 / tp)
    )


@pytest.mark.parametrize("t", [1, 127, 128, 129, 100_000])
def test_a_sliding_window_is_attended_read_and_kept(t: int) -> None:
    """gpt-oss: 18 of 36 layers see 128 tokens. An entry: 8 KV heads x 64, keys and values, FP8."""
    e = point("gpt-oss-120b", GB300, Plan(tp=2), batch=5, context_tokens=t, **LIGHT)
    entry, heads = 2 * 8 * 64 / 2, 64 / 2
    for kind, seen in (("window", min(t, 128)), ("full", t)):
        core = op(e, kind, "core")
        assert core.count == 18
        assert core.kv_bytes == pytest.approx(18 * 5 * seen * entry)
        assert core.flops == pytest.approx(18 * 2 * 5 * heads * seen * 128)
    memory = {x.name: x.bytes for x in e.memory}
    assert memory["KV cache and state"] == pytest.approx(18 * 5 * (t + min(t, 128)) * entry)


@pytest.mark.parametrize(("t", "n"), [(0, 50), (0, 1000), (100, 100), (5000, 700)])
def test_a_window_in_prefill_counts_every_query(t: int, n: int) -> None:
    """Query i sees the last 128 tokens at most, as an integral over the ramp."""
    e = point("gpt-oss-120b", GB300, Plan(), phase="prefill", context_tokens=t, new_tokens=n,
              **LIGHT)  # fmt: skip
    seen = sum(min(128, t + i + 0.5) for i in range(n))
    assert op(e, "window", "core").flops == pytest.approx(18 * 2 * 64 * seen * 128, rel=2e-3)
    every = sum(t + i for i in range(1, n + 1))
    assert op(e, "full", "core").flops == pytest.approx(18 * 2 * 64 * every * 128)


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_gated_delta_keeps_a_state(tp: int) -> None:
    """Qwen3.5: 45 layers x 64 heads x 128 x 128 fp32 = 188,743,680 B, and a short convolution."""
    state = 45 * 64 * 128 * 128 * 4
    assert state == 188_743_680
    conv = 45 * 3 * (2 * 16 * 128 + 64 * 128) * 2  # three tokens of queries, keys, values; BF16
    kw: dict[str, Any] = dict(batch=3, precision="fp8")
    e = point("qwen3.5-397b-a17b", "rubin-ultra", Plan(tp=tp), context_tokens=7000, **kw)
    core = op(e, "gdn", "core")
    assert core.count == 45
    assert core.kv_bytes == pytest.approx(3 * 2 * (state + conv) / tp)  # read and written
    assert core.flops == pytest.approx(45 * 3 * 64 / tp * 7 * 128 * 128)
    memory = {x.name: x.bytes for x in e.memory}
    attended = 15 * 7000 * 2 * 2 * 256 / min(tp, 2)  # 2 KV heads of 256, FP8
    assert memory["KV cache and state"] == pytest.approx(3 * ((state + conv) / tp + attended))
    longer = point("qwen3.5-397b-a17b", "rubin-ultra", Plan(tp=tp), context_tokens=70_000, **kw)
    assert op(longer, "gdn", "core").time_s == core.time_s  # whatever the context


def test_output_gates_are_projected_with_the_queries() -> None:
    """Qwen3.5's full layers: 32 query heads and as many gates, 2 + 2 KV heads, of 256; BF16."""
    e = point("qwen3.5-397b-a17b", "rubin-ultra", Plan(tp=2), batch=1, precision="native")
    width = (2 * 32 + 2 * 2) * 256
    assert op(e, "gqa", "qkv").weight_bytes == pytest.approx(15 * 4096 * width / 2 * 2)
    assert load_model("qwen3.5-397b-a17b").attention_counts() == {"gdn": 45, "gqa": 15}


def test_plain_mla_reads_its_latents() -> None:
    """DeepSeek V3 decode, absorbed: 61 layers, 576 FP8 values a token, copied on every rank."""
    e = point("deepseek-v3", GB300, Plan(tp=8), batch=2, context_tokens=9000)
    core = op(e, "mla", "core")
    assert core.kv_bytes == pytest.approx(61 * 2 * 9000 * 576)
    pad = load_system(GB300).floors.context_decode.value
    assert core.flops == pytest.approx(61 * 2 * 2 * 128 / 8 * (9000 + pad) * (576 + 512))
    memory = {x.name: x.bytes for x in e.memory}
    assert memory["KV cache and state"] == pytest.approx(core.kv_bytes)
