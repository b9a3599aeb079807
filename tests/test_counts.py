"""Published counts that the cards must reproduce (facts: model reports and checkpoints)."""

import math

import pytest

from perfmodel import counts
from perfmodel.api import Plan, estimate, list_models, load_model
from perfmodel.operators.builder import symbol
from perfmodel.step import collect

V4, K3, V32 = (load_model(m) for m in ("deepseek-v4-pro", "kimi-k3", "deepseek-v3.2"))
M1 = 1_048_576
GIB = 2**30


def near(x, rel):
    return pytest.approx(x, rel=rel)


@pytest.mark.parametrize(
    ("model", "draft", "total"),
    [(V4, None, 1573.0e9), (V4, "mtp", 1598.84e9), (K3, None, 2779.9e9), (V32, None, 671.88e9)],
)
def test_total_parameters(model, draft, total):
    assert sum(counts.parameters(model, draft).values()) == near(total, 2e-4)


# From the project's facts (models.md), sections 4 to 6 and «checks»; Qwen3 32B and Llama 8B from their
# model cards (32.8 B, 8.03 B). In 1e9: published total and active; computed there from the shapes
# (total, active); what the computed active counts: the head, head and embedding, or neither.
FACTS = {
    "deepseek-v3": (671, 37, 671.03, 36.6, "head"),
    "deepseek-v3.2": (671, 37, 671.88, 37.5, "head"),
    "deepseek-v4-pro": (1600, 49, 1573.0, 48.85, "head"),
    "glm-5": (744, 40, 743.9, 39.9, "neither"),
    "gpt-oss-120b": (116.8, 5.1, 116.83, 5.13, "head"),
    "kimi-k2": (1040, 32.6, 1026.4, 31.7, "head"),
    "kimi-k2.5": (1040, 32.6, 1026.4, 31.7, "head"),
    "kimi-k3": (2780, 104.2, 2779.9, 104.19, "head"),
    "llama-3.1-405b": (405.85, 405.85, 405.85, 405.85, "both"),
    "llama-3.1-70b": (70.55, 70.55, 70.55, 70.55, "both"),
    "llama-3.1-8b": (8.03, 8.03, 8.03, 8.03, "both"),
    "minimax-m2.5": (230, 10, 228.7, 10.4, "head"),
    "minimax-m3": (427, 26, 426.17, 25.96, "both"),
    "nemotron-3-super-120b-a12b": (120, 12, 120.67, 12.23, "head"),
    "nemotron-3-ultra-550b-a55b": (550, 55, 549.31, 54.99, "head"),
    "qwen3-235b-a22b": (235, 22, 235.1, 22.2, "both"),
    "qwen3-32b": (32.8, 32.8, 32.8, 32.8, "both"),
    "qwen3.5-397b-a17b": (397, 17, 396.35, 17.35, "both"),
}
# Published totals that the layers alone do not make: V4's counts its prediction block, so does
# Kimi's, whose checkpoint lacks it (computed with one: 1043.6); MiniMax rounds up, by more.
DIFFERS = {"kimi-k2", "kimi-k2.5", "minimax-m2.5"}
ROUNDED = {"nemotron-3-super-120b-a12b"}  # 120 for 120.67, which is 0.56 % more


def test_facts_of_every_model():
    assert set(FACTS) == set(list_models())


@pytest.mark.parametrize("name", list_models())
def test_totals_as_published(name):
    m = load_model(name)
    published, active, computed, _, _ = FACTS[name]
    assert m.published.total_parameters.value == near(published * 1e9, 1e-12)
    assert m.published.active_parameters.value == near(active * 1e9, 1e-12)
    total = sum(counts.parameters(m).values())
    assert total == near(computed * 1e9, 5e-3 if name == "qwen3-32b" else 5e-4)
    if name in DIFFERS:
        assert total < published * 1e9 and total == near(published * 1e9, 1.5e-2)
        assert any("not counted" in n or "leaves out" in n for n in m.notes)
    elif name in ROUNDED:
        assert round(total / 1e10) == round(published / 10) and total > published * 1e9
        assert any("rounded" in n for n in m.notes)
    elif name == "deepseek-v4-pro":
        assert sum(counts.parameters(m, "mtp").values()) == near(published * 1e9, 5e-3)
    else:
        assert total == near(published * 1e9, 5e-3)


@pytest.mark.parametrize("name", list_models())
def test_actives_as_computed_elsewhere(name):
    """Our convention is with the head; published ones differ, so each is turned into its own."""
    m = load_model(name)
    _, published, _, computed, convention = FACTS[name]
    table = m.shape.vocab_size * m.shape.hidden_size
    got = counts.active_parameters(m) + {"head": 0, "both": table, "neither": -table}[convention]
    assert got == near(computed * 1e9, 5e-3)
    # vendors round and count by conventions of their own: one of the three is near
    tables = (-table, 0, table)
    best = min(abs(counts.active_parameters(m) + x - published * 1e9) for x in tables)
    assert best <= 0.025 * published * 1e9


def test_an_extra_block_explains_kimi_k2():
    """One more MoE layer, two projections of the block: 1043.6 with the published 1.04 T."""
    m = load_model("kimi-k2")
    ops = collect(m, "native", "decode").ops
    layer = sum(o.params for o in ops if o.layer_kind in ("mla", "moe"))
    with_block = sum(counts.parameters(m).values()) + layer + 2 * 7168**2
    assert with_block == near(1043.6e9, 5e-4) and with_block == near(1040e9, 5e-3)


@pytest.mark.parametrize(
    ("model", "active"), [(V4, 48.852e9), (K3, 104.187e9), (V32, 37.48e9)], ids=lambda x: str(x)[:8]
)
def test_active_parameters(model, active):
    assert counts.active_parameters(model) == near(active, 5e-4)


def test_layer_kinds_add_up():
    assert V4.attention_counts() == {"csa": 30, "hca": 31} and V4.layers == 61
    assert K3.attention_counts() == {"kda": 69, "mla": 24} and K3.layers == 93
    assert [x.partition("/")[0] for x in K3.shape.order[-2:]] == ["mla", "mla"]
    assert K3.ffn_counts() == {"dense": 1, "moe": 92}
    assert V32.ffn_counts() == {"dense": 3, "moe": 58} and V32.layers == 61


def test_checkpoint_bytes():
    assert counts.checkpoint_bytes(V4, draft="mtp") == near(864.7e9, 1e-3)
    assert counts.checkpoint_bytes(V4, draft="mtp") == near(V4.published.checkpoint.value, 5e-3)
    assert counts.checkpoint_bytes(V4, draft="dspark") == near(893e9, 5e-3)
    assert counts.checkpoint_bytes(K3) == near(1560.7e9, 1e-3)
    assert counts.checkpoint_bytes(K3) == near(K3.published.checkpoint.value, 5e-3)


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


def test_cache_at_one_million():
    assert counts.cache_bytes(V4, M1)["kv"] == 5_280_404_480
    assert counts.cache_bytes(V4, M1, "bf16-cache")["kv"] / GIB == near(9.6246, 1e-4)
    assert counts.cache_bytes(V32, M1, "bf16-cache")["kv"] / GIB == near(83.875, 1e-4)
    assert counts.cache_bytes(V32, M1)["kv"] == near(50.40e9, 1e-3)
    ratio = counts.cache_bytes(V32, M1)["kv"] / counts.cache_bytes(V4, M1)["kv"]
    assert ratio == near(9.545, 1e-3)  # published: «9.5x smaller»
    gqa = 2 * 2 * 8 * 128 * 61 * M1
    assert counts.cache_bytes(V4, M1)["kv"] / gqa == near(0.0202, 1e-2)


def test_cache_of_kimi_k3():
    assert counts.cache_bytes(K3, 10**6)["kv"] == 27.648e9
    assert counts.cache_bytes(K3, 10**6, "kv8")["kv"] == 13.824e9
    assert counts.cache_bytes(K3, 10**6)["state"] == 434_110_464 + 15_261_696
    assert counts.cache_bytes(K3, 1)["state"] == counts.cache_bytes(K3, M1)["state"]


def test_v4_cache_is_not_linear():
    """Windows saturate and entries appear only when a stride is full."""
    at = [counts.cache_bytes(V4, t)["kv"] for t in (1, 3, 4, 127, 128, 129)]
    assert at[0] == 61 * 584 and at[1] == 3 * at[0]
    assert at[2] == 4 * at[0] + 30 * (584 + 68)
    assert at[5] == at[4]


def equivalent(model):
    """FP8-equivalent FLOPs of the V4 report's Figure 1: BF16 x2, FP8 x1, FP4 x0.5."""
    weight = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5}
    return sum(weight[rate] * f for (_, rate), f in counts.decode_flops(model, M1).items())


def test_decode_flops_at_one_million():
    v4, v32 = counts.decode_flops(V4, M1), counts.decode_flops(V32, M1)
    assert v32["core", "bf16"] == near(34.8e9, 5e-3)
    assert v32["indexer", "fp8"] == near(1048.0e9, 1e-3)
    assert v32["linear", "fp8"] == near(72.8e9, 5e-3)
    assert v32["linear", "bf16"] == near(2.1e9, 2e-2)
    assert v4["core", "bf16"] == near(76.7e9, 5e-3)
    assert v4["indexer", "fp4"] == near(128.8e9, 1e-3)
    assert v4["linear", "fp8"] == near(93.8e9, 5e-3)
    assert v4["linear", "bf16"] == near(3.9e9, 2e-2)
    assert equivalent(V32) / 1e9 == near(1195, 5e-3)
    assert equivalent(V32) / equivalent(V4) == near(3.74, 3e-3)


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


def test_caches_of_the_other_models():
    """Bytes a token at one value a byte or two; facts, table of section 6 (BF16)."""
    want = {
        "qwen3-235b-a22b": 192_512, "qwen3.5-397b-a17b": 30_720, "llama-3.1-70b": 327_680,
        "llama-3.1-405b": 516_096, "llama-3.1-8b": 2 * 2 * 8 * 128 * 32,
        "qwen3-32b": 2 * 2 * 8 * 128 * 64,
    }  # fmt: skip
    for name, per_token in want.items():
        m = load_model(name)
        assert counts.cache_bytes(m, 1000)["kv"] == 1000 * per_token, name
        assert counts.cache_bytes(m, 1000, "fp8")["kv"] == 1000 * per_token / 2, name
    # 8-bit caches: MLA's 576 values and 253,952 B BF16 of MiniMax, halved
    assert counts.cache_bytes(load_model("deepseek-v3"), 10)["kv"] == 10 * 70_272 / 2
    assert counts.cache_bytes(load_model("deepseek-v3"), 10, "bf16-cache")["kv"] == 10 * 70_272
    for name in ("kimi-k2", "kimi-k2.5"):
        assert counts.cache_bytes(load_model(name), 10)["kv"] == 10 * 70_272 / 2
    assert counts.cache_bytes(load_model("minimax-m2.5"), 10)["kv"] == 10 * 253_952 / 2
    # gpt-oss: 36,864 B BF16 a token on 18 full layers; as many windows of 128
    m = load_model("gpt-oss-120b")
    assert counts.cache_bytes(m, 4000)["kv"] == (4000 + 128) * 36_864 / 2
    assert counts.cache_bytes(m, 100)["kv"] == 2 * 100 * 36_864 / 2
    # GLM-5: 78 sparse layers, 656 B entries and 132 B index keys
    assert counts.cache_bytes(load_model("glm-5"), 10)["kv"] == 10 * 78 * (656 + 132)


def test_state_of_gated_delta_layers():
    """Qwen3.5: 188,743,680 B of fp32 state a sequence, whatever the context; and convolutions."""
    m = load_model("qwen3.5-397b-a17b")
    state = {counts.cache_bytes(m, t)["state"] for t in (1, 1000, 262_144)}
    assert state == {188_743_680 + 45 * 3 * (2 * 16 * 128 + 64 * 128) * 2}


def test_checkpoints_of_four_bit_experts():
    """Kimi K2.5 in INT4, groups of 32: about 595 GB."""
    assert counts.checkpoint_bytes(load_model("kimi-k2.5")) == near(595e9, 5e-3)


SUPER, ULTRA = "nemotron-3-super-120b-a12b", "nemotron-3-ultra-550b-a55b"


@pytest.mark.parametrize(
    ("name", "layers", "state", "channels", "per_token"),
    [(SUPER, 40, 4_194_304, 128 * 64, 8192), (ULTRA, 48, 8_388_608, 256 * 64, 12_288)],
)
def test_state_and_cache_of_mamba_models(name, layers, state, channels, per_token):
    """fp32 state of a layer and BF16 bytes a token as in the facts; three tokens convolved."""
    m = load_model(name)
    conv = 3 * (channels + 2 * 8 * 128) * 2
    for t in (1, 5000, 262_144):
        assert counts.cache_bytes(m, t) == {
            "state": layers * (state + conv), "kv": t * per_token
        }  # fmt: skip
    assert counts.cache_bytes(m, 1000, "nvfp4")["kv"] == 1000 * per_token / 2


def test_cache_of_minimax_m3():
    """122,880 B a token, BF16, and on 57 layers an index key of 128 values."""
    got = counts.cache_bytes(load_model("minimax-m3"), 1000)
    assert got == {"kv": 1000 * 122_880, "index_keys": 1000 * 57 * 128 * 2}


def test_checkpoints_of_nemotron_ultra():
    """Published: 1,121 GB in BF16, 352.3 GB in NVFP4, both with the prediction block in BF16.

    It is one attention and one expert layer and joins two vectors to one. 331 GB are measured, too.
    """
    m = load_model(ULTRA)
    ops = collect(m, "native", "decode").ops
    block = sum(o.params for o in ops if o.layer_kind in ("gqa", "moe")) + 2 * 8192**2
    native, four = (counts.checkpoint_bytes(m, p) for p in ("native", "nvfp4"))
    assert native + 2 * block == near(m.published.checkpoint.value, 1e-3)
    assert m.published.checkpoint.value == 1121e9
    assert four + 2 * block == near(352.3e9, 2e-3)
    assert four == near(331e9, 5e-3)


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
