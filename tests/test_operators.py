"""Operators against arithmetic written out here, independent of the formulas they come from."""

import math
from typing import Any

import pytest

from perfmodel.api import Estimate, OperatorLine, Plan, estimate, load_system
from perfmodel.operators import families as fam

V4, K3, GB300, H200 = "deepseek-v4-pro", "kimi-k3", "gb300-nvl72", "h200-nvl8"
EFFICIENCY = {
    "linear": ("gemm", "gemm"), "experts": ("moe", "moe"), "indexer": ("gemm", "attention"),
    "elementwise": ("gemm", "stream"),
}  # fmt: skip


def op(e: Estimate, kind: str, name: str) -> OperatorLine:
    (line,) = [o for o in e.operators if (o.layer_kind, o.name) == (kind, name)]
    return line


def point(model: str, system: str, plan: Plan, **kw: Any) -> Estimate:
    return estimate(model, system, plan, **{"batch": 1, "context_tokens": 1000, **kw})


@pytest.mark.parametrize("system", [GB300, H200])
def test_times_are_work_over_the_cards_rates(system: str) -> None:
    """FLOPs over peak x efficiency, bytes over HBM bandwidth x efficiency, kernels x floor."""
    card = load_system(system)
    e = point(V4, system, Plan(tp=8), batch=8, context_tokens=100_000)
    checked = 0
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
        assert o.time_s == pytest.approx(max(o.compute_s, o.memory_s) + o.floor_s)
        assert (o.floor_s / o.count / 4.5e-6) == pytest.approx(round(o.floor_s / o.count / 4.5e-6))
        checked += 1
    assert checked > 20


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
    """Dispatch of V4 Pro on 16 H200: 6 experts x 7168 values x 1 byte a token, half over the NIC."""
    e = point(V4, H200, Plan(dp=16), batch=16 * 64)
    d, card = op(e, "moe", "dispatch"), load_system(H200)
    sent = 64 * 6 * 7168 * 15 / 16
    assert d.message_bytes == pytest.approx(61 * sent)
    nic = card.scale_out.bandwidth.value * card.efficiency.link_scale_out.value
    assert d.link_s == pytest.approx(61 * sent / 2 / nic)


def test_pairs_follow_the_imbalance() -> None:
    keys = dict(M=1000.0, E=384, k=6, ep=64, etp=1, h=7168, d=3072, n_mat=3, w=1, a=1, r=0)
    pairs = {phi: fam.EXPERTS.compile("pairs")(**keys, phi=phi)["pairs"] for phi in (1.0, 1.2)}
    assert pairs[1.0] == pytest.approx(1000 * 6 / 64) and pairs[1.2] == pytest.approx(112.5)


def test_uneven_ranks_take_more_of_the_load() -> None:
    f = fam.EXPERTS.compile("pairs", "touched")
    keys = dict(M=1e4, E=384, k=6, etp=1, h=1, d=1, n_mat=3, w=1, a=1, r=0, phi=1.0)
    uneven = f(**keys, ep=72)  # 384 / 72 = 5.33: the fullest rank has 6
    assert uneven["pairs"] == pytest.approx(1e4 * 6 * 6 / 384)
    assert uneven["touched"] == pytest.approx(6, rel=1e-6)
    assert f(**keys, ep=384)["pairs"] == pytest.approx(1e4 * 6 / 384)


def test_kda_state_is_read_and_written_once_a_step() -> None:
    """868 MB of fp32 state a sequence and step over 69 layers, and the conv state (15.26 MB)."""
    e = point(K3, "vr-nvl72", Plan(tp=32, ep=32), batch=2)
    assert op(e, "kda", "core").kv_bytes * 32 == pytest.approx(2 * 2 * (434_110_464 + 15_261_696))
    four = point(K3, "vr-nvl72", Plan(tp=32, ep=32), batch=2, draft_tokens=3)
    assert op(four, "kda", "core").kv_bytes == op(e, "kda", "core").kv_bytes


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


def test_dense_prefill_attention() -> None:
    """K3 gated MLA: full heads, the causal mean of the context, cached latents unfolded again."""
    t, n = 4000, 1000
    e = point(K3, GB300, Plan(tp=8), phase="prefill", context_tokens=t, new_tokens=n)
    heads, layers = 96 / 8, 24
    core = op(e, "mla", "core")
    pairs = sum(t + i for i in range(1, n + 1))  # query i attends all before it and itself
    assert core.flops == pytest.approx(layers * 2 * heads * pairs * (192 + 128))
    assert core.kv_bytes == pytest.approx(layers * (t + n) * 1152)
    unfold = op(e, "mla", "kv_up")
    assert unfold.flops == pytest.approx(layers * 2 * (t + n) * 512 * heads * 256)


@pytest.mark.parametrize(("t", "n"), [(0, 700), (3000, 3000), (0, 20_000), (90_000, 500)])
def test_sparse_prefill_attention_counts_every_query(t: int, n: int) -> None:
    """V4 CSA: the sum over queries of min(1024, context/4) + min(128, context), as an integral."""
    e = point(V4, GB300, Plan(tp=8), phase="prefill", context_tokens=t, new_tokens=n)
    seen = sum(min(1024, x / 4) + min(128, x) for x in (t + i + 0.5 for i in range(n)))
    flops = 30 * 2 * (128 / 8) * seen * 1024
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
    assert e.step_time_s == pytest.approx(2 * slowest + 0.5e-3)
    alone = point(V4, GB300, plan, batch=1, context_tokens=8000)
    assert alone.step_time_s == pytest.approx(sum(o.time_s for o in alone.operators) + 0.5e-3)


def test_a_split_context_reads_less_and_gathers_queries() -> None:
    kw: dict[str, Any] = dict(batch=4, context_tokens=400_000)
    whole, split = (point(K3, GB300, Plan(tp=8, dcp=d), **kw) for d in (1, 8))
    a, b = op(whole, "mla", "core"), op(split, "mla", "core")
    assert b.kv_bytes == pytest.approx(a.kv_bytes / 8) and b.flops == a.flops
    gather = op(split, "mla", "context_gather")
    assert gather.message_bytes == pytest.approx(24 * 2 * 4 * 96 * (576 + 512) * 7 / 8)


def test_tensor_parallel_sums_cross_twice() -> None:
    """Two all-reduces a layer of 7168 BF16 values a token, 2 (n-1)/n over the link."""
    e = point(V4, GB300, Plan(tp=8, ep=8), batch=16)
    total = sum(o.message_bytes for o in e.operators if o.name == "all_reduce")
    assert total == pytest.approx(2 * 61 * 2 * 16 * 7168 * 2 * 7 / 8)
    assert math.isclose(op(e, "moe", "all_reduce").count, 61)


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
    values = 92 * 8 * 16 * 3584 * 15 / 16
    assert op(e, "moe", "dispatch").message_bytes == pytest.approx(values * 33 / 32)
    assert op(e, "moe", "combine").message_bytes == pytest.approx(values * 2)


def test_work_is_split_over_tensor_parallel_ranks() -> None:
    """K3 at tp 2 on two sequences: KDA decode, shared experts and what dispatch sends."""
    e = point(K3, "vr-nvl72", Plan(tp=2, dp=36, ep=72), batch=72)  # two sequences a rank
    assert op(e, "kda", "core").flops == 69 * 2 * (96 / 2) * 7 * 128**2
    for name, width in (("shared_gate_up", 2 * 6144), ("shared_down", 6144)):
        assert op(e, "moe", name).weight_bytes == pytest.approx(92 * 7168 * width * 2 / 2)
    assert op(e, "moe", "dispatch").message_bytes == pytest.approx(
        92 * (2 / 2) * 16 * 3584 * 33 / 32 * 71 / 72
    )


@pytest.mark.parametrize("batch", [1, 36, 72, 73])
def test_only_tokens_that_exist_are_routed(batch: int) -> None:
    e = point(V4, GB300, Plan(dp=72), batch=batch)
    held = math.ceil(384 / 72)
    touched = held * (1 - (1 - 6 / 384) ** batch)
    assert op(e, "moe", "experts").weight_bytes == pytest.approx(
        61 * touched * 3 * 7168 * 3072 * 17 / 32
    )


def test_a_draft_routes_all_ranks_tokens() -> None:
    e = point(V4, GB300, Plan(dp=8), batch=64, draft_tokens=3)
    touched = 48 * (1 - (1 - 6 / 384) ** 64)  # one token a sequence and pass, three passes
    assert op(e, "draft mtp", "experts").weight_bytes == pytest.approx(
        3 * touched * 3 * 7168 * 3072 * 17 / 32
    )
    block = point(V4, GB300, Plan(dp=8), batch=64, draft_tokens=3, draft="dspark")
    touched = 48 * (1 - (1 - 6 / 384) ** (64 * 3))  # three stages over a block of three
    assert op(block, "draft dspark", "experts").weight_bytes == pytest.approx(
        3 * touched * 3 * 7168 * 3072 * 17 / 32
    )


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
        assert send.floor_s == pytest.approx((far + near) * 10e-6 + far * 27e-6)


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
