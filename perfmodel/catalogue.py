"""The whole catalogue side by side: frames of machines and of models.

A frame is long: one row is one number. Columns of both frames:

    id, label, name   the card; `label` is the id, with the profile of a machine not as sold
    metric            what the number is (`MACHINE_METRICS`, `MODEL_METRICS`, which give the unit)
    part              what of it: a precision, a tier, a tensor class, a group of FLOPs; or ""
    value             in `unit` (SI); nan where the card has no such number
    low, high         its range, where sources disagree; else nan
    unit
    source            every input with its kind and citation; how it was computed
    missing           why there is no value; else ""

Machines also have `precision` (of the peak used; or ""), models `context` (tokens; 0 where it does
not matter). Names and sources are text of cards, to be escaped where they are shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from perfmodel import api, counts
from perfmodel.catalog import Quantity
from perfmodel.errors import InputError
from perfmodel.hardware import System
from perfmodel.model import Model
from perfmodel.text import si

CONTEXTS = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
TABLES = "engram_tables"  # tensor class that lies in host memory
CAPEX = "capex"  # beside the prices by the hour
PRICES = {**api.PRICE_BASES, CAPEX: "purchase price"}

# metric: unit, what it is
MACHINE_METRICS = {
    "peak": ("FLOP/s", "dense peak"),
    "ridge": ("FLOP/B", "peak over HBM bandwidth: work below it waits for memory"),
    "bytes_per_flop": ("B/FLOP", "bandwidth over peak, of memory and links (one direction)"),
    "bandwidth": ("B/s", "HBM bandwidth of a GPU"),
    "memory": ("B", "HBM of a GPU and of a scale-up domain"),
    "domain": ("1", "GPUs of a scale-up domain"),
    "power": ("W", "power of a GPU in the named set"),
    "power_per_flops": ("W/(FLOP/s)", "power over peak"),
    "power_per_bandwidth": ("W/(B/s)", "power over HBM bandwidth"),
    "price": ("USD/h or USD", "price of a GPU in the named set"),
    "price_per_flops": ("price/(FLOP/s)", "price over peak"),
    "price_per_bandwidth": ("price/(B/s)", "price over HBM bandwidth"),
}
MODEL_METRICS = {
    "total": ("1", "parameters, computed: with the vision tower, without tables in host memory"),
    "active": ("1", "parameters a token uses, computed: no input embedding"),
    "total_published": ("1", "parameters as published"),
    "active_published": ("1", "parameters a token uses, as published"),
    "parameters": ("1", "parameters by tensor class"),
    "weights": ("B", "weights with their scales, by tensor class"),
    "state": ("B", "what a sequence keeps whatever its length: recurrent states, tails"),
    "kv_per_token": ("B/token", "cache that grows with the context, resident, over the context"),
    "cache": ("B", "all that a sequence keeps resident"),
    "read": ("B/token", "cache moved to decode a token: read; states also written"),
    "flops": ("FLOP/token", "work to decode a token"),
}


def kilo(tokens: int) -> str:
    """Return a context as people name it: 1k, 64k, 1M (powers of two)."""
    for size, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{letter}"
    return f"{tokens:,}"


# ---- machines


def machine_frame(
    systems: Iterable[str] | None = None, power_set: str = "all_in", price_set: str = "owned"
) -> pd.DataFrame:
    """One row a machine, metric and part (see the module); by default of every machine.

    power_set: a key of POWER_BASES; price_set: one of PRICES, in USD/h but for "capex", in USD.
    A machine without a number has the row, with nan and the reason. Raises InputError for unknown
    sets and machines, CardError for a bad card.
    """
    _known("power_set", power_set, api.POWER_BASES)
    _known("price_set", price_set, PRICES)
    names = api.list_systems() if systems is None else systems
    rows = [r for s in names for r in _machine(api.load_system(s), power_set, price_set)]
    return pd.DataFrame(rows, columns=[*_COLUMNS, "precision"])


_COLUMNS = [
    "id", "label", "name", "metric", "part", "value", "low", "high", "unit", "source", "missing",
]  # fmt: skip


def _known(field: str, value: str, known: Mapping[str, str]) -> None:
    if value not in known:
        raise InputError(f"{field}: {value!r} is unknown; known: {', '.join(known)}")


def _machine(s: System, power_set: str, price_set: str) -> list[dict[str, Any]]:
    sold = s.profile == "as sold" or s.profile in s.id
    card = dict(id=s.id, label=s.id if sold else f"{s.id} ({s.profile})", name=s.name)
    hbm = ("memory.bandwidth", s.memory.bandwidth)
    power = (f"power.{power_set}", getattr(s.power, power_set, None))
    price = (f"price.{price_set}", getattr(s.price, price_set, None))
    dollars = "USD" if price_set == CAPEX else "USD/h"
    peaks = {
        field.removeprefix("peak_"): (f"chip.{field}", getattr(s.chip, field))
        for field in type(s.chip).model_fields
        if field.startswith("peak_")
    }
    rows: list[dict[str, Any]] = []

    def row(metric: str, cell: dict[str, Any], unit: str, part: str = "", rate: str = "") -> None:
        rows.append(
            {**card, "metric": metric, "part": part, "unit": unit, "precision": rate, **cell}
        )

    row("bandwidth", _one(*hbm), "B/s")
    row("memory", _one("memory.capacity", s.memory.capacity), "B", "one GPU")
    row("domain", _one("scale_up.gpus", s.scale_up.gpus), "1")
    whole = _product(("memory.capacity", s.memory.capacity), ("scale_up.gpus", s.scale_up.gpus))
    row("memory", whole, "B", "scale-up domain")
    row("power", _one(*power), "W")
    row("price", _one(*price), dollars)
    row("power_per_bandwidth", _ratio(power, hbm), "W/(B/s)")
    row("price_per_bandwidth", _ratio(price, hbm), f"{dollars}/(B/s)")
    tiers = {
        "HBM": hbm,
        "scale-up link": ("scale_up.bandwidth", s.scale_up.bandwidth),
        "scale-out link": ("scale_out.bandwidth", s.scale_out.bandwidth),
    }
    for rate, peak in peaks.items():
        row("peak", _one(*peak), "FLOP/s", rate, rate)
        row("ridge", _ratio(peak, hbm), "FLOP/B", rate, rate)
        for tier, bandwidth in tiers.items():
            row("bytes_per_flop", _ratio(bandwidth, peak), "B/FLOP", tier, rate)
        row("power_per_flops", _ratio(power, peak), "W/(FLOP/s)", rate, rate)
        row("price_per_flops", _ratio(price, peak), f"{dollars}/(FLOP/s)", rate, rate)
    return rows


Named = tuple[str, Quantity | None]


def _cite(path: str, q: Quantity) -> str:
    span = ""
    if q.low is not None or q.high is not None:
        span = f" (range {_bound(q.low, q)} to {_bound(q.high, q)})"
    return f"{path} {q.text}{span} [{q.kind}]: {q.source}"


def _bound(x: float | None, q: Quantity) -> str:
    return si(q.value if x is None else x, q.unit)


def _cell(value: float, low: float, high: float, source: str) -> dict[str, Any]:
    if low == high:  # no range
        low = high = math.nan
    return dict(value=value, low=low, high=high, source=source, missing="")


def _nothing(*inputs: Named) -> dict[str, Any]:
    lacking = ", ".join(path for path, q in inputs if q is None)
    have = "; ".join(_cite(path, q) for path, q in inputs if q is not None)
    why = f"no {lacking} on the card"
    source = f"{why}; {have}" if have else why
    return dict(value=math.nan, low=math.nan, high=math.nan, source=source, missing=why)


def _ends(q: Quantity) -> tuple[float, float]:
    return (q.value if q.low is None else q.low, q.value if q.high is None else q.high)


def _one(path: str, q: Quantity | None) -> dict[str, Any]:
    if q is None:
        return _nothing((path, q))
    return _cell(q.value, *_ends(q), _cite(path, q))


def _ratio(top: Named, bottom: Named) -> dict[str, Any]:
    """Return top over bottom; its range is that of the inputs taken at their worst."""
    (_, a), (_, b) = top, bottom
    if a is None or b is None:
        return _nothing(top, bottom)
    (a_low, a_high), (b_low, b_high) = _ends(a), _ends(b)
    source = f"{_cite(top[0], a)}; over {_cite(bottom[0], b)}"
    return _cell(a.value / b.value, a_low / b_high, a_high / b_low, source)


def _product(first: Named, second: Named) -> dict[str, Any]:
    (_, a), (_, b) = first, second
    if a is None or b is None:
        return _nothing(first, second)
    (a_low, a_high), (b_low, b_high) = _ends(a), _ends(b)
    source = f"{_cite(first[0], a)}; times {_cite(second[0], b)}"
    return _cell(a.value * b.value, a_low * b_low, a_high * b_high, source)


# ---- models


def model_frame(
    models: Iterable[str] | None = None,
    precision: str = "native",
    contexts: Sequence[int] = CONTEXTS,
) -> pd.DataFrame:
    """One row a model, metric, part and context (see the module); by default of every model.

    A model whose card has no such precision has no rows; one with a shorter context has rows with
    nan. Drafts are left out. Raises InputError for unknown models, CardError for a bad card.
    """
    names = api.list_models() if models is None else models
    rows = [
        r
        for m in map(api.load_model, names)
        if precision in m.precision
        for r in _model(m, precision, contexts)
    ]
    return pd.DataFrame(rows, columns=[*_COLUMNS, "context"])


def _model(m: Model, precision: str, contexts: Sequence[int]) -> list[dict[str, Any]]:
    card = dict(id=m.id, label=m.id, name=m.name)
    shapes = "computed from " + _sections(m)
    stored = "computed from " + _sections(m, precision)
    rows: list[dict[str, Any]] = []

    def row(metric: str, cell: dict[str, Any], part: str = "", context: int = 0) -> None:
        unit = MODEL_METRICS[metric][0]
        rows.append(
            {**card, "metric": metric, "part": part, "unit": unit, "context": context, **cell}
        )

    def computed(metric: str, value: float, source: str, part: str = "", context: int = 0) -> None:
        row(metric, _cell(value, math.nan, math.nan, source), part, context)

    parameters, weights = counts.parameters(m), counts.weight_bytes(m, precision)
    tables = parameters.get(TABLES, 0.0)  # published totals leave them out
    apart = f"; without {si(tables, '1')} parameters of tables in host memory" if tables else ""
    computed("total", sum(parameters.values()) - tables, shapes + apart)
    computed("active", counts.active_parameters(m), shapes)
    for name in ("total", "active"):
        q = getattr(m.published, f"{name}_parameters")
        row(f"{name}_published", _one(f"published.{name}_parameters", q))
    for cls, size in weights.items():
        computed("parameters", parameters[cls], shapes, cls)
        computed("weights", size, stored, cls)
    # a part of the cache that a token and a million tokens make alike is a state
    one, many = (counts.cache_bytes(m, t, precision) for t in (1, 1 << 20))
    constant = {name for name in one if one[name] == many[name]}
    tail = m.precision[precision].cache.tail_bytes_per_sequence
    state = tail + sum(one[name] for name in constant)
    computed("state", state, stored)
    limit = m.shape.context_tokens
    for t in contexts:
        if t > limit:
            why = f"beyond the {limit:,} tokens of the card"
            none = dict(value=math.nan, low=math.nan, high=math.nan, missing=why)
            none["source"] = f"{why}; {_sections(m)}"
            for metric in ("kv_per_token", "cache", "read", "flops"):
                row(metric, none, context=t)
            continue
        kept = counts.cache_bytes(m, t, precision)
        grown = sum(size for name, size in kept.items() if name not in constant)
        computed("kv_per_token", grown / t, stored, context=t)
        computed("cache", grown + state, stored, context=t)
        for part, moved in counts.cache_reads(m, t, precision).items():
            computed("read", moved, stored, part, t)
        work: dict[str, float] = {}
        for (group, _), flops in counts.decode_flops(m, t, precision).items():
            work[group] = work.get(group, 0.0) + flops
        for group, flops in work.items():
            computed("flops", flops, stored, group, t)
    return rows


def _sections(m: Model, precision: str | None = None) -> str:
    """Cite the sections of a card that a count comes from, sections of one source together."""
    used: dict[str, Any] = {"shape": m.shape}
    used |= {f"attention.{n}": m.attention[n] for n in m.attention_counts() if n in m.attention}
    used |= {f"ffn.{n}": m.ffn[n] for n in m.ffn_counts() if n in m.ffn}
    used |= {
        n: part for n in ("residual", "vision", "engram") if (part := getattr(m, n)) is not None
    }
    if precision is not None:
        used[f"precision.{precision}"] = m.precision[precision]
    by_source: dict[tuple[str, str], list[str]] = {}
    for name, section in used.items():
        by_source.setdefault((section.kind, section.source), []).append(name)
    return "; ".join(f"{', '.join(n)} [{k}]: {src}" for (k, src), n in by_source.items())


# ---- reading a frame


def pick(frame: pd.DataFrame, metric: str, **where: Any) -> pd.DataFrame:
    """The rows of one metric, and of a part, precision or context where named."""
    rows = frame[frame["metric"] == metric]
    for column, value in where.items():
        rows = rows[rows[column] == value]
    return rows.copy()


def total_of(rows: pd.DataFrame) -> pd.DataFrame:
    """The parts of a metric added up, one row a card and context; nan where nothing is known."""
    keys = ["id", "label", "name", "metric", "unit", "context"]
    rest = dict.fromkeys(("low", "high", "source", "missing"), "first")
    added = rows.groupby(keys, sort=False)["value"].sum(min_count=1)
    return rows.groupby(keys, sort=False).agg(rest).assign(value=added).reset_index()
