"""Board power: bounds, monotony and units, and the error against measured rows of others.

The constants were fitted to every other V4 Pro deployment on B200 (11 of 26 rows). The split was
set before any fit, but the form of the formula was chosen with the scores of all rows in view, so
the held-out error is a little optimistic.
"""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_symbolic import check_units

from perfmodel import power, rows
from perfmodel.api import Plan, estimate
from perfmodel.errors import InputError
from perfmodel.power import MEAN, POWER, SHARES, TimeShares

TP8 = Plan(tp=8, ep=1, etp=8)


def _step(batch=8, phase="decode", new=1, system="b200-nvl8", model="deepseek-v4-pro", **more):
    context = 8192 if phase == "decode" else 0
    return estimate(
        model, system, more.pop("plan", TP8), batch=batch, context_tokens=context, phase=phase,
        new_tokens=new, engine="vllm", **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pair():
    return _step(), _step(1, "prefill", 8192)


CHAINS = {c.name: c for c in (POWER, MEAN, SHARES)}


@pytest.mark.parametrize(("chain", "name"), [(c, d) for c in CHAINS for d in CHAINS[c].defs])
def test_units(chain, name):
    check_units(CHAINS[chain], name)
    assert CHAINS[chain].latex(name)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 256),
    st.sampled_from(["b200-nvl8", "gb300-nvl72", "mi355x", "vr-nvl72"]),
    st.sampled_from(["decode", "prefill"]),
    st.sampled_from(["calibrated", "speed-of-light"]),
    st.sampled_from([Plan(tp=8, ep=8), Plan(tp=4, pp=2, ep=4), Plan(dp=8, ep=8)]),
)
def test_between_idle_and_the_limit(batch, system, phase, mode, plan):
    small = phase == "prefill"
    e = _step(1 + batch // 128 if small else batch, phase, 2048 if small else 1, system,
              "qwen3.5-397b-a17b" if plan.dp == 1 else "deepseek-v3", plan=plan, mode=mode,
              )  # fmt: skip
    cap = power.inputs_of(e)["P_cap"]
    assert power.idle_w(system) < power.drawn_w(e) <= cap


@pytest.mark.parametrize("system", ["b200-nvl8", "h200-nvl8", "mi355x"])
@pytest.mark.parametrize("plan", [TP8, Plan(tp=8, ep=8)])
def test_more_batch_draws_more(system, plan):
    """Where compute and memory time grow and the launches do not, so does the power."""
    w = [power.drawn_w(_step(b, system=system, plan=plan)) for b in (1, 2, 4, 8, 16, 32, 64, 128)]
    assert all(a < b for a, b in zip(w, w[1:], strict=False)), w


def test_prefill_draws_more_than_small_decode(pair):
    decode, prefill = pair
    assert power.drawn_w(decode) < 0.8 * power.drawn_w(prefill)


def test_mean_lies_between(pair):
    dec, pre, idle = *(power.drawn_w(e) for e in pair), power.idle_w("b200-nvl8")
    mean = lambda x, y, **k: power.mean_w(*pair, TimeShares(x, y), **k)  # noqa: E731
    assert mean(1, 0) == pytest.approx(dec)
    assert mean(0, 1) == pytest.approx(pre)
    assert mean(0, 0) == pytest.approx(idle)
    assert mean(0.7, 0.3) == pytest.approx(0.7 * dec + 0.3 * pre)
    assert mean(0.5, 0.2) == pytest.approx(0.5 * dec + 0.2 * pre + 0.3 * idle)
    # a pool of its own is idle for the rest of its time
    assert mean(1, 0, pools=(8, 24)) == pytest.approx((dec + 3 * idle) / 4)
    assert mean(1, 1, pools=(8, 8)) == pytest.approx((dec + pre) / 2)


def test_time_shares():
    loop = dict(output_rate=1000.0, t_prefill=0.2, resident=8.0, f_next=0.9)
    got = power.time_shares(loop, output_tokens=1000, prefill_ranks=1, aggregated=True)
    assert got == TimeShares(decode=pytest.approx(0.8), prefill=pytest.approx(0.2))
    got = power.time_shares(loop, output_tokens=1000, prefill_ranks=2, aggregated=False)
    assert got == TimeShares(decode=1.0, prefill=pytest.approx(0.1))
    alone = loop | dict(resident=1.0)  # between its decode and its prefill the GPU waits
    got = power.time_shares(alone, output_tokens=1000, prefill_ranks=2, aggregated=False)
    assert got.decode == pytest.approx(0.9)
    full = loop | dict(output_rate=1e9)
    got = power.time_shares(full, output_tokens=1000, prefill_ranks=1, aggregated=True)
    assert got == TimeShares(decode=0.0, prefill=1.0)


def test_bad_input(pair):
    decode, prefill = pair
    ok = TimeShares(0.5, 0.5)
    calls = {
        "no Estimate": lambda: power.drawn_w(1),
        "not the 'b200-nvl8'": lambda: power.drawn_w(decode, "h200-nvl8"),
        "phase 'prefill'": lambda: power.mean_w(prefill, prefill, ok),
        "phase 'decode'": lambda: power.mean_w(decode, decode, ok),
        "more than 1": lambda: power.mean_w(decode, prefill, TimeShares(0.6, 0.6)),
        "decode share: nan": lambda: power.mean_w(decode, prefill, TimeShares(float("nan"), 0)),
        "prefill share: -1": lambda: power.mean_w(decode, prefill, TimeShares(0, -1)),
        "decode share: 'x'": lambda: power.mean_w(decode, prefill, TimeShares("x", 0)),
        "expected TimeShares": lambda: power.mean_w(decode, prefill, (0.5, 0.5)),
        "pools: 8": lambda: power.mean_w(decode, prefill, ok, pools=8),
        "pools prefill: 0": lambda: power.mean_w(decode, prefill, ok, pools=(8, 0)),
        "expected one": lambda: power.mean_w(
            decode, _step(1, "prefill", 512, "h200-nvl8", "qwen3.5-397b-a17b"), ok
        ),
        "'output_rate' is missing": lambda: power.time_shares(
            {}, output_tokens=1, prefill_ranks=1, aggregated=True
        ),
        "output_tokens: 0": lambda: power.time_shares(
            dict(output_rate=1, t_prefill=1, resident=1, f_next=1),
            output_tokens=0, prefill_ranks=1, aggregated=True,
        ),
    }  # fmt: skip
    for message, call in calls.items():
        with pytest.raises(InputError, match=re.escape(message)):
            call()


def test_constants_have_ranges():
    k = power.constants()
    assert set(k) == {"idle", "working", "waiting"}
    for q in k.values():
        assert 0 < q.low <= q.value <= q.high <= 1
    assert k["waiting"].high < k["working"].low  # more work never draws less


# ---- the measured rows

MODELS = {
    "DeepSeek-V4-Pro": "deepseek-v4-pro",
    "DeepSeek-R1-0528": "deepseek-v3",
    "Qwen3.5-397B-A17B": "qwen3.5-397b-a17b",
}
CHIPS = {"B200": "b200-nvl8", "H200": "h200-nvl8", "MI355X": "mi355x"}
PRECISIONS = {
    "MXFP4 experts + FP8 (native)": "native", "FP8": "fp8", "MXFP4": "fp4", "NVFP4": "fp4",
}  # fmt: skip
POOLS = re.compile(r"prefill (\d+)x8(?: \(?(TP8|DEP)\)?)?, decode (\d+)x8(?: \(?(TP8|DEP)\)?)?")
SIZES = {"TP8": (8, 1, 1), "DEP": (1, 8, 8)}  # attention tp, dp, experts


def _row(r):
    """A measured row in the columns of `perfmodel.rows`."""
    load = float(r["concurrency_or_batch"])
    out = dict(
        id=r["id"], group=r["group"], watts=r["value"], gpus=int(r["n_gpus"]),
        model_path=MODELS[r["model"]], system=CHIPS[r["system"]], isl=r["isl"], osl=r["osl"],
        backend="vllm" if "vllm" in r["software"].lower() else "sglang", n_gpus=8,
        weights_precision=PRECISIONS[r["weights_precision"]],
    )  # fmt: skip
    if r["role"] == "aggregated":
        n, dp = int(r["n_gpus"]), 1 if pd.isna(r["dp"]) else int(r["dp"])
        ep = n if dp > 1 else 1 if pd.isna(r["ep"]) else int(r["ep"])
        return out | dict(
            mode="agg", n_gpus=n, attention_tp=n // dp, attention_dp=dp, moe_ep=ep, concurrency=load
        )
    found = POOLS.search(r["notes"])
    workers, decoders = int(found[1]), int(found[3])
    each = load / decoders
    # a row that does not name its layout: data parallel, except decode for few requests
    prefill = SIZES[found[2] or "DEP"]
    decode = SIZES[found[4] or ("DEP" if each >= 64 else "TP8")]
    out |= dict(zip(("attention_tp", "attention_dp", "moe_ep"), decode, strict=True))
    names = ("prefill_tp_size", "prefill_attention_dp_size", "prefill_moe_ep_size")
    out |= dict(zip(names, prefill, strict=True))
    return out | dict(
        mode="disagg", concurrency=each, prefill_num_workers=workers, decode_num_workers=decoders
    )


@pytest.fixture(scope="module")
def measured(evidence):
    """Rows with measured and predicted watts, and joules per output token where published."""
    path = evidence / "evidence" / "measurements.csv"
    if not path.is_file():
        pytest.skip(f"no measured power: {path} is not there")
    every = pd.read_csv(path, low_memory=False)
    key = ["group", "isl", "concurrency_or_batch", "software"]
    joules = every[every["metric"] == "j_per_output_token"].set_index(key)["value"]
    found = every[every["metric"] == "power_w_per_gpu"].to_dict("records")
    table = pd.DataFrame([_row(r) for r in found])
    table["joules"] = [joules.get(tuple(r[k] for k in key), np.nan) for r in found]
    table["source"] = [r["source"] for r in found]
    loops = rows.evaluate(table)
    assert (loops["reason"] == "").all(), loops["reason"].unique()
    parts = [_predict(t, v) for t, v in zip(table.to_dict("records"), loops.to_dict("records"),
                                            strict=True)]  # fmt: skip
    table = pd.concat([table, pd.DataFrame(parts)], axis=1)
    table["error"] = table["predicted"] / table["watts"] - 1
    v4 = (table["system"] == "b200-nvl8") & (table["model_path"] == "deepseek-v4-pro")
    fitted = sorted(table.loc[v4, "group"].unique())[::2]  # every other deployment
    # Set apart after their residuals were seen. InferenceX issue 1507 says that the monitor of that
    # time also ran while the engine started; that it did in these very runs was not checked.
    early = table["source"].str.contains("issue 870")
    table["set"] = np.select(
        [v4 & table["group"].isin(fitted), v4, early],
        ["fitted", "held out", "issue 870"], "other",
    )  # fmt: skip
    return table


def _predict(t, loop):
    row = rows.check(t)
    lengths = row.protocol.values.lengths.value
    isl, osl = row.isl * lengths, row.osl * lengths
    common = dict(precision=row.precision, engine=row.engine)
    decode = estimate(
        row.model, row.system, row.plan, batch=max(1, round(loop["batch"])),
        context_tokens=round(isl + osl / 2), **common,
    )  # fmt: skip
    prefill = estimate(
        row.model, row.system, row.prefill_plan, batch=row.prefill_plan.dp, context_tokens=0,
        phase="prefill", new_tokens=round(isl), **common,
    )  # fmt: skip
    workers = 1.0 if row.aggregated else t["decode_num_workers"]
    per_decoder = 1.0 if row.aggregated else t["prefill_num_workers"] / workers
    shares = power.time_shares(
        loop, output_tokens=osl, prefill_ranks=per_decoder * row.prefill_plan.dp,
        aggregated=row.aggregated,
    )  # fmt: skip
    pools = None
    if not row.aggregated:
        pools = (8 * int(workers), 8 * int(t["prefill_num_workers"]))
    watts = power.mean_w(decode, prefill, shares, pools=pools)
    ends = {f"{k}_{p}": v for p, e in (("dec", decode), ("pre", prefill))
            for k, v in POWER.compile("u_work", "u_wait")(**power.inputs_of(e)).items()}  # fmt: skip
    joules = watts * t["gpus"] / (loop["output_rate"] * workers)
    return ends | dict(predicted=watts, predicted_joules=joules, decode_share=shares.decode,
                       prefill_share=shares.prefill, pools=pools)  # fmt: skip


def _mdape(error):
    return float(np.median(np.abs(error)))


# n, MdAPE, worst error: the largest that were measured while the step's constants were calibrated
# anew, rounded up. Only B200 with V4 Pro and Qwen3.5 is within the target. Why MI355X is predicted
# too high is not known.
GROUPS = {
    ("fitted", "b200-nvl8", "deepseek-v4-pro"): (11, 0.08, 0.24),
    ("held out", "b200-nvl8", "deepseek-v4-pro"): (15, 0.10, 0.20),
    ("other", "b200-nvl8", "qwen3.5-397b-a17b"): (2, 0.10, 0.13),
    ("other", "mi355x", "deepseek-v3"): (8, 0.33, 0.48),
    ("other", "mi355x", "qwen3.5-397b-a17b"): (1, 0.40, 0.40),
    ("issue 870", "h200-nvl8", "deepseek-v3"): (3, 1.0, 1.0),
    ("issue 870", "b200-nvl8", "deepseek-v3"): (1, 1.35, 1.35),
}


def test_every_row_is_scored(measured):
    found = measured.groupby(["set", "system", "model_path"]).size().to_dict()
    assert found == {k: n for k, (n, _, _) in GROUPS.items()}


@pytest.mark.parametrize("group", GROUPS, ids=" ".join)
def test_error(measured, record_property, group):
    kind, system, model = group
    part = measured[(measured["set"] == kind) & (measured["system"] == system)
                    & (measured["model_path"] == model)]  # fmt: skip
    n, typical, worst = GROUPS[group]
    mdape, largest = _mdape(part["error"]), float(part["error"].abs().max())
    record_property("mdape", mdape)
    print(f"{' '.join(group)}: n {len(part)}, MdAPE {mdape:.1%}, worst {largest:.1%}, "
          f"bias {part['error'].median():+.1%}")  # fmt: skip
    assert len(part) == n
    assert mdape <= typical
    assert largest <= worst


def test_target_on_b200(measured):
    """Board power of V4 Pro on B200 within 12 %, on the rows that were not fitted as on all."""
    v4 = measured[measured["set"].isin(["fitted", "held out"])]
    assert _mdape(v4["error"]) < 0.12
    assert _mdape(v4.loc[v4["set"] == "held out", "error"]) < 0.12


def test_joules_per_output_token(measured):
    """Power over throughput: the error of the closed loop comes on top."""
    part = measured[measured["joules"].notna()]
    error = part["predicted_joules"] / part["joules"] - 1
    for system, e in error.groupby(part["system"]):
        print(f"{system}: n {len(e)}, MdAPE {_mdape(e):.1%}, bias {e.median():+.1%}")
    v4 = part["system"] == "b200-nvl8"
    assert v4.sum() == 26
    assert _mdape(error[v4]) < 0.5


def test_the_constants_are_the_fit(measured):
    """The least mean absolute log error of the fitted rows, over a grid, is at the constants."""
    part = measured[measured["set"] == "fitted"]
    idle = power.constants()["idle"].value
    n, m = (np.array([1.0 if p is None else p[i] for p in part["pools"]]) for i in (0, 1))
    alone = part["pools"].isna().to_numpy()

    def watts(working, waiting):
        dec, pre = (
            (1 - idle)
            * np.minimum(1, working * part[f"u_work_{p}"] + waiting * part[f"u_wait_{p}"])
            for p in ("dec", "pre")
        )
        dec, pre = dec * part["decode_share"], pre * part["prefill_share"]
        return 1000 * (idle + np.where(alone, dec + pre, (n * dec + m * pre) / (n + m)))

    k = power.constants()
    ours = watts(k["working"].value, k["waiting"].value)
    assert ours == pytest.approx(part["predicted"].to_numpy())

    def loss(w):
        e = np.log(watts(*w) / part["watts"].to_numpy())
        return np.abs(e).mean() + 0.3 * np.sqrt((e**2).mean())

    grid = [(a, b) for a in np.arange(0.6, 1.01, 0.01) for b in np.arange(0.1, 0.4, 0.01)]
    best = min(grid, key=loss)
    print(f"best of the grid: working {best[0]:.2f}, waiting {best[1]:.2f}, loss {loss(best):.4f}")
    assert abs(best[0] - k["working"].value) < 0.09
    assert abs(best[1] - k["waiting"].value) < 0.05


def test_custom_card_needs_its_system(pair):
    with pytest.raises(InputError, match="system"):
        power.drawn_w(replace(pair[0], system_id="my-machine"))
