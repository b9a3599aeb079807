"""The phase ring: reading, what a row states, tables without a lost row, errors that must not grow."""

import numpy as np
import pandas as pd
import pytest

from perfmodel.api import Plan, estimate, load_engine
from perfmodel.errors import InputError
from perfmodel.validation import phases

# MdAPE in %, rounded up from what was measured; a change of a formula or a card may lower these.
LIMITS = {
    ("phases", "prefill"): 27, ("phases", "decode"): 30,
    ("speculation", "speedup"): 9, ("speculation", "tpot_ms"): 34,
    ("medians", "tpot_ms"): 17, ("medians", "ttft_ms"): 71,
}  # fmt: skip

BASE = {
    "id": "LMS-1", "source": "somewhere", "kind": "measured", "model": "DeepSeek-V3",
    "weights_precision": "FP8", "kv_precision": np.nan, "system": "H200", "n_gpus": 16.0,
    "role": "decode", "tp": 1.0, "ep": 16.0, "dp": 16.0, "isl": "2000", "osl": "100",
    "concurrency_or_batch": "64 per GPU", "spec_decode": "none", "software": "SGLang",
    "metric": "decode_tok_s_per_gpu", "value": 2000.0, "notes": np.nan,
}  # fmt: skip
SERVED = BASE | {
    "id": "IXR1-1", "role": "aggregated", "n_gpus": 8.0, "tp": 8.0, "ep": 1.0, "dp": 1.0,
    "isl": "1024", "osl": "1024", "concurrency_or_batch": "16", "metric": "tok_s_per_user",
    "value": 60.0,
}  # fmt: skip
DISAGG = "prefill 2x(TP8 EP1)=16 GPU; decode 3x(TP8 EP8 DPattn)=24 GPU; tp/ep/dp = decode"
PREFILL = {"role": "prefill", "metric": "prefill_tok_s_per_gpu", "isl": "4096", "osl": "1"}


def table(*changes, base=BASE):
    return pd.DataFrame([base | {"id": f"{base['id']}{i}"} | c for i, c in enumerate(changes)])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match="there is no file .*nowhere.csv"):
        phases.read(tmp_path / "nowhere.csv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "points.csv is not a CSV table"),
        ("id,source\n1,2\n", "column 'kind' is missing"),
        (",".join(BASE) + "\n", "no rows"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, text, message):
    path = tmp_path / "points.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        phases.read(path)


@pytest.mark.parametrize("ring", [phases.phases, phases.speculation, phases.medians])
def test_a_missing_column_is_named(ring):
    with pytest.raises(InputError, match="column 'spec_decode' is missing"):
        ring(table({}).drop(columns="spec_decode"))


def test_a_read_file_gives_the_same_table(tmp_path):
    path = tmp_path / "points.csv"
    table({}).to_csv(path, index=False)
    got = phases.phases(phases.read(path))
    assert got["predicted"].tolist() == phases.phases(table({}))["predicted"].tolist()


def test_decode_is_the_step_of_a_worker_that_only_decodes():
    """Rate = sequences of a GPU over the step, whose kernel floor is `decode_only` as high."""
    got = phases.phases(table({})).iloc[0]
    plan, asked = Plan(dp=16, ep=16), dict(batch=16 * 64, context_tokens=2050)
    e = estimate("deepseek-v3", "h200-nvl8", plan, engine="sglang", precision="native", **asked)
    kernels = sum(x.time_s for x in e.operators) - e.values["sum_link"]
    saved = (1 - load_engine("sglang").values.decode_only.value) * kernels
    assert 64 / e.step_time_s < got["predicted"] < 64 / (e.step_time_s - saved)
    assert got["predicted_overlapped"] > got["predicted"]
    assert got["ratio"] == pytest.approx(got["predicted"] / 2000)


def test_prefill_is_its_kernels_and_launches():
    got = phases.phases(table(PREFILL | {"concurrency_or_batch": "8192 tok/GPU"})).iloc[0]
    e = estimate(
        "deepseek-v3", "h200-nvl8", Plan(dp=16, ep=16), phase="prefill", batch=32,
        context_tokens=0, new_tokens=4096, engine="sglang", precision="native",
    )  # fmt: skip
    # engine launches in place of the kernels' own; the latency of a collective stays
    own = sum(o.floor_s for o in e.operators if o.link_s == 0)
    launches = own / e.values["tau_kernel"] * load_engine("sglang").values.prefill_kernel.value
    seconds = e.step_time_s - own - e.values["t_host"] + launches
    assert got["predicted"] == pytest.approx(8192 / seconds)
    assert got["note"] == ""


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (PREFILL, "16,384 tokens a rank"),
        ({"osl": np.nan}, "output length not stated"),
        ({"dp": np.nan, "tp": np.nan}, "EP stated alone"),
        ({"tp": 8.0, "ep": np.nan, "dp": np.nan, "system": "B200"}, "EP not stated"),
        ({"concurrency_or_batch": "", "notes": "20-22 tok/s/user"}, "Little's law"),
        ({"id": "DSK-1", "spec_decode": "MTP (production)"}, "one draft token"),
        (PREFILL | {"system": "H100", "ep": 8.0, "dp": 8.0}, "does not fit by our count"),
    ],
)
def test_what_a_row_does_not_state_is_noted(change, note):
    got = phases.phases(table(change)).iloc[0]
    assert got["reason"] == "" and note in got["note"] and got["predicted"] > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "projection"}, "not measured: projection"),
        ({"concurrency_or_batch": np.nan}, "batch not stated"),
        ({"isl": "production"}, "prompt length not stated"),
        ({"tp": np.nan, "ep": np.nan, "dp": np.nan}, "layout not stated"),
        ({"spec_decode": "simulated MTP"}, "draft tokens and acceptance not stated"),
        ({"model": "Qwen3-8B"}, "no card in this ring .*: model 'Qwen3-8B'"),
        ({"system": "MI355X"}, "no card in this ring .*: system 'MI355X'"),
        ({"software": "ATOM 1.0"}, "no card for the engine 'ATOM'"),
        ({"weights_precision": "INT3"}, "'int3' is not on the card"),
    ],
)
def test_a_row_left_out_says_why(change, reason):
    got = phases.phases(table(change, {}))
    assert got["reason"].str.contains(reason).tolist() == [True, False]
    assert got["predicted"].notna().tolist() == [False, True]


def test_the_cache_of_the_source_holds_for_its_other_rows():
    one, other = phases.phases(table({"kv_precision": "BF16"}, {}))["predicted"]
    alone = phases.phases(table({}))["predicted"].iloc[0]
    assert one == other < alone


def test_batches_are_read_as_stated():
    got = phases.phases(table(
        {"concurrency_or_batch": "64 per GPU"}, {"concurrency_or_batch": "1024"},
        {"concurrency_or_batch": "64", "notes": "64 requests per EP rank"},
    ))["predicted"]  # fmt: skip
    assert got.nunique() == 1


def test_mixed_weights_lie_between_checkpoints():
    speed = phases.phases(table(*(
        PREFILL | {"system": "GB200 NVL72", "weights_precision": w}
        for w in ("FP8", "FP8 attention + NVFP4 experts", "BF16 attention + FP8 experts")
    )))["predicted"]  # fmt: skip
    assert speed[2] < speed[0] < speed[1]


def test_speculation_against_a_plain_twin():
    """Twin of the same lengths and load; the speed-up is the ratio of the two TPOT."""
    got = phases.speculation(table(
        {"value": 40.0}, {"spec_decode": "MTP", "value": 60.0}, base=SERVED
    )).set_index("what")  # fmt: skip
    assert got["reason"].eq("").all()
    assert got.loc["speedup", "measured"] == pytest.approx(1.5)
    assert got.loc["tpot_ms", "measured"] == pytest.approx(1000 / 60)
    assert got.loc["tpot_ms", "draft_tokens"] == 2  # SGLang's recipe
    assert got.loc["tpot_ms", "basis"] == "recipe"
    ms, gain = got.loc["tpot_ms"], got.loc["speedup"]
    assert ms["predicted_high"] < ms["predicted"] < ms["predicted_low"]
    assert gain["predicted_low"] < gain["predicted"] < gain["predicted_high"]
    assert ms["implied_acceptance"] == pytest.approx(ms["acceptance_length"] * ms["ratio"])


def test_stated_acceptance_is_used_and_a_lone_row_has_no_twin():
    got = phases.speculation(table({"spec_decode": "MTP-3 AL 2.18"}, {"isl": "1000"}))
    assert got["basis"].iloc[0] == "stated" and got["acceptance_length"].iloc[0] == 2.18
    assert got["reason"].tolist() == ["", "no plain twin at the same setting"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"spec_decode": "MTP-3 relaxed acceptance"}, "relaxed acceptance"),
        ({"spec_decode": "MTP", "model": "DeepSeek-V3.2"}, "no MTP draft on the card"),
        ({"spec_decode": "simulated MTP"}, "draft tokens and acceptance not stated"),
    ],
)
def test_drafts_that_cannot_be_told_are_left_out(change, reason):
    got = phases.speculation(table(change))
    assert len(got) == 2 and got["reason"].str.match(reason).all()


def test_draft_tokens_follow_the_decode_workers():
    """TensorRT-LLM drafts one token with attention DP, three without."""
    served = SERVED | {"spec_decode": "MTP", "software": "TensorRT-LLM", "role": "disaggregated"}
    plain = DISAGG.replace(" DPattn", "")
    got = phases.speculation(table({"notes": DISAGG}, {"notes": plain}, base=served))
    got = got[got["what"] == "tpot_ms"]
    assert got["draft_tokens"].tolist() == [1, 3] and got["basis"].eq("assumed").all()


def test_medians_of_served_rows():
    got = phases.medians(table(
        {}, {"metric": "ttft_ms_median", "value": 300.0}, {"id": "LMS-9"},
        {"role": "disaggregated", "notes": DISAGG},
        {"role": "disaggregated", "notes": DISAGG.replace("2x(TP8", "2x(TP4")},
        {"role": "disaggregated"}, {"spec_decode": "MTP"}, base=SERVED,
    ))  # fmt: skip
    assert got["what"].tolist() == ["tpot_ms", "ttft_ms", "tpot_ms", "tpot_ms", "tpot_ms"]
    assert got["measured"].iloc[0] == pytest.approx(1000 / 60)
    assert got["predicted"].notna().tolist() == [True, True, True, False, False]
    assert [x.split(":")[0] for x in got["reason"]] == [
        "",
        "",
        "",
        "layout lost",
        "layout not stated",
    ]


@pytest.fixture(scope="module")
def published(evidence):
    path = evidence / "evidence" / "measurements.csv"
    if not path.is_file():
        pytest.skip(f"no published operating points: {path} is not there")
    return phases.read(path)


@pytest.fixture(scope="module")
def rings(published):
    return {f.__name__: f(published) for f in (phases.phases, phases.speculation, phases.medians)}


def test_no_published_row_is_lost(published, rings):
    """Predicted and left out are all there is; every left-out line says why, no other does."""
    rate = published["metric"].isin(["prefill_tok_s_per_gpu", "decode_tok_s_per_gpu"])
    assert sorted(rings["phases"]["id"]) == sorted(published.loc[rate, "id"])
    served = published["id"].str.startswith("IXR1-") & published["spec_decode"].eq("none")
    served &= published["metric"].isin(["tok_s_per_user", "ttft_ms_median"])
    assert sorted(rings["medians"]["id"]) == sorted(published.loc[served, "id"])
    speed = published["metric"].isin(["tok_s_per_user", "tpot_ms_median", "decode_tok_s_per_gpu"])
    drafts = published["spec_decode"].astype(str).str.contains("mtp", case=False) & speed
    assert rings["speculation"]["id"].value_counts().eq(2).all()
    assert set(rings["speculation"]["id"]) == set(published.loc[drafts, "id"])
    for d in rings.values():
        assert (d["predicted"].notna() == d["reason"].eq("")).all()


def test_errors_do_not_grow(rings):
    found = {}
    for name, d in rings.items():
        t = phases.error_table(d[d["reason"] == ""], ["what"])
        found |= {(name, r["what"]): r["MdAPE"] for r in t.to_dict("records")}
    assert found.keys() == LIMITS.keys()
    assert {k: v for k, v in found.items() if v > LIMITS[k]} == {}


def test_large_expert_groups_lie_between_no_overlap_and_full_overlap(rings):
    """The published decode rates of 72-144 GPUs overlap two batches, to a degree not stated."""
    d = rings["phases"].set_index("id").loc[["LMS-0005", "DSK-0003", "DSK-0005"]]
    assert (d["predicted"] < d["measured"]).all()
    assert (d["measured"] < d["predicted_overlapped"]).all()
