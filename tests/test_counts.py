"""Published counts that the cards must reproduce (facts: model reports and checkpoints)."""

import math

import pytest

from perfmodel import counts
from perfmodel.api import Plan, estimate, load_model
from perfmodel.operators.builder import symbol
from perfmodel.operators.collect import collect

V4, K3, V32 = (load_model(m) for m in ("deepseek-v4-pro", "kimi-k3", "deepseek-v3.2"))
M1 = 1_048_576


def near(x, rel):
    return pytest.approx(x, rel=rel)


def test_layer_kinds_add_up():
    assert V4.attention_counts() == {"csa": 30, "hca": 31} and V4.layers == 61
    assert K3.attention_counts() == {"kda": 69, "mla": 24} and K3.layers == 93
    assert [x.partition("/")[0] for x in K3.shape.order[-2:]] == ["mla", "mla"]
    assert K3.ffn_counts() == {"dense": 1, "moe": 92}
    assert V32.ffn_counts() == {"dense": 3, "moe": 58} and V32.layers == 61


def _expert(model):
    (op,) = [o for o in collect(model, "native", "decode").ops if o.name == "experts"]
    return op


def test_bytes_of_one_expert():
    op, moe = _expert(K3), K3.ffn["moe"]
    assert op.params // moe.experts * op.bytes_per_param == 17_547_264
    assert _expert(V4).params // V4.ffn["moe"].experts == 66_060_288


def test_parameters_per_layer():
    """Per-layer groups of the model report's shapes, in millions."""
    want = {
        ("csa", "attention"): 299.9, ("csa", "indexer"): 12.58, ("hca", "compressor"): 7.41,
        ("kda", "attention"): 443.74, ("mla", "attention"): 232.20, ("dsa", "indexer"): 13.5,
    }  # fmt: skip
    for (kind, cls), millions in want.items():
        model = next(m for m in (V4, K3, V32) if kind in m.attention)
        ops = collect(model, "native", "decode").ops
        got = sum(o.params for o in ops if o.layer_kind == kind and o.tensor_class == cls)
        assert got / 1e6 == near(millions, 2e-3), (kind, cls)
    shared = sum(
        o.params for o in collect(K3, "native", "decode").ops if o.tensor_class == "shared"
    )
    assert shared == 132_120_576
    latent = sum(
        o.params for o in collect(K3, "native", "decode").ops if o.tensor_class == "latent"
    )
    assert latent / 1e6 == near(51.38, 1e-3)


def test_v4_cache_is_not_linear():
    """Windows saturate and entries appear only when a stride is full."""
    at = [counts.cache_bytes(V4, t)["kv"] for t in (1, 3, 4, 127, 128, 129)]
    assert at[0] == 61 * 584 and at[1] == 3 * at[0]
    assert at[2] == 4 * at[0] + 30 * (584 + 68)
    assert at[5] == at[4]


@pytest.mark.parametrize(
    ("context", "scan", "gather", "hca"),
    [
        (8192, 4.2e6, 20.2e6, 3.5e6),
        (131_072, 66.8e6, 20.2e6, 20.9e6),
        (M1, 534.8e6, 20.2e6, 150.6e6),
    ],
)
def test_decode_reads_are_not_storage(context, scan, gather, hca):
    """Bytes a V4 Pro decode step reads per sequence (computed in the facts, all layers)."""
    got = {}
    for op in collect(V4, "native", "decode").ops:
        expr = op.cost("kv_bytes")
        if expr != 0:
            values = {symbol("T"): context, symbol("q"): 1, symbol("b"): 1, symbol("dcp"): 1}
            got[op.layer_kind, op.name] = float(op.count) * float(expr.subs(values))
    assert got["csa", "index_scan"] == near(scan, 1e-2)  # stated to two digits
    assert got["csa", "core"] == near(gather, 1e-2)
    assert got["hca", "core"] == near(hca, 1.5e-2)


def test_k3_long_context_attention():
    """24 MLA layers, absorbed: 5.01 MFLOP per context token and query (facts, section 7)."""
    f = counts.decode_flops(K3, M1)["core", "bf16"] / M1
    assert f == near(5.01e6, 2e-3)
    recurrent = counts.decode_flops(K3, 8)["linear", "bf16"]
    assert recurrent < counts.decode_flops(K3, M1)["core", "bf16"]


def test_touched_experts_at_batch_one():
    """K3 reads 25.8 GB of experts and 111.1 GB of the rest at batch 1.

    So it is where no rank is busier than the mean. The calibrated step waits for the busiest of 32:
    of its 28 experts 0.5 are touched in the mean, and it lies sqrt(2 ln 32) deviations above that.
    """
    plan, kw = Plan(tp=32, ep=32), dict(batch=1, context_tokens=1024)
    light = estimate("kimi-k3", "vr-nvl72", plan, mode="speed-of-light", **kw)
    experts = sum(o.weight_bytes for o in light.operators if o.name == "experts") * 32
    assert experts == near(25.8e9, 5e-3)
    parts = counts.parameters(K3)
    rest = sum(v for k, v in parts.items() if k not in ("experts", "embedding", "vision")) * 2
    assert rest == near(111.1e9, 5e-3)
    calibrated = estimate("kimi-k3", "vr-nvl72", plan, **kw)
    (op,) = [o for o in calibrated.operators if o.name == "experts"]
    mean = 28 * 16 / 896  # one token gets exactly 16 of 896
    busiest = mean + math.sqrt(2 * math.log(32) * mean * (1 - mean / 28))
    assert op.weight_bytes == near(92 * busiest * 17_547_264, 1e-9)


SUPER, ULTRA = "nemotron-3-super-120b-a12b", "nemotron-3-ultra-550b-a55b"


def test_layers_of_one_part():
    m = load_model(SUPER)
    assert m.attention_counts() == {"mamba": 40, "gqa": 8} and m.ffn_counts() == {"moe": 40}
    assert m.layers == 88 and m.has_partial_layers
    m = load_model(ULTRA)
    assert m.attention_counts() == {"mamba": 48, "gqa": 12} and m.ffn_counts() == {"moe": 48}
    assert m.layers == 108 and not V4.has_partial_layers


def test_parameters_of_a_mamba_layer():
    """Super: 4096 to 2 x 8192 + 2 x 8 x 128 + 128 and back, four taps on 10,240 channels."""
    ops = collect(load_model(SUPER), "native", "decode").ops
    got = sum(o.params for o in ops if o.layer_kind == "mamba")
    assert got == 4096 * (2 * 8192 + 2048 + 128) + 8192 * 4096 + 4 * 10_240
