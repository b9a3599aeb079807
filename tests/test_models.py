"""What must hold for every model of the catalogue, and the shared parts and ranges of its cards."""

from __future__ import annotations

import copy
import json
import tomllib
from collections import Counter
from functools import cache
from typing import Any

import pytest

from perfmodel import api, catalog, counts
from perfmodel.api import Estimate, Plan
from perfmodel.cli import main
from perfmodel.errors import CardError, InputError
from perfmodel.hardware import System
from perfmodel.layers import NONE, MoE
from perfmodel.model import Model
from perfmodel.operators.builder import symbol
from perfmodel.operators.collect import collect
from perfmodel.paths import data_dir

MODELS = api.list_models()
models = pytest.mark.parametrize("name", MODELS)
phases = pytest.mark.parametrize("phase", ["decode", "prefill"])
REL = 1 + 1e-9
V41, GLM52, LINEAR = "deepseek-v4.1-flash", "glm-5.2", "kimi-linear-48b-a3b"
WIDE = "b300-nvl8"


@cache
def machine(path: str = "memory.capacity", times: float = 1.0) -> System:
    """B300 with memory that holds anything, and one number changed."""
    system = api.load_system(WIDE)
    for p, x in (("memory.capacity", 1e6), (path, times)):
        section, _, field = p.partition(".")
        part = getattr(system, section)
        q = getattr(part, field)
        q = q.model_copy(update={"value": q.value * x, "low": None, "high": None})
        system = system.model_copy(update={section: part.model_copy(update={field: q})})
    return system


def run(name: str | Model, plan: Plan, phase: str = "decode", **kw: Any) -> Estimate:
    given: dict[str, Any] = dict(batch=16, context_tokens=20_000, phase=phase)
    given |= {"new_tokens": 3000} if phase == "prefill" else {}
    return api.estimate(name, kw.pop("system", machine()), plan, **given | kw)


def lines(e: Estimate) -> dict[str, float]:
    return {x.name.removeprefix("weights: "): x.bytes for x in e.memory}


@models
def test_weights_on_one_gpu_are_the_checkpoint(name: str) -> None:
    """All but Engram tables, which are in host memory."""
    m = api.load_model(name)
    tables = 0.0
    if m.engram:
        fmt = m.precision["native"].weight("engram_tables")
        tables = m.engram.table_parameters * fmt.bytes_per_value
    e = run(name, Plan())
    other = ("KV cache and state", "activations in flight", "workspace")
    weights = sum(v for k, v in lines(e).items() if k not in other)
    assert weights + tables == pytest.approx(counts.checkpoint_bytes(m))
    assert sum(x.bytes for x in e.memory) == pytest.approx(e.memory_bytes)


@models
def test_tensor_and_expert_shards_add_up(name: str) -> None:
    """Experts by EP and what TP splits whole; what is replicated is no less than its share."""
    whole = lines(run(name, Plan()))
    for plan in (Plan(tp=8, ep=8), Plan(dp=8, ep=8), Plan(tp=4, dp=2)):
        part = lines(run(name, plan))
        assert set(part) == set(whole)
        for cls in {"experts"} & set(whole):
            assert part[cls] * plan.gpus == pytest.approx(whole[cls])
        for cls in {"shared", "dense", "head", "embedding"} & set(whole):
            assert part[cls] * plan.tp == pytest.approx(whole[cls])
        for cls in set(whole) - {"workspace", "activations in flight"}:
            assert whole[cls] / plan.gpus <= part[cls] * REL <= whole[cls] * REL**2, cls


@models
def test_every_layer_is_somewhere(name: str) -> None:
    """Operators of a step run as often as the card has layers of their kind."""
    m = api.load_model(name)
    parts = [x.split("/") for x in m.shape.order]
    want = Counter(kind for pair in parts for kind in pair if kind != NONE)
    assert m.layers == m.shape.layers and sum(want.values()) >= m.layers
    for phase in ("decode", "prefill"):
        ops = collect(m, "native", phase).ops
        seen: dict[str, set[Any]] = {}
        for op in ops:
            seen.setdefault(op.layer_kind, set()).add(op.count)
        assert {k: v for k, v in seen.items() if k in want} == {k: {n} for k, n in want.items()}
        for f, kind in ((m.ffn[k], k) for k in want if k in m.ffn):
            experts = [o for o in ops if o.layer_kind == kind and o.name == "experts"]
            assert len(experts) == isinstance(f, MoE)
    assert len({(o.layer_kind, o.name) for o in ops}) == len(ops)  # nothing twice
    # stages of any layout hold every layer of a kind
    for kind, n in m.attention_counts().items():
        assert n == sum(a == kind for a, _ in parts)


@models
def test_caches_never_shrink_with_context(name: str) -> None:
    m = api.load_model(name)
    before: dict[str, float] = {}
    for tokens in (1, 2, 127, 128, 129, 1000, 4096, 40_000, m.shape.context_tokens):
        now = counts.cache_bytes(m, tokens)
        assert all(now[k] >= v for k, v in before.items())
        before = now
    assert before["kv"] > counts.cache_bytes(m, 1)["kv"]


@models
@phases
def test_nothing_beats_the_speed_of_light(name: str, phase: str) -> None:
    """Nor do the weights and cache that a step reads at least come faster than HBM brings them."""
    for plan in (Plan(tp=8), Plan(dp=8, ep=8)):
        light = run(name, plan, phase, mode="speed-of-light")
        assert 0 < light.step_time_s <= run(name, plan, phase).step_time_s * REL
        moved = sum(o.weight_bytes + o.kv_bytes for o in light.operators)
        assert light.step_time_s * REL >= moved / machine().memory.bandwidth.value


@models
@phases
def test_twice_the_bandwidth_is_never_slower(name: str, phase: str) -> None:
    for path in ("memory.bandwidth", "scale_up.bandwidth", "chip.peak_fp8"):
        for plan in (Plan(tp=8), Plan(dp=8, ep=8)):
            better = run(name, plan, phase, system=machine(path, 2.0)).step_time_s
            assert better <= run(name, plan, phase).step_time_s * REL, path


# ---- layers that share


def ops_of(name: str, phase: str = "decode") -> dict[tuple[str, str], Any]:
    return {
        (o.layer_kind, o.name): o for o in collect(api.load_model(name), "native", phase).ops
    }  # fmt: skip


def at(op: Any, what: str, **values: float) -> float:
    given = dict(b=1, m=1, q=1, dcp=1, tp=1) | values
    expr = op.cost(what)
    return float(expr.subs({symbol(k): v for k, v in given.items()}))


def test_shared_indexes_have_no_part_of_their_own() -> None:
    """GLM-5.2: the cores alike, but queries, keys, weights and scan on 21 of 78 layers only."""
    ops = ops_of(GLM52)
    own = {n for k, n in ops if k == "dsa"} - {n for k, n in ops if k == "shared_dsa"}
    assert own == {"index_query", "index_key", "index_weight", "index_scan"}
    for name in ("core", "o", "kv_up"):
        one, other = ops["dsa", name], ops["shared_dsa", name]
        assert one.bindings == other.bindings and one.params == other.params
    scan = 21 * 2 * 32 * 128 * 100_000
    assert 21 * at(ops["dsa", "index_scan"], "flops", T=100_000) == scan
    # GLM-5 has the same layers without sharing, so 57 indexers more
    m, old = api.load_model(GLM52), api.load_model("glm-5")
    indexer = 2048 * 32 * 128 + 6144 * (128 + 32)
    more = sum(counts.parameters(old).values()) - sum(counts.parameters(m).values())
    assert more == 57 * indexer


def test_shared_caches_of_deepseek_v41() -> None:
    """Four layers make entries; others read as much and keep a window; reindexing is bounded."""
    ops, t = ops_of(V41), 1_000_000
    for kind, source in (("csa2_reuse", "csa2"), ("full_reuse", "full"), ("full_index", "full")):
        assert (kind, "compressor") not in ops and (kind, "index_key") not in ops
        for what in ("flops", "kv_bytes"):
            core = at(ops[kind, "core"], what, T=t)
            assert core == at(ops[source, "core"], what, T=t) > 0
    assert at(ops["full", "core"], "kv_bytes", T=t) == pytest.approx(512 * 288 + 128 * 584)
    assert at(ops["full", "core"], "flops", T=t) == 2 * 64 * (512 + 128) * 1024
    for kind, scanned in (("csa2", t // 2), ("full", t), ("full_index", 2048 * 8)):
        scan = ops[kind, "index_scan"]
        assert at(scan, "flops", T=t) == 2 * 32 * 128 * scanned
        assert at(scan, "kv_bytes", T=t) == 68 * scanned
    assert at(ops["full_index", "index_scan"], "flops", T=5000) == 2 * 32 * 128 * 5000
    assert not {("csa2_reuse", "index_scan"), ("full_reuse", "index_scan")} & set(ops)
    assert ops["csa2", "compressor"].params == 2 * 5120 * 512 + 2 * 512
    assert ops["full", "compressor"].params == 5120 * 512  # of one token: no gate


def test_a_prefill_leaves_late_layers_out() -> None:
    """Of 5000 new tokens layers 21 to 39 see 128, of 50 all of them; decode runs every layer."""
    new = {}
    for tokens in (50, 5000):
        e = run(V41, Plan(), "prefill", batch=2, new_tokens=tokens, mode="speed-of-light")
        new[tokens] = {(o.layer_kind, o.name): o for o in e.operators}
    for tokens, late in ((50, 50), (5000, 128)):
        for kind, n, seen in (("csa2", 3, tokens), ("full_reuse", 15, late)):
            q = new[tokens][kind, "q_up"]
            assert q.count == n and q.flops == pytest.approx(2 * n * 2 * seen * 1280 * 32_768)
    # the last 128 of 25,000 tokens, before which all are in the cache
    core = new[5000]["full_reuse", "core"]
    assert core.flops == pytest.approx(15 * 2 * 2 * 128 * 64 * (512 + 128) * 1024)
    scan = new[5000]["full_index", "index_scan"]
    assert scan.flops == pytest.approx(4 * 2 * 2 * 128 * 32 * 128 * 16_384)
    decode = run(V41, Plan(), batch=2)
    runs = {o.layer_kind: o.count for o in decode.operators if o.name == "core"}
    assert sum(runs.values()) == 40 and runs["full_reuse"] == 15
    for kind, n, seen in (("moe", 21, 5000), ("moe_late", 19, 128)):
        experts = new[5000][kind, "experts"].flops  # no padding, no imbalance at light speed
        assert experts == pytest.approx(n * 2 * 2 * seen * 6 * 3 * 5120 * 2304)


def test_engram_tables_take_no_gpu_memory() -> None:
    got = lines(run(V41, Plan()))
    assert "engram_tables" not in got
    assert got["engram"] == pytest.approx(2 * 6144 * 25_600 * (1 + 4 / 128**2))
    with pytest.raises(InputError, match=r"plan pp: 2 for deepseek-v4\.1-flash"):
        run(V41, Plan(pp=2))


def test_a_query_without_a_latent() -> None:
    """Kimi Linear: 2304 to 32 heads of 192 at once; low-rank gates in its KDA layers."""
    ops = ops_of(LINEAR)
    assert ops["mla", "q"].params == 2304 * 32 * 192
    assert ops["mla", "kv_down"].params == 2304 * 576
    kda = sum(o.params for (k, _), o in ops.items() if k == "kda")
    width = 4096
    gates = 2 * (2304 * 128 + 128 * width) + 2304 * 32  # decay and output gate; beta
    assert kda == 3 * (2304 * width + 4 * width) + gates + width * 2304


# ---- faults of sharing, ranges of what is not public


def card(name: str) -> dict[str, Any]:
    return tomllib.loads((data_dir("models") / f"{name}.toml").read_text())


def read(tmp_path: Any, name: str, change: Any) -> Model:
    from perfmodel.scaffold import toml

    data = copy.deepcopy(card(name))
    change(data)
    path = tmp_path / f"{name}.toml"
    path.write_text(toml(data))
    return catalog.read_card(Model, path)


def put(path: str, value: Any) -> Any:
    def change(data: dict[str, Any]) -> None:
        *way, last = path.split(".")
        for key in way:
            data = data[int(key)] if isinstance(data, list) else data[key]
        data[int(last) if isinstance(data, list) else last] = value

    return change


UNSURE = {"field": "ffn.moe.intermediate", "low": 1, "high": 9999, "why": "?", "source": "AIC"}


@pytest.mark.parametrize(
    ("name", "path", "value", "said"),
    [
        (GLM52, "attention.dsa.index_shared", True, r"shape\.order\[0\] = 'dsa/dense': index_shared"),
        (V41, "attention.csa2.kv_shared", True, r"shape\.order\[2\] = 'csa2/moe': kv_shared"),
        (V41, "attention.swa.kv_shared", True, "compression 0 is a window alone"),
        (GLM52, "attention.shared_dsa", {"type": "mla", "kind": "vendor", "source": "AIC",
         "heads": 64, "kv_lora_rank": 512, "nope_dim": 192, "rope_dim": 64, "v_dim": 256,
         "index_shared": True}, "index_shared without indexer"),
        (V41, "shape.prefill_layers", 20, "prefill_layers = 20: moe is on both sides"),
        (V41, "shape.prefill_layers", 40, "prefill_layers 40: expected fewer than layers 40"),
        ("kimi-k3", "shape.prefill_layers", 3, "prefill_layers and prefill_tail_tokens"),
        ("glm-5", "uncertain", [UNSURE | {"field": "ffn.moe.width"}],
         r"uncertain\[0\]\.field = 'ffn\.moe\.width': expected a number of this card"),
        ("glm-5", "uncertain", [UNSURE | {"field": "attention.dsa.type"}], "expected a number"),
        ("glm-5", "uncertain", [UNSURE | {"low": 2049}], "not 2049 <= 2048 <= 9999"),
        ("glm-5", "uncertain", [UNSURE | {"high": 2047}], "not 1 <= 2048 <= 2047"),
        ("glm-5", "uncertain", [UNSURE | {"source": "WHO"}], "source key is not in"),
        ("glm-5", "uncertain", [{k: v for k, v in UNSURE.items() if k != "why"}], "why"),
        ("glm-5", "uncertain", [UNSURE | {"mark": 1}], "mark"),
    ],
)  # fmt: skip
def test_faulty_cards_say_what_is_expected(
    tmp_path: Any, name: str, path: str, value: Any, said: str
) -> None:
    with pytest.raises(CardError, match=said):
        read(tmp_path, name, put(path, value))


def test_numbers_that_are_not_public_are_shown(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    m = read(tmp_path, "glm-5", put("uncertain", [UNSURE]))
    assert m.number("ffn.moe.intermediate") == 2048
    e = run(m, Plan(tp=8))
    note = "not public, an assumption of the model card: ffn.moe.intermediate (1 to 9999)"
    assert note in e.notes
    plain = run("glm-5", Plan(tp=8))
    assert plain.step_time_s == e.step_time_s and not any("not public" in n for n in plain.notes)
    path = str(tmp_path / "glm-5.toml")
    assert main(["models", path]) == 0
    out = capsys.readouterr().out
    assert "Not public: ffn.moe.intermediate: ?" in out and "1 to 9,999" in out
    assert main(["models", path, "--json"]) == 0
    numbers = {n["path"]: n for n in json.loads(capsys.readouterr().out)["numbers"]}
    assert (numbers["ffn.moe.intermediate"]["low"], numbers["ffn.moe.intermediate"]["high"]) == (
        1, 9999
    )  # fmt: skip
    assert numbers["ffn.dense.intermediate"]["low"] is None


def test_ranges_of_other_precisions_are_not_noted() -> None:
    native, kv8 = (run("kimi-k3.1-pro", Plan(tp=8), precision=p) for p in ("native", "kv8"))
    assert any("native.cache.state_value_bytes (2 to 4)" in n for n in native.notes)
    assert not any("precision.native" in n for n in kv8.notes)


def test_what_the_facts_call_uncertain_is_marked() -> None:
    marked = {n: {u.field for u in api.load_model(n).uncertain} for n in MODELS}
    assert "attention.mla.v_dim" in marked[LINEAR]
    assert "shape.prefill_layers" in marked[V41]
    for name in ("kimi-k3", "kimi-k3.1-pro", LINEAR):
        assert "precision.native.cache.state_value_bytes" in marked[name]
    assert "precision.native.cache.index_key_bytes" in marked["kimi-k3.1-pro"]
    assert "precision.native.cache.index_key_bytes" in marked["minimax-m3"]
