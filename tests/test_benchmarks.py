"""The benchmark's hand-written step stays equal to the generated one."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from perfmodel import api
from perfmodel.api import Plan
from perfmodel.symbolic import evaluate


def test_hand_written_step_equals_the_generated_one(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = runpy.run_path(str(root / "benchmarks" / "decode_sweep.py"))
    bench["main"]((2000,))  # exits with an error where they differ by more than 1e-9
    assert "2,000" in capsys.readouterr().out


@pytest.mark.parametrize(
    "plan", [Plan(dp=72), Plan(tp=8), Plan(tp=4, ep=1, etp=4), Plan(tp=8, dp=9), Plan(tp=32, dp=2)]
)
@pytest.mark.parametrize("kw", [{}, {"balance": "unbalanced", "engine": "vllm"},
                                {"redundant_experts": 72}, {"mode": "speed-of-light"}])  # fmt: skip
def test_other_plans_equal_the_hand_written_step(root: Path, plan: Plan, kw: dict) -> None:
    """The same arithmetic without SymPy, over plans, engines and modes."""
    bench = runpy.run_path(str(root / "benchmarks" / "decode_sweep.py"))
    model, system = bench["MODEL"], bench["SYSTEM"]
    point = api.estimate(model, system, plan, batch=plan.dp, context_tokens=4096, **kw)
    scalars = dict(point.values)
    scalars["floors"] = sum(
        evaluate(o.kernels * o.count, scalars) for o in point.step.ops if o.link is None
    )
    b = np.array([1.0, 7, 64, 500, 3001, 40_000, 777])
    t = np.array([1.0, 100, 4000, 20_000, 130_000, 9, 1_000_000])
    sweep = api.sweep(model, system, plan, batch=b, context_tokens=t, **kw)
    assert bench["by_hand"](scalars, b, t) == pytest.approx(sweep["step_time_s"], rel=1e-8)
