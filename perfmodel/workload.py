"""Workload cards: what a call brings, how long a session waits between calls, what a cache finds.

A chat has neither gaps nor a cache. An agent comes back with its history: most of a call's input
is in the KV cache if that was kept over the gap.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from perfmodel.catalog import Date, Id, Number, Quantity, Share, Text, quantity_field

if TYPE_CHECKING:
    Tokens: TypeAlias = Quantity
    Duration: TypeAlias = Quantity
    Calls: TypeAlias = Quantity
else:
    Tokens = quantity_field("1", 1, 1e8, above=False)
    Duration = quantity_field("s", 0, 1e7, above=False)
    Calls = quantity_field("1", 1, 1e7, above=False)

_Numbers = Annotated[
    list[Annotated[float, Field(ge=0, le=1e8, allow_inf_nan=False)]],
    Field(min_length=2, max_length=1000),
]
_GRID = np.concatenate(([0.0], np.geomspace(1e-2, 1e7, 2000)))


def _cited(key: str, info: ValidationInfo) -> str:
    sources = (info.context or {}).get("sources", {})
    if key not in sources:
        raise ValueError(f"source key is not in [sources]; known: {', '.join(sources) or 'none'}")
    return str(sources[key])


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Curve(_Part):
    """A share that grows with time: `share[i]` at `seconds[i]`."""

    kind: Literal["vendor", "measured", "estimate"]
    source: Annotated[str, AfterValidator(_cited)]
    seconds: _Numbers
    share: _Numbers

    @model_validator(mode="after")
    def _grows(self) -> Curve:
        if len(self.seconds) != len(self.share):
            raise ValueError(
                f"seconds has {len(self.seconds)} numbers and share {len(self.share)}; expected as "
                "many"
            )
        if any(b <= a for a, b in zip(self.seconds, self.seconds[1:], strict=False)):
            raise ValueError("seconds: expected each number larger than the one before")
        if any(b < a for a, b in zip(self.share, self.share[1:], strict=False)):
            raise ValueError("share: expected no number smaller than the one before")
        if self.share[-1] > 1:
            raise ValueError(f"share: {self.share[-1]} is more than 1")
        return self


class Call(_Part):
    """Means over calls. `input_tokens` counts cached and uncached ones.

    prefill_cv2: squared coefficient of variation of the uncached tokens of a call.
    """

    input_tokens: Tokens
    output_tokens: Tokens
    prefill_cv2: Number


class Cache(_Part):
    """What a prefix cache finds, as a share of input tokens.

    best: if nothing is ever evicted. kept: by how long a cache is kept after a call.
    """

    best: Share
    kept: Curve

    @model_validator(mode="after")
    def _below_best(self) -> Cache:
        if self.kept.share[-1] > self.best.value + 1e-9:
            raise ValueError(
                f"kept.share: {self.kept.share[-1]} is more than best ({self.best.text})"
            )
        return self


class Gap(_Part):
    """From the end of a call to the start of the next; `within`: share of gaps this long or less."""

    mean: Duration
    within: Curve

    @model_validator(mode="after")
    def _tail(self) -> Gap:
        low = _body(self.within)
        if self.within.share[-1] < 1 and self.mean.value <= low:
            raise ValueError(
                f"mean: {self.mean.text}: expected more than the {low:.3g} s that `within` alone "
                "makes"
            )
        if self.within.share[-1] == 1 and not 0.95 * low <= self.mean.value <= 1.05 * low:
            raise ValueError(
                f"mean: {self.mean.text}: expected about {low:.3g} s, the mean of `within`, which "
                "reaches 1"
            )
        return self


class Session(_Part):
    """calls: of a session, its sub-agents' too. threads: of a session, mean at the same time."""

    calls: Calls
    threads: Calls


class Workload(_Part):
    """A whole workload card."""

    id: Id
    name: Text
    summary: Text
    date: Date | None = None
    notes: list[Text] = []
    sources: dict[str, str]
    call: Call
    session: Session
    cache: Cache | None = None
    gap: Gap | None = None

    @model_validator(mode="after")
    def _gap_needs_cache(self) -> Workload:
        if self.cache is not None and self.gap is None:
            raise ValueError("gap: missing; expected one, because a cache is kept over gaps")
        return self

    @property
    def gap_mean_s(self) -> float:
        return self.gap.mean.value if self.gap else 0.0

    @cached_property
    def _held(self) -> np.ndarray:
        assert self.gap is not None
        return _capped_mean(self.gap, _GRID)

    def held_s(self, kept_s: np.ndarray) -> np.ndarray:
        """Mean seconds of a gap in which a cache kept for `kept_s` is held: E[min(gap, kept)]."""
        if self.gap is None:
            return np.zeros_like(np.asarray(kept_s, float))
        return np.where(np.isinf(kept_s), self.gap_mean_s, np.interp(kept_s, _GRID, self._held))

    def kept_s(self, held_s: np.ndarray) -> np.ndarray:
        """The inverse of `held_s`: inf where the whole mean gap can be held."""
        held_s = np.asarray(held_s, float)
        if self.gap is None:
            return np.full_like(held_s, np.inf)
        inside = np.interp(np.maximum(held_s, 0), self._held, _GRID)
        return np.where(held_s >= self.gap_mean_s * (1 - 1e-9), np.inf, inside)

    def hit(self, kept_s: np.ndarray) -> np.ndarray:
        """Share of input tokens found in a cache that is kept for `kept_s` seconds."""
        if self.cache is None:
            return np.zeros_like(np.asarray(kept_s, float))
        best, curve = self.cache.best.value, self.cache.kept
        # evenly in the logarithm of time, as gaps are spread; one second before the first point
        x = np.log1p(np.asarray(curve.seconds))
        got = np.interp(np.log1p(np.where(np.isinf(kept_s), 0, kept_s)), x, curve.share)
        last = curve.seconds[-1]
        got = np.where(kept_s > last, np.maximum(got, best * (1 - last / np.maximum(kept_s, 1))
                       + curve.share[-1] * last / np.maximum(kept_s, 1)), got)  # fmt: skip
        return np.where(np.isinf(kept_s), best, got)


def _body(curve: Curve) -> float:
    """Mean seconds up to the last point: the integral of the share still waiting."""
    return float(_up_to(curve, np.array([curve.seconds[-1]]))[0])


def _up_to(curve: Curve, t: np.ndarray) -> np.ndarray:
    """Integral of 1 - share from 0 to each t (at most the last point), share linear between."""
    x = np.concatenate(([0.0], curve.seconds)) if curve.seconds[0] > 0 else np.array(curve.seconds)
    y = np.concatenate(([0.0], curve.share)) if curve.seconds[0] > 0 else np.array(curve.share)
    fine = np.unique(
        np.concatenate(
            (x, *(np.geomspace(a + 1e-3, b, 40) for a, b in zip(x, x[1:], strict=False)))
        )
    )
    # between two points the share grows with the logarithm of time
    wait = 1 - np.interp(np.log1p(fine), np.log1p(x), y)
    sums = np.concatenate(([0.0], np.cumsum(np.diff(fine) * (wait[1:] + wait[:-1]) / 2)))
    return np.interp(t, fine, sums)


def _capped_mean(gap: Gap, t: np.ndarray) -> np.ndarray:
    """E[min(gap, t)]: the curve, and an exponential tail that makes up the rest of the mean."""
    curve, last = gap.within, gap.within.seconds[-1]
    share = 1 - curve.share[-1]
    if share == 0:
        scale = gap.mean.value / _body(curve)  # near 1: the card's mean and its curve agree
        return scale * _up_to(curve, np.minimum(t / scale, last))
    theta = (gap.mean.value - _body(curve)) / share
    tail = share * theta * -np.expm1(-np.maximum(t - last, 0) / theta)
    return _up_to(curve, np.minimum(t, last)) + tail
