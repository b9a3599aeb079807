"""What a GPU holds, against sums written out here."""

import math
from typing import Any

import pytest

from perfmodel.api import Plan, estimate, load_model
from perfmodel.plan import stage_layers

V4, K3, GB300 = "deepseek-v4-pro", "kimi-k3", "gb300-nvl72"
FP8 = 1 + 4 / 128**2  # with one fp32 scale a block


def held(model: str, plan: Plan, **kw: Any) -> dict[str, float]:
    e = estimate(model, GB300, plan, **{"batch": 1, "context_tokens": 1000, **kw})
    assert sum(x.bytes for x in e.memory) == pytest.approx(e.memory_bytes, rel=1e-12)
    return {x.name.removeprefix("weights: "): x.bytes for x in e.memory}


def v4_cache(t: int, csa: int = 30, hca: int = 31) -> float:
    """Bytes of one sequence: windows, compressed entries and index keys."""
    window = min(t, 128) * 584
    return csa * (window + t // 4 * (584 + 68)) + hca * (window + t // 128 * 584)


def test_v4_on_one_stage() -> None:
    """tp 8, ep 8: by class. Shared projections are copies, heads and experts are split."""
    got = held(V4, Plan(tp=8, ep=8), batch=3, context_tokens=70_001)
    h, width = 7168, 128 * 512
    copied = h * (1536 + 512)
    split = 1536 * width + 16 * 4096 * 1024 + 16 * 1024 * h
    assert got["attention"] == pytest.approx(61 * (copied + split / 8) * FP8)
    assert got["experts"] == pytest.approx(61 * 48 * 3 * h * 3072 * 17 / 32)
    assert got["shared"] == pytest.approx(61 * 3 * h * 3072 / 8 * FP8)
    assert got["router"] == 61 * h * 384 * 2
    assert got["indexer"] == pytest.approx(30 * 1536 * 64 * 128 * FP8)
    assert got["head"] == got["embedding"] == 129280 * h * 2 / 8
    assert got["KV cache and state"] == 3 * (v4_cache(70_001) + 18.7e6)
    assert got["activations in flight"] == 3 * h * 2 * 8
    assert got["workspace"] == 3.9e9


def test_output_groups_cap_the_split() -> None:
    got = held(V4, Plan(tp=32, ep=32))
    copied, split = 7168 * 2048, 1536 * 65536 + 16384 * 7168
    assert got["attention"] == pytest.approx(61 * (copied + split / 32 + 67_108_864 / 16) * FP8)


def test_the_fullest_rank_of_an_uneven_batch() -> None:
    """20 sequences on 8 ranks: the fullest holds 3."""
    got = held(V4, Plan(dp=8, ep=8), batch=20, context_tokens=9000)
    assert got["KV cache and state"] == 3 * (v4_cache(9000) + 18.7e6)


def test_two_stages_with_a_draft() -> None:
    """31 of 61 layers; of these at most 16 HCA and 15 CSA; the draft and its cache whole."""
    got = held(V4, Plan(tp=8, ep=8, pp=2), batch=4, context_tokens=100_000, draft_tokens=1)
    h = 7168
    assert got["router"] == pytest.approx(31 * h * 384 * 2 + h * 384 * 2)
    assert got["experts"] == pytest.approx((31 + 1) * 48 * 3 * h * 3072 * 17 / 32)
    assert got["draft_projection"] == pytest.approx(2 * h * h * FP8)
    most = stage_layers(load_model(V4), 2)
    cache = v4_cache(100_000, most["csa"], most["hca"]) + 18.7e6 * 31 / 61 + 128 * 584
    assert got["KV cache and state"] == pytest.approx(4 * cache)


@pytest.mark.parametrize("pp", [1, 2])
def test_a_block_draft_keeps_its_whole_context(pp: int) -> None:
    kw: dict[str, Any] = dict(batch=2, context_tokens=300_000)
    plan = Plan(tp=8, ep=8, pp=pp)
    more = held(K3, plan, draft_tokens=3, **kw)["KV cache and state"]
    assert more - held(K3, plan, **kw)["KV cache and state"] == 2 * 5 * 300_000 * 1152


def test_k3_state_and_tower() -> None:
    """State is split over tp, the latent cache is not; the tower is BF16 on every rank."""
    got = held(K3, Plan(tp=8, ep=8), batch=5, context_tokens=20_000)
    state = 69 * (96 * 128 * 128 * 4 + 3 * 3 * 96 * 128 * 2)
    assert got["KV cache and state"] == pytest.approx(5 * (state / 8 + 24 * 20_000 * 1152))
    assert got["vision tower"] == 2 * 401e6
    split = held(K3, Plan(tp=8, ep=8, dcp=8), batch=5, context_tokens=20_000)
    assert split["KV cache and state"] == pytest.approx(5 * (state / 8 + 24 * 20_000 * 1152 / 8))


def test_which_end_a_stage_holds() -> None:
    """K3's first stage has the tower beside the embedding, so it is the heavier end."""
    k3 = held(K3, Plan(tp=8, ep=8, pp=2))
    assert "embedding" in k3 and "head" not in k3
    v4 = held(V4, Plan(tp=8, ep=8, pp=2))
    assert "head" in v4 and "embedding" not in v4


def test_prefill_ends_with_all_tokens_cached() -> None:
    got = held(V4, Plan(tp=8, ep=8), phase="prefill", batch=2, context_tokens=3000, new_tokens=5000)
    assert got["KV cache and state"] == 2 * (v4_cache(8000) + 18.7e6)
    assert got["activations in flight"] == 2 * 5000 * 7168 * 2 * 8


@pytest.mark.parametrize("model", [V4, K3, "deepseek-v3.2"])
@pytest.mark.parametrize("pp", [1, 2, 3, 8, 31, 60])
def test_layers_of_the_worst_stage(model: str, pp: int) -> None:
    m = load_model(model)
    most = stage_layers(m, pp)
    order = [x.partition("/")[0] for x in m.shape.order]
    bounds = [round_half(len(order), pp, i) for i in range(pp + 1)]
    stages = [order[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    assert sum(map(len, stages)) == len(order)
    assert max(map(len, stages)) == math.ceil(len(order) / pp)
    assert most == {k: max(s.count(k) for s in stages) for k in m.attention_counts()}


def round_half(layers: int, pp: int, i: int) -> int:
    """First layer of stage i when the first stages take the odd layers."""
    return i * (layers // pp) + min(i, layers % pp)


def test_k3_stages_are_not_all_alike() -> None:
    """The last two layers are both MLA: a thin last stage holds twice the mean cache."""
    assert stage_layers(load_model(K3), 31)["mla"] == 2
    full = held(K3, Plan(tp=8, pp=31), context_tokens=500_000)["KV cache and state"]
    assert full > 2 * 500_000 * 1152
