"""The benchmark's hand-written step stays equal to the generated one."""

import runpy
from pathlib import Path

import pytest


def test_hand_written_step_equals_the_generated_one(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = runpy.run_path(str(root / "benchmarks" / "decode_sweep.py"))
    bench["main"]((2000,))  # exits with an error where they differ by more than 1e-9
    assert "2,000" in capsys.readouterr().out
