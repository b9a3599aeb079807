"""The closed loop and the prediction of rows."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_symbolic import check_units

from perfmodel import bands, rows
from perfmodel.api import estimate, list_engines, load_engine
from perfmodel.cli import main
from perfmodel.errors import InputError
from perfmodel.plan import Plan
from perfmodel.predict import ADDED, predict, predict_file
from perfmodel.serving import SERVING

BASE = dict(
    model_path="meta-llama/Llama-3.1-70B", system="h200_sxm", backend="vllm", mode="agg",
    weights_precision="fp8", isl=1024, osl=1024, n_gpus=4, attention_tp=4, attention_dp=1,
    moe_ep=1, concurrency=32,
)  # fmt: skip
MOE = dict(BASE, model_path="deepseek-v3", system="gb200", backend="trtllm", attention_tp=1,
           attention_dp=8, n_gpus=8, moe_ep=8, weights_precision="fp4")  # fmt: skip


def one(base=BASE, **changes):
    out = rows.evaluate(pd.DataFrame([dict(base, **changes)])).iloc[0]
    assert out["reason"] == "", out["reason"]
    return out


def many(column, values, base=BASE, **changes):
    out = rows.evaluate(pd.DataFrame([dict(base, **changes, **{column: v}) for v in values]))
    assert (out["reason"] == "").all(), out["reason"].tolist()
    return out


@pytest.mark.parametrize("name", SERVING.defs)
def test_unit_of_every_definition(name):
    check_units(SERVING, name)


def test_fixed_point_solves_its_own_equations():
    v = one(isl=8192)
    life = 0.9 * 1024 * v["tpot"]
    # the share of its time a resident request decodes, and the batch that follows from it
    assert v["f_next"] == pytest.approx(life / (life + v["ttft"]), rel=1e-6)
    assert v["batch"] == pytest.approx(32 * v["f_next"], rel=1e-4)
    assert v["e2e"] == pytest.approx(v["ttft"] + life, rel=1e-12)
    # Little's law
    assert v["output_rate"] * v["e2e"] == pytest.approx(32 * 0.9 * 1024, rel=1e-12)


def test_tpot_is_step_plus_interference():
    v = one(isl=8192)
    assert v["tpot"] == pytest.approx(v["step_time"] + v["stall"], rel=1e-12)
    # each of the other 31 requests brings one prefill in the time this one takes for its output
    others = v["f_next"] * 31 * v["t_prefill"] / (0.9 * 1024)
    assert v["stall"] == pytest.approx(others, rel=1e-4)


def test_a_worker_that_only_decodes_has_no_interference():
    v = one(mode="disagg")
    assert v["stall"] == 0
    assert v["tpot"] < one()["tpot"]


def test_decode_step_is_that_of_estimate():
    v = one(concurrency=1, osl=2, isl=1000, protocol="steady")
    e = estimate("llama-3.1-70b", "h200-nvl8", Plan(tp=4, ep=1, etp=4), batch=1,
                 context_tokens=1001, precision="fp8", engine="vllm")  # fmt: skip
    assert v["step_time"] == pytest.approx(e.step_time_s, rel=1e-9)
    p = estimate("llama-3.1-70b", "h200-nvl8", Plan(tp=4, ep=1, etp=4), batch=1, phase="prefill",
                 context_tokens=0, new_tokens=1000, precision="fp8", engine="vllm")  # fmt: skip
    # launches are the engine's own; the latency of a collective is part of the work
    launches = sum(o.floor_s for o in p.operators if o.link_s == 0)
    assert launches < sum(o.floor_s for o in p.operators)
    work = p.step_time_s - launches - p.outside_operators_s
    assert v["prefill_work"] == pytest.approx(work, rel=1e-6)


@pytest.mark.parametrize("base", [BASE, MOE], ids=["dense", "experts"])
def test_monotone_in_load_and_length(base):
    c = many("concurrency", [1, 2, 4, 8, 16, 32, 64, 128, 256], base)
    assert (np.diff(c["tpot"]) > 0).all() and (np.diff(c["ttft"]) > 0).all()
    assert (np.diff(c["output_rate"]) > 0).all()
    longer = many("isl", [128, 1024, 8192, 32768], base)
    assert (np.diff(longer["ttft"]) > 0).all() and (np.diff(longer["tpot"]) > 0).all()


def test_never_faster_than_light():
    table = pd.DataFrame([dict(b, concurrency=c) for b in (BASE, MOE) for c in (1, 8, 64, 512)])
    real, light = rows.evaluate(table), rows.evaluate(table, "speed-of-light")
    assert (light["tpot"] < real["tpot"]).all() and (light["ttft"] < real["ttft"]).all()


def test_kv_capacity_caps_the_batch_and_queues():
    v = one(n_gpus=1, attention_tp=1, concurrency=512, isl=8192)
    assert v["resident"] == v["kv_batch"] < 512
    assert v["batch"] <= v["kv_batch"]
    lives = (512 / v["kv_batch"] - 1) * (v["ttft"] - v["t_full"] + 0.9 * 1024 * v["tpot"])
    assert v["t_full"] == pytest.approx(lives, rel=1e-9)
    # capacity by hand: weights 70.6 GB FP8 with BF16 head and embedding, 163,840 B a token
    room = 0.93 * rows.capacity(rows.check(dict(BASE, n_gpus=1, attention_tp=1)).system)
    head = 2 * 128256 * 8192
    weights = 70.55e9 - 2 * head / 2 + 2 * head
    fit = (room - weights) / (163_840 * 0.9 * (8192 + 1024))
    assert v["kv_batch"] == pytest.approx(fit, rel=0.03)


def test_prefill_pool_that_is_the_bottleneck_holds_requests_back():
    pool = dict(MOE, mode="disagg", isl=8192, concurrency=2048, prefill_tp_size=1,
                prefill_attention_dp_size=4, prefill_moe_ep_size=4, decode_num_workers=1)  # fmt: skip
    small, large = one(pool, prefill_num_workers=1), one(pool, prefill_num_workers=64)
    assert small["ttft"] > 5 * large["ttft"] and small["batch"] < large["batch"]
    # no more tokens than the pool can prefill: one prompt a rank takes t_prefill
    limit = 4 / small["t_prefill"] * 0.9 * 1024
    assert small["output_rate"] <= 1.02 * limit
    assert small["output_rate"] >= 0.9 * limit


def test_engine_and_protocol_matter_as_their_cards_say():
    fixed, spread = one(protocol="fixed", backend="sglang"), one(backend="sglang", isl=1138,
                                                                 osl=1138)  # fmt: skip
    assert fixed["stall"] < spread["stall"]  # in step: prefills wait before the first token
    assert one(protocol="steady")["ttft"] < one(protocol="fixed")["ttft"]  # no first wave
    for name in list_engines():
        card = load_engine(name)
        assert card.id == name and card.values.kernel_scale.source


def test_speculation_divides_by_acceptance_and_pays_for_verification():
    base = dict(MOE, concurrency=8)
    plain = one(base)
    drafted = one(base, draft_tokens=1, acceptance_length=1.8)
    ratio = drafted["step_time"] / plain["step_time"]
    assert ratio > 1.02  # two tokens to verify, and the draft
    assert drafted["tpot"] - drafted["stall"] == pytest.approx(drafted["step_time"] / 1.8)


@settings(max_examples=60, deadline=None)
@given(
    c=st.floats(0.01, 1e5), isl=st.integers(1, 60_000), osl=st.integers(1, 60_000),
    backend=st.sampled_from(["vllm", "sglang", "trtllm"]), mode=st.sampled_from(["agg", "disagg"]),
)  # fmt: skip
def test_any_load_gives_numbers_or_a_reason(c, isl, osl, backend, mode):
    out = predict(pd.DataFrame([dict(BASE, concurrency=c, isl=isl, osl=osl, backend=backend,
                                     mode=mode)])).iloc[0]  # fmt: skip
    if out["reason"]:
        assert math.isnan(out["tpot_mean_ms_pred"])
        return
    for m in ("ttft_mean_ms", "tpot_mean_ms"):
        low, mid, high = (out[f"{m}_{k}"] for k in ("low", "pred", "high"))
        assert 0 < low < high < math.inf and 0 < mid < math.inf
    assert out["bound"] in ("compute", "memory", "link", "floor", "prefill")


BAD = [
    ("model_path", "gpt-5", "model_path: 'gpt-5' is no model here"),
    ("system", "abacus", "system: 'abacus' is no system here"),
    ("backend", "ollama", "backend: 'ollama' is unknown; known: sglang, trtllm, vllm"),
    ("mode", "both", "mode: 'both' is unknown; expected agg or disagg"),
    ("weights_precision", "int2", "weights_precision: 'int2' is not on the card of llama-3.1-70b"),
    ("isl", -5, "isl: -5 is out of range"),
    ("osl", float("nan"), "osl: missing; expected a number"),
    ("isl", "many", "isl: 'many' is not a number"),
    ("concurrency", 0, "concurrency: 0 is out of range"),
    ("n_gpus", 8, "attention_tp x attention_dp = 4 x 1 = 4; expected n_gpus 8"),
    ("n_gpus", 4.5, "n_gpus: 4.5 is not whole"),
    ("attention_tp", 3, "attention_tp x attention_dp = 3 x 1 = 3; expected n_gpus 4"),
    ("isl", 200_000, "isl + osl: 200000 + 1024 is more than the 131,072 tokens"),
    ("protocol", "carrier-pigeon", "carrier-pigeon"),
    ("draft_tokens", 3, "draft_tokens: llama-3.1-70b has no draft head"),
]


@pytest.mark.parametrize(("field", "value", "message"), BAD)
def test_bad_rows_are_refused_by_name_and_the_others_kept(field, value, message):
    table = pd.DataFrame(
        [BASE, dict(BASE, **{field: value}), dict(BASE, concurrency=8)], index=[7, 3, 9]
    )
    out = predict(table)
    assert list(out.index) == [7, 3, 9]
    assert message in out.at[3, "reason"]
    assert out.loc[3, [c for c in ADDED if c.endswith(("pred", "low", "high"))]].isna().all()
    assert (out.loc[[7, 9], "reason"] == "").all()
    assert out.at[7, "tpot_mean_ms_pred"] == pytest.approx(1e3 * one()["tpot"], rel=1e-12)


def test_too_large_a_model_is_refused_with_the_arithmetic():
    row = dict(BASE, model_path="deepseek-v3", n_gpus=4, weights_precision="fp8", moe_ep=4)
    reason = predict(pd.DataFrame([row])).at[0, "reason"]
    assert "does not fit: deepseek-v3 (native) with TP4 EP4" in reason
    assert "GB per GPU of" in reason and "0.93 of" in reason


def test_predict_file_and_command(tmp_path, capsys):
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    pd.DataFrame([dict(BASE, note="kept"), dict(BASE, backend="x")]).to_csv(source, index=False)
    assert main(["predict", str(source), "-o", str(target), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["rows"], shown["predicted"]) == (2, 1)
    assert shown["refused"][0]["reason"].startswith("backend: 'x'")
    out = pd.read_csv(target)
    assert list(out["note"])[0] == "kept" and set(ADDED) <= set(out.columns)
    assert (
        out.at[0, "tpot_mean_ms_low"]
        < out.at[0, "tpot_mean_ms_pred"]
        < out.at[0, "tpot_mean_ms_high"]
    )
    again = predict_file(target, target)  # onto itself: its own columns are replaced, not doubled
    assert list(again.columns) == list(out.columns)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a CSV table"),
        ("isl,osl\n1,2\n", "lacks the column 'model_path'"),
        (",".join((*rows.REQUIRED, *rows.LAYOUT)) + "\n", "has no rows"),
        ('a,b\n"1,2\n', "is not a CSV table"),
    ],
)
def test_bad_files(tmp_path, capsys, text, message):
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text(text)
    assert main(["predict", str(source), "-o", str(target)]) == 2
    assert message in capsys.readouterr().err
    assert not target.exists()


def test_bad_targets(tmp_path, capsys):
    source = tmp_path / "in.csv"
    pd.DataFrame([BASE]).to_csv(source, index=False)
    assert main(["predict", str(source), "-o", str(tmp_path / "no" / "out.csv")]) == 2
    assert "create it first" in capsys.readouterr().err
    assert main(["predict", str(source), "-o", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert main(["predict", str(tmp_path / "none.csv"), "-o", str(tmp_path / "o.csv")]) == 2
    assert "there is no file" in capsys.readouterr().err


# ---- bands

CASE = dict(mode="agg", concurrency=32, model="deepseek-v3", chip="b200-nvl8",
            context_tokens=9216, gpus=8)  # fmt: skip


def test_bands_are_ordered_and_widen_where_nothing_was_measured():
    for metric in bands.METRICS:
        for mode in ("agg", "disagg"):
            for c in (1, 32, 512):
                b = bands.band(metric, **dict(CASE, mode=mode, concurrency=c))
                assert 0 < b.low < b.low_half < b.high_half < b.high
                assert b.rows > 30 and 0 < b.typical < b.p90 and not b.extrapolated
    known = bands.band("tpot", **CASE)
    for change, word in (
        (dict(chip="vr-nvl72"), "no rows of vr-nvl72"),
        (dict(model="kimi-k3"), "no rows of kimi-k3"),
        (dict(context_tokens=1e6), "context beyond"),
        (dict(gpus=72), "more than 48 GPUs"),
    ):
        wide = bands.band("tpot", **dict(CASE, **change))
        assert word in wide.extrapolated
        assert wide.low < known.low and wide.high > known.high and wide.typical > known.typical
    with pytest.raises(InputError, match="band: 'ttlt' in 'agg/middle' is unknown"):
        bands.band("ttlt", **CASE)


def test_band_table_survives_writing(tmp_path):
    import tomllib

    table = tomllib.loads(bands.FILE.read_text("utf-8"))
    bands.write(table, tmp_path / "bands.toml")
    assert tomllib.loads((tmp_path / "bands.toml").read_text("utf-8")) == table


def test_estimates_carry_a_band():
    e = estimate("deepseek-v3", "b200-nvl8", Plan(tp=8, ep=8), batch=16, context_tokens=4096)
    assert e.band is not None and e.band.metric == "tpot" and not e.band.extrapolated
    k = estimate("kimi-k3", "vr-nvl72", Plan(dp=72), batch=72, context_tokens=10**6)
    assert k.band is not None and "kimi-k3" in k.band.extrapolated
    light = estimate("deepseek-v3", "b200-nvl8", Plan(tp=8, ep=8), batch=16, context_tokens=4096,
                     mode="speed-of-light")  # fmt: skip
    assert light.band is None
