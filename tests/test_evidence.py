"""Whole modules of measured kernels: DeepSeek V4 Pro decode attention.

Not an independent check: the kernels counted per operator were chosen knowing medians of these
very modules, and the floors and efficiencies of the cards are fits of tables like these
(`calibration/fit_kernels.py`). It holds the error that docs/validation.md states.
"""

import csv

import numpy as np
import pytest

from perfmodel.api import load_engine, load_model, load_system
from perfmodel.request import serving_numbers
from perfmodel.roofline import machine_numbers
from perfmodel.step import step_chain

SYSTEMS = {"gb300": "gb300-nvl72", "h200_sxm": "h200-nvl8"}
KINDS = {"4": "csa", "128": "hca"}


def _rows(evidence):
    path = evidence / "evidence" / "kernels" / "dsv4_generation.csv"
    if not path.is_file():
        pytest.skip(f"no measured kernels: {path} is not there")
    with open(path, newline="") as f:
        for r in csv.DictReader(f):
            if r["system"] in SYSTEMS and "Pro" in r["model"] and r["gemm_type"] == "fp8_block":
                yield r


def _predict(kind, system, rows):
    """Seconds of one attention layer for each row; collectives are not in these tables."""
    precision = "hopper" if system == "h200-nvl8" else "native"
    step = step_chain(load_model("deepseek-v4-pro"), precision, "decode")
    names = [
        f"o{i}_t" for i, op in enumerate(step.ops) if op.layer_kind == kind and op.link is None
    ]
    machine = {k: v for k, (v, _) in machine_numbers(load_system(system), "calibrated").items()}
    # kernels as tables time them: no engine's launch gaps
    serving = serving_numbers(load_engine("kernels"), "decode", "calibrated")
    machine |= {k: v for k, (v, _) in serving.items()}
    column = {k: np.array([float(r[k]) for r in rows]) for k in ("batch_size", "step", "tp_size")}
    inputs = dict(
        B=column["batch_size"], T=column["step"] + 1, tp=column["tp_size"], q=1.0, dp=1.0, pp=1.0,
        ep=column["tp_size"], etp=1.0, dcp=1.0, A=1.0,
    )  # fmt: skip
    return sum(step.chain.compile(*names)(**machine | inputs).values())


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("ratio", KINDS)
def test_decode_attention_modules(evidence, record_property, system, ratio):
    rows = [r for r in _rows(evidence) if r["system"] == system and r["compress_ratio"] == ratio]
    if not rows:
        pytest.skip(f"no V4 Pro rows of {system}")
    measured = np.array([float(r["latency"]) for r in rows]) / 1e3
    error = _predict(KINDS[ratio], SYSTEMS[system], rows) / measured - 1
    mdape, p90 = np.median(abs(error)), np.quantile(abs(error), 0.9)
    record_property("mdape", float(mdape))
    bias = np.median(error)
    print(f"{system} {KINDS[ratio]}: n {len(rows)}, MdAPE {mdape:.1%}, P90 {p90:.1%}, {bias:+.1%}")
    assert mdape < 0.10
