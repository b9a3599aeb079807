"""Workload cards: gaps, what is held over them, what a cache finds; errors of a card."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import CardError
from perfmodel.pools import as_workload, list_workloads
from perfmodel.workload import Workload

ALL = list_workloads()
AGENTIC = [w for w in ALL if as_workload(w).cache is not None]
times = st.floats(0, 1e6)


def sampled_gaps(w: Workload, n: int = 400_000) -> np.ndarray:
    """Gaps drawn from the card's curve by inversion, and from its exponential tail."""
    assert w.gap is not None
    curve = w.gap.within
    u = (np.arange(n) + 0.5) / n
    x, y = np.array(curve.seconds), np.array(curve.share)
    if x[0] > 0:
        x, y = np.concatenate(([0.0], x)), np.concatenate(([0.0], y))
    gaps = np.expm1(np.interp(u, y, np.log1p(x)))
    tail = u > y[-1]
    if tail.any():
        theta = (w.gap.mean.value * n - gaps[~tail].sum()) / tail.sum() - x[-1]
        rest = (1 - u[tail]) / (1 - y[-1])
        gaps[tail] = x[-1] - theta * np.log(rest)
    return gaps


@pytest.mark.parametrize("name", AGENTIC)
def test_time_held_is_the_mean_of_capped_gaps(name: str) -> None:
    w = as_workload(name)
    gaps = sampled_gaps(w)
    for t in (1.0, 10.0, 60.0, 600.0, 3600.0):
        assert w.held_s(np.array(t)) == pytest.approx(np.minimum(gaps, t).mean(), rel=0.02)
    assert w.held_s(np.array(np.inf)) == w.gap_mean_s


@given(t=times)
@pytest.mark.parametrize("name", AGENTIC)
def test_kept_inverts_held(name: str, t: float) -> None:
    w = as_workload(name)
    held = w.held_s(np.array(t))
    again = w.held_s(w.kept_s(held))
    assert again == pytest.approx(float(held), rel=1e-6, abs=1e-6)


@given(a=times, b=times)
@pytest.mark.parametrize("name", ALL)
def test_longer_kept_finds_no_less(name: str, a: float, b: float) -> None:
    w = as_workload(name)
    low, high = sorted((a, b))
    found = w.hit(np.array([low, high, np.inf]))
    assert 0 <= found[0] <= found[1] + 1e-12 and found[1] <= found[2] + 1e-12 <= 1 + 1e-12
    assert w.held_s(np.array(low)) <= w.held_s(np.array(high)) + 1e-9


@pytest.mark.parametrize("name", AGENTIC)
def test_hit_at_the_measured_times_is_the_measured_share(name: str) -> None:
    w = as_workload(name)
    assert w.cache is not None
    kept = w.cache.kept
    assert w.hit(np.array(kept.seconds)) == pytest.approx(kept.share)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("best = { value = 0.963", "best = { value = 0.5", "more than best"),
        ("0.447, 0.744", "0.744, 0.447", "no number smaller"),
        ("seconds = [0, 10, 30", "seconds = [0, 30, 10", "larger than the one before"),
        ('mean = { value = "141 s"', 'mean = { value = "10 s"', "more than the"),
        ("[gap]\nmean", "[gap]\nmedian = 3\nmean", "median"),
        ("output_tokens = { value = 440", "output_tokens = { value = -1", "output_tokens"),
        ('kind = "measured"\nsource = "TTL"', 'kind = "measured"\nsource = "NO"', "source"),
        ("0.954, 0.960]", "0.954]", "expected as many"),
    ],
)
def test_faults_name_the_field(old: str, new: str, words: str, tmp_path: Path) -> None:
    import perfmodel

    text = (Path(perfmodel.__file__).parent / "workloads" / "agentic-coding.toml").read_text()
    assert old in text
    path = tmp_path / "agentic-coding.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(CardError, match=words.replace("(", r"\(")):
        as_workload(str(path))
