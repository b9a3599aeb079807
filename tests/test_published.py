"""Every published count of every model: parameters, checkpoint bytes, cache bytes.

A published figure pins what its rounding allows: "49B" is 48.5 to 49.5. A count must lie there or
within 0.5 %; what does not is an exception here, with its reason, and a note of the card.
"""

from __future__ import annotations

from decimal import Decimal
from typing import NamedTuple

import pytest

from perfmodel import counts
from perfmodel.api import list_models, load_model
from perfmodel.model import Model
from perfmodel.operators.collect import collect

M1 = 1_048_576
GIB = 2**30
MODELS = list_models()


def near(x: float, rel: float):
    return pytest.approx(x, rel=rel)


class Figures(NamedTuple):
    """Published total and active parameters as written; both as computed elsewhere, in 1e9.

    `active_counts` is what the active figure counts besides the layers: the head (the convention
    of DeepSeek V4 and Kimi K3), head and embedding ("both"), or "neither".
    """

    total: str
    active: str
    computed: float
    computed_active: float
    active_counts: str = "head"


# The project's facts on models, sections 1-6 and checks; Qwen3 32B and Llama 8B: model cards.
FIGURES = {
    "deepseek-v3": Figures("671B", "37B", 671.03, 36.6),
    "deepseek-v3.2": Figures("671B", "37B", 671.88, 37.48),
    "deepseek-v4-flash": Figures("284B", "13B", 284.332, 13.27),
    "deepseek-v4-pro": Figures("1.6T", "49B", 1573.0, 48.852),
    "deepseek-v4.1-flash": Figures("552B", "16B", 551.5, 15.7),
    "glm-5": Figures("744B", "40B", 743.91, 39.88, "neither"),
    "glm-5.2": Figures("743B", "39B", 743.38, 39.35, "neither"),
    "gpt-oss-120b": Figures("116.8B", "5.1B", 116.83, 5.13),
    "kimi-k2": Figures("1.04T", "32.6B", 1026.41, 31.69),
    "kimi-k2.5": Figures("1.04T", "32.6B", 1026.41, 31.69),
    "kimi-k3": Figures("2.78T", "104.2B", 2779.9, 104.187),
    "kimi-linear-48b-a3b": Figures("48B", "3B", 49.12, 3.11),
    "llama-3.1-405b": Figures("405.85B", "405.85B", 405.85, 405.85, "both"),
    "llama-3.1-70b": Figures("70.55B", "70.55B", 70.55, 70.55, "both"),
    "llama-3.1-8b": Figures("8.03B", "8.03B", 8.03, 8.03, "both"),
    "minimax-m2.5": Figures("230B", "10B", 228.7, 10.4),
    "minimax-m3": Figures("427B", "26B", 426.17, 25.96, "both"),
    "nemotron-3-super-120b-a12b": Figures("120B", "12B", 120.67, 12.23),
    "nemotron-3-ultra-550b-a55b": Figures("550B", "55B", 549.31, 54.99),
    "qwen3-235b-a22b": Figures("235B", "22B", 235.09, 22.19, "both"),
    "qwen3-32b": Figures("32.8B", "32.8B", 32.76, 32.76, "both"),
    "qwen3.5-397b-a17b": Figures("397B", "17B", 396.35, 17.35, "both"),
}
UNPUBLISHED = {"kimi-k3.1-pro"}  # no parameter count was seen
# What the published figure holds that a card's layers do not, and a word of the card's note on it.
BLOCK = "a training-time prediction block that the checkpoint leaves out: with one 1043.6"
BETWEEN = "between the counts with the head (31.7) and with the embedding too (32.9)"
EXCEPTIONS = {
    ("kimi-k2", "total"): (BLOCK, 1.4e-2, "leaves out"),
    ("kimi-k2.5", "total"): (BLOCK, 1.4e-2, "leaves out"),
    ("kimi-k2", "active"): (BETWEEN, 2.9e-2, "lie between"),
    ("kimi-k2.5", "active"): (BETWEEN, 2.9e-2, "lie between"),
    ("kimi-linear-48b-a3b", "total"): ("the name rounds 49.1 down", 2.4e-2, "rounded down"),
    ("minimax-m2.5", "total"): ("rounded up to tens; modules not counted", 6e-3, "not counted"),
    ("nemotron-3-super-120b-a12b", "total"): ("rounded to tens: 120.67", 6e-3, "rounded"),
}
# What the cards count and those computations do not: of V4.1 the two Engram projections and the
# windows' own entries, of which the checkpoint has one projection a layer.
ENGRAM, WINDOW = 6144 * 5 * 5120, 5120 * 512
UNCOUNTED = {"deepseek-v4.1-flash": 2 * ENGRAM + 40 * WINDOW}


def figure(text: str) -> tuple[float, float]:
    """(value, half of the last digit): "1.6T" is 1.6e12 with 0.05e12."""
    number, unit = Decimal(text[:-1]), {"B": 1e9, "T": 1e12}[text[-1]]
    last = 10.0 ** int(number.as_tuple().exponent)
    return float(number) * unit, last / 2 * unit


def agrees(count: float, text: str) -> bool:
    value, half = figure(text)
    return abs(count - value) <= max(half, 5e-3 * value)


def total(m: Model, draft: str | None = None) -> float:
    """Parameters as published figures count them: no tables of Engram."""
    parts = counts.parameters(m, draft)
    return sum(v for k, v in parts.items() if k != "engram_tables")


def active(m: Model, convention: str) -> float:
    table = m.shape.vocab_size * m.shape.hidden_size
    return counts.active_parameters(m) + {"head": 0, "both": table, "neither": -table}[convention]


def test_other_conventions_are_noted() -> None:
    for name, f in FIGURES.items():
        m = load_model(name)
        if not agrees(active(m, "head"), f.active) and (name, "active") not in EXCEPTIONS:
            dense = f.total == f.active
            assert dense or any("embedding" in n for n in m.notes), name


def test_every_model_is_here() -> None:
    assert set(FIGURES) | UNPUBLISHED == set(MODELS) and not UNPUBLISHED & set(FIGURES)
    for name in UNPUBLISHED:
        p = load_model(name).published
        assert p.total_parameters is p.active_parameters is p.checkpoint is None


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("what", ["total", "active"])
def test_parameters_as_published(name: str, what: str) -> None:
    m, f = load_model(name), FIGURES[name]
    text = getattr(f, what)
    on_card = getattr(m.published, f"{what}_parameters")
    assert on_card.value == near(figure(text)[0], 1e-12)
    count = total(m) if what == "total" else active(m, f.active_counts)
    if (name, what) in EXCEPTIONS:
        _, apart, word = EXCEPTIONS[name, what]
        assert not agrees(count, text)  # else it is no exception any more
        assert count == near(figure(text)[0], apart)
        assert any(word in n for n in m.notes)
    else:
        assert agrees(count, text), f"{count / 1e9:.2f} for {text}"


@pytest.mark.parametrize("name", FIGURES)
def test_parameters_as_computed_elsewhere(name: str) -> None:
    m, f = load_model(name), FIGURES[name]
    extra = UNCOUNTED.get(name, 0)
    assert total(m) - extra == near(f.computed * 1e9, 5e-4)
    assert active(m, f.active_counts) - extra == near(f.computed_active * 1e9, 2e-3)


@pytest.mark.parametrize(
    ("name", "draft", "billions"),
    [
        ("deepseek-v4-pro", "mtp", 1598.84),
        ("deepseek-v4-flash", "mtp", 290.94),
        ("deepseek-v3", "mtp", 682.6),
        ("deepseek-v4.1-flash", "dspark", 551.5 + 14.1 + (2 * ENGRAM + 43 * WINDOW) / 1e9),
    ],
)
def test_parameters_with_a_draft(name: str, draft: str, billions: float) -> None:
    assert total(load_model(name), draft) == near(billions * 1e9, 5e-4)


def test_parts_of_deepseek_v41_flash() -> None:
    """Engram 196.6 B, DSpark 14.1 B, 762 to 763 B in all; half of the layers 7.5 B active."""
    m = load_model("deepseek-v4.1-flash")
    parts = counts.parameters(m)
    assert parts["engram_tables"] == (384_006_168 + 384_016_682) * 256 == near(196.6e9, 5e-4)
    assert total(m, "dspark") - total(m) == near(14.1e9, 5e-3)
    everything = sum(counts.parameters(m, "dspark").values())
    assert everything == near(762.2e9, 1e-3) and everything == near(763e9, 1e-3)
    order = m.shape.order[:20]
    per_kind: dict[str, float] = {}
    for op in collect(m, "native", "decode").ops:
        per_kind[op.layer_kind] = per_kind.get(op.layer_kind, 0.0) + op.active_params
    half = sum(per_kind[kind] for layer in order for kind in layer.split("/"))
    assert half - 20 * WINDOW == near(7.5e9, 5e-3)
    # what a prefill runs for every token, published as 8B: layer 20 and the Engram projections too
    whole = half + sum(per_kind[k] for k in m.shape.order[20].split("/"))
    assert agrees(whole + 2 * ENGRAM, "8B")


def test_biases_and_sinks_of_gpt_oss() -> None:
    """36 layers: biases of experts, router, queries, keys, values and outputs; a sink a head."""
    m = load_model("gpt-oss-120b")
    biases = 128 * (2 * 2880 + 2880) + 128 + (64 + 2 * 8) * 64 + 2880
    assert (total(m) + 36 * (biases + 64)) == near(116.83e9, 1e-5)
    assert 36 * (biases + 64) == near(40e6, 1e-2)


def test_an_extra_block_explains_kimi_k2() -> None:
    """One more MoE layer, two projections of the block: 1043.6 with the published 1.04 T."""
    m = load_model("kimi-k2")
    ops = collect(m, "native", "decode").ops
    layer = sum(o.params for o in ops if o.layer_kind in ("mla", "moe"))
    with_block = total(m) + layer + 2 * 7168**2
    assert with_block == near(1043.6e9, 5e-4) and agrees(with_block, "1.04T")
    low, high = active(m, "head"), active(m, "both")
    assert low < 32.6e9 < high


# ---- checkpoints

CHECKPOINTS = [
    ("deepseek-v4-pro", "native", "mtp", 865e9),
    ("deepseek-v4-pro", "native", "mtp", 864.7e9),
    ("deepseek-v4-pro", "native", "dspark", 893e9),
    ("deepseek-v4-flash", "native", "mtp", 148.66 * GIB),
    ("deepseek-v4.1-flash", "native", "dspark", 475.3 * GIB),
    ("kimi-k3", "native", None, 1.56e12),
    ("kimi-k3", "native", None, 1560.7e9),
    ("kimi-k2.5", "native", None, 595e9),
    ("nemotron-3-ultra-550b-a55b", "nvfp4", None, 331e9),
]


@pytest.mark.parametrize(("name", "precision", "draft", "want"), CHECKPOINTS)
def test_checkpoint_bytes(name: str, precision: str, draft: str | None, want: float) -> None:
    assert counts.checkpoint_bytes(load_model(name), precision, draft) == near(want, 5e-3)


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_on_cards_are_checked(name: str) -> None:
    checkpoint = load_model(name).published.checkpoint
    known = [w for n, p, _, w in CHECKPOINTS if n == name and p == "native"]
    known += [1121e9] if name == "nemotron-3-ultra-550b-a55b" else []  # below
    assert checkpoint is None or any(checkpoint.value == near(w, 1e-4) for w in known)


def test_checkpoints_of_nemotron_ultra() -> None:
    """Published: 1,121 GB in BF16, 352.3 GB in NVFP4, both with the prediction block in BF16.

    It is one attention and one expert layer and joins two vectors to one.
    """
    m = load_model("nemotron-3-ultra-550b-a55b")
    ops = collect(m, "native", "decode").ops
    block = sum(o.params for o in ops if o.layer_kind in ("gqa", "moe")) + 2 * 8192**2
    native, four = (counts.checkpoint_bytes(m, p) for p in ("native", "nvfp4"))
    assert native + 2 * block == near(1121e9, 1e-3)
    assert four + 2 * block == near(352.3e9, 2e-3)


# ---- caches

# bytes a sequence keeps at so many tokens, exactly: (card, precision, tokens, line, bytes)
CACHES = [
    ("deepseek-v4-pro", "native", M1, "kv", 5_280_404_480),
    ("deepseek-v4-flash", "native", M1, "kv", 3_688_172_544),
    # 890 B of four shared caches a token; 40 windows of 128 entries
    ("deepseek-v4.1-flash", "native", M1, "kv", 890 * M1 + 40 * 128 * 584),
    ("deepseek-v3", "bf16-cache", 10, "kv", 10 * 70_272),
    ("deepseek-v3.2", "native", 10, "kv", 10 * 48_068),
    ("kimi-k2.5", "bf16-cache", 10, "kv", 10 * 70_272),
    ("kimi-k2.5", "native", 10, "kv", 10 * 70_272 / 2),
    ("kimi-k2", "native", 10, "kv", 10 * 70_272 / 2),
    ("kimi-k3", "native", 10**6, "kv", 27.648e9),
    ("kimi-k3", "kv8", 10**6, "kv", 13.824e9),
    # BF16 latents and FP8 index keys of 3,168 B a token on 24 layers
    ("kimi-k3.1-pro", "native", 10**6, "kv", 27.648e9 + 3168e6),
    ("kimi-linear-48b-a3b", "native", 1000, "kv", 8_064_000),
    ("glm-5", "native", 10, "kv", 10 * 78 * (656 + 132)),
    ("glm-5.2", "native", 10, "kv", 10 * (78 * 656 + 21 * 132)),  # keys on 21 layers only
    ("qwen3-235b-a22b", "native", 1000, "kv", 192_512_000),
    ("qwen3-235b-a22b", "fp8", 1000, "kv", 192_512_000 / 2),
    ("qwen3-32b", "native", 1000, "kv", 2 * 2 * 8 * 128 * 64 * 1000),
    ("qwen3-32b", "fp8", 1000, "kv", 2 * 8 * 128 * 64 * 1000),
    ("qwen3.5-397b-a17b", "native", 1000, "kv", 30_720_000),
    ("qwen3.5-397b-a17b", "fp8", 1000, "kv", 30_720_000 / 2),
    ("llama-3.1-8b", "native", 1000, "kv", 2 * 2 * 8 * 128 * 32 * 1000),
    ("llama-3.1-70b", "native", 1000, "kv", 327_680_000),
    ("llama-3.1-70b", "fp8", 1000, "kv", 327_680_000 / 2),
    ("llama-3.1-405b", "native", 1000, "kv", 516_096_000),
    ("llama-3.1-405b", "fp8", 1000, "kv", 516_096_000 / 2),
    ("minimax-m2.5", "native", 10, "kv", 10 * 253_952 / 2),
    ("minimax-m3", "native", 1000, "kv", 122_880_000),
    ("minimax-m3", "native", 1000, "index_keys", 57 * 128 * 2 * 1000),
    # BF16 36,864 B on 18 full layers, as many windows of 128
    ("gpt-oss-120b", "native", 4000, "kv", (4000 + 128) * 36_864 / 2),
    ("gpt-oss-120b", "native", 100, "kv", 2 * 100 * 36_864 / 2),
    ("nemotron-3-super-120b-a12b", "native", 5000, "kv", 5000 * 8192),
    ("nemotron-3-super-120b-a12b", "nvfp4", 1000, "kv", 1000 * 8192 / 2),
    ("nemotron-3-ultra-550b-a55b", "native", 5000, "kv", 5000 * 12_288),
    ("nemotron-3-ultra-550b-a55b", "nvfp4", 1000, "kv", 1000 * 12_288 / 2),
]


@pytest.mark.parametrize(("name", "precision", "tokens", "line", "want"), CACHES)
def test_cache_bytes(name: str, precision: str, tokens: int, line: str, want: float) -> None:
    assert counts.cache_bytes(load_model(name), tokens, precision)[line] == want


def test_every_cache_is_checked() -> None:
    assert {c[0] for c in CACHES} == set(MODELS)


# fp32 state and BF16 inputs of the convolution (kernel of 4), whatever the context
STATES = {
    "kimi-k3": (434_110_464, 15_261_696),
    "kimi-k3.1-pro": (434_110_464, 15_261_696),
    "kimi-linear-48b-a3b": (20 * 32 * 128 * 128 * 4, 20 * 3 * 3 * 4096 * 2),  # 43.4 MB
    "qwen3.5-397b-a17b": (188_743_680, 45 * 3 * (2 * 16 * 128 + 64 * 128) * 2),
    "nemotron-3-super-120b-a12b": (40 * 4_194_304, 40 * 3 * (128 * 64 + 2 * 8 * 128) * 2),
    "nemotron-3-ultra-550b-a55b": (48 * 8_388_608, 48 * 3 * (256 * 64 + 2 * 8 * 128) * 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_state_bytes(name: str) -> None:
    got = {counts.cache_bytes(load_model(name), t).get("state", 0) for t in (1, 1000, M1)}
    assert got == {sum(STATES.get(name, (0,)))}
    if name == "kimi-linear-48b-a3b":
        assert sum(STATES[name]) == near(43.4e6, 1e-3)


def kv(name: str, precision: str = "native", tokens: int = M1) -> float:
    return counts.cache_bytes(load_model(name), tokens, precision)["kv"]


def test_caches_at_one_million() -> None:
    """The comparisons of the V4 report and of vLLM; the V4 Pro and V3.2 shapes."""
    assert kv("deepseek-v4-pro", "bf16-cache") / GIB == near(9.62, 5e-3)
    assert kv("deepseek-v4-flash", "bf16-cache") / GIB == near(6.724, 1e-4)
    old = kv("deepseek-v3.2", "bf16-cache")
    assert old / GIB == near(83.9, 5e-3)
    assert old / kv("deepseek-v4-pro", "bf16-cache") == near(8.7, 5e-3)
    assert kv("deepseek-v3.2") == near(50.40e9, 1e-3)
    assert kv("deepseek-v3.2") / kv("deepseek-v4-pro") == near(9.5, 5e-3)
    assert kv("deepseek-v3.2") / kv("deepseek-v4-flash") == near(13.7, 5e-3)
    assert kv("deepseek-v4-pro") / (2 * 2 * 8 * 128 * 61 * M1) == near(0.0202, 1e-2)
    # FlashMLA: 8.72 GiB for 128K tokens of 62 layers
    assert kv("deepseek-v3", "bf16-cache", 131_072) * 62 / 61 / GIB == near(8.72, 1e-3)
    # a secondary source says about 4.3 GiB for V4 Pro, which its own entry sizes do not make
    assert kv("deepseek-v4-pro") / GIB == near(4.918, 1e-3)


def test_a_quarter_of_the_cache_of_v4_flash() -> None:
    """V4.1 Flash: about a quarter of V4 Flash's cache, by its announcement."""
    assert 0.2 < kv("deepseek-v4.1-flash") / kv("deepseek-v4-flash") < 0.3


@pytest.mark.parametrize(
    ("name", "core", "indexer", "fp8", "bf16", "equivalent"),
    [
        ("deepseek-v3.2", 34.8, 1048.0, 72.8, 2.1, 1195),
        ("deepseek-v4-pro", 76.7, 128.8, 93.8, 3.9, 319),
        ("deepseek-v4-flash", 23.6, 90.2, 24.7, 1.8, 121),
    ],
)
def test_decode_flops_at_one_million(
    name: str, core: float, indexer: float, fp8: float, bf16: float, equivalent: float
) -> None:
    """GFLOP of a token; FP8 equivalents as in the V4 report's Figure 1: BF16 x 2, FP4 x 0.5."""
    f = counts.decode_flops(load_model(name), M1)
    rate = "fp8" if name == "deepseek-v3.2" else "fp4"
    assert f["core", "bf16"] / 1e9 == near(core, 5e-3)
    assert f["indexer", rate] / 1e9 == near(indexer, 1e-3)
    assert f["linear", "fp8"] / 1e9 == near(fp8, 5e-3)
    assert f["linear", "bf16"] / 1e9 == near(bf16, 3e-2)  # stated to two digits
    weight = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5}
    assert sum(weight[r] * x for (_, r), x in f.items()) / 1e9 == near(equivalent, 5e-3)
