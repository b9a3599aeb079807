"""Benchmark rows as a table: one measured or wanted operating point a row, checked one by one.

The columns are those of public serving sweeps: `model_path`, `system`, `backend`, `mode`, `isl`,
`osl`, `n_gpus`, `attention_tp`, `attention_dp`, `moe_ep`, `concurrency`, and for disaggregated rows
the `prefill_*` and `decode_*` ones. What cannot be read is refused with a reason, row by row.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perfmodel import catalog
from perfmodel.engine import Engine, Protocol
from perfmodel.errors import DoesNotFit, InputError
from perfmodel.hardware import System
from perfmodel.model import Model
from perfmodel.paths import data_dir
from perfmodel.plan import Plan
from perfmodel.request import (
    layout,
    list_engines,
    list_models,
    load_engine,
    load_model,
    speculation,
)
from perfmodel.roofline import machine_numbers
from perfmodel.serving import solve

MAX_FILE_BYTES = 256 * 1024**2
REQUIRED = ("model_path", "system", "backend", "isl", "osl", "concurrency")
LAYOUT = ("n_gpus", "attention_tp", "attention_dp", "moe_ep")
OPTIONAL = {  # column -> what an empty or missing cell means
    "mode": "agg",
    "weights_precision": "",
    "gemm_quant_mode": "",
    "moe_quant_mode": "",
    "src": "",
    "protocol": "",
    "draft_tokens": "0",
    "acceptance_length": "of the card",
}
# Sweeps of this source sent every request with the nominal length (evidence README).
FIXED_LENGTHS = {"harrli"}


@dataclass(frozen=True)
class Row:
    """One checked row: cards, plans and loads in the terms of the model."""

    model: Model
    system: System
    engine: Engine
    protocol: Protocol
    precision: str
    aggregated: bool
    plan: Plan
    prefill_plan: Plan
    prefill_workers: float
    decode_workers: float
    isl: float
    osl: float
    concurrency: float
    draft: str | None
    draft_tokens: int
    acceptance_length: float


def read(path: str | Path) -> pd.DataFrame:
    """The rows of a CSV file, as text and numbers. Raises InputError naming file and column."""
    p = Path(path)
    if not p.is_file():
        raise InputError(f"rows: there is no file {str(path)!r}; expected a CSV file")
    if p.stat().st_size > MAX_FILE_BYTES:
        raise InputError(
            f"rows: {p.name} has {p.stat().st_size:,} bytes; expected at most {MAX_FILE_BYTES:,}"
        )
    try:
        table = pd.read_csv(p, low_memory=False)
    except (ValueError, UnicodeDecodeError, pd.errors.ParserError) as e:
        raise InputError(f"rows: {p.name} is not a CSV table: {e}") from None
    check_columns(table, p.name)
    return table


def check_columns(table: pd.DataFrame, name: str = "rows") -> None:
    """Raise InputError when a column that every row needs is missing."""
    missing = [c for c in (*REQUIRED, *LAYOUT) if c not in table.columns]
    if missing:
        raise InputError(
            f"rows: {name} lacks the column {missing[0]!r}; expected "
            f"{', '.join((*REQUIRED, *LAYOUT))}"
        )
    if table.empty:
        raise InputError(f"rows: {name} has no rows; expected at least one")


@lru_cache(maxsize=4)
def _names(kind: str, _folder: Path | None) -> dict[str, str]:
    """Every name of a card (lower case) -> its id; `_folder`: the user's, which may change."""
    out: dict[str, str] = {}
    cards: list[Any] = (
        [load_model(m) for m in list_models()]
        if kind == "model"
        else [catalog.load_system(s) for s in catalog.list_systems()]
    )
    own = catalog.user_cards("model" if kind == "model" else "system")
    for card in sorted(cards, key=lambda c: c.id in own):  # the user's last: they win
        for name in (card.id, *card.also):
            before = out.setdefault(name.lower(), card.id)
            if before != card.id:
                text = f"{kind} {name}: a name of {before} and of {card.id}; {card.id} is used"
                catalog.warn(text)
                out[name.lower()] = card.id
    return out


def _card(kind: str, field: str, value: Any) -> str:
    name = str(value).strip().lower()
    names = _names(kind, catalog.user_folder())
    if name not in names:
        raise InputError(f"{field}: {value!r} is no {kind} here; known: {', '.join(sorted(names))}")
    return names[name]


def load_protocol(name: str) -> Protocol:
    return catalog.load_card(Protocol, name, data_dir("protocols"), "protocol")


def _number(row: dict[Hashable, Any], field: str, low: float, high: float) -> float:
    raw = row.get(field)
    try:
        x = float(raw)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InputError(
            f"{field}: {raw!r} is not a number; expected {low:g} to {high:g}"
        ) from None
    if math.isnan(x):
        raise InputError(f"{field}: missing; expected a number from {low:g} to {high:g}")
    if not low <= x <= high:
        raise InputError(f"{field}: {raw!r} is out of range; expected {low:g} to {high:g}")
    return x


def _whole(row: dict[Hashable, Any], field: str, high: float = 4096, low: float = 1) -> int:
    x = _number(row, field, low, high)
    if x != int(x):
        raise InputError(
            f"{field}: {x:g} is not whole; expected a whole number from {low:g} to {high:g}"
        )
    return int(x)


def _text(row: dict[Hashable, Any], field: str) -> str:
    raw = row.get(field)
    return "" if raw is None or (isinstance(raw, float) and math.isnan(raw)) else str(raw).strip()


def precision_of(model: Model, system: System, labels: list[str]) -> str:
    """The precision of the card that a row's labels name, as the chip runs it.

    Raises InputError when no precision of the card has any of the labels.
    """
    wanted = [x.lower() for x in labels if x]
    for label in wanted or ["native"]:
        for name, p in model.precision.items():
            if label == name or label in p.labels:
                other = p.without_fp4
                return other if other and system.chip.peak_fp4 is None else name
    known = sorted({*model.precision, *(x for p in model.precision.values() for x in p.labels)})
    raise InputError(
        f"weights_precision: {'/'.join(wanted)!r} is not on the card of {model.id}; "
        f"known: {', '.join(known)}"
    )


def _plan(gpus: int, tp: int, dp: int, ep: int, field: str) -> Plan:
    if tp * dp != gpus:
        raise InputError(
            f"{field}: attention_tp x attention_dp = {tp} x {dp} = {tp * dp}; expected n_gpus "
            f"{gpus}"
        )
    if dp > 1:  # data-parallel attention sends tokens to experts spread over all its ranks
        return Plan(tp=tp, dp=dp, ep=gpus, etp=1)
    if ep > gpus or gpus % ep:
        raise InputError(f"{field}: moe_ep {ep} does not divide the {gpus} GPUs")
    return Plan(tp=tp, dp=dp, ep=ep, etp=gpus // ep)


def _prefill_plan(row: dict[Hashable, Any], decode: Plan) -> tuple[Plan, float, float]:
    """(plan of a prefill worker, prefill workers or nan, decode workers)."""
    names = ("prefill_tp_size", "prefill_attention_dp_size", "prefill_moe_ep_size")
    given = [n for n in names if _text(row, n)]
    if not given:
        return decode, math.nan, 1.0
    tp, dp = _whole(row, names[0]), _whole(row, names[1])
    ep = _whole(row, names[2]) if names[2] in given else 1
    plan = _plan(tp * dp, tp, dp, ep if (tp * dp) % ep == 0 else tp * dp, "prefill_moe_ep_size")
    if not _text(row, "prefill_num_workers") or not _text(row, "decode_num_workers"):
        return plan, math.nan, 1.0
    workers = _number(row, "prefill_num_workers", 1, 1e5)
    return plan, workers, _number(row, "decode_num_workers", 1, 1e5)


def check(row: dict[Hashable, Any]) -> Row:
    """A row in the model's terms; raises InputError naming the field, the value and what is right."""
    model = load_model(_card("model", "model_path", row.get("model_path")))
    system = catalog.load_system(_card("system", "system", row.get("system")))
    engines = [e for e in list_engines() if e not in ("typical", "kernels")]
    backend = _text(row, "backend").lower()
    if backend not in engines:
        raise InputError(f"backend: {backend!r} is unknown; known: {', '.join(engines)}")
    mode = _text(row, "mode") or "agg"
    if mode not in ("agg", "disagg"):
        raise InputError(f"mode: {mode!r} is unknown; expected agg or disagg")
    labels = [_text(row, k) for k in ("weights_precision", "moe_quant_mode", "gemm_quant_mode")]
    gpus, tp, dp, ep = (_whole(row, k) for k in LAYOUT)
    plan = _plan(gpus, tp, dp, ep, "n_gpus")
    plan.check(model, system)
    prefill, workers, decoders = plan, math.nan, 1.0
    if mode == "disagg":
        prefill, workers, decoders = _prefill_plan(row, plan)
        prefill.check(model, system)
    isl = _number(row, "isl", 1, 1e8)
    osl = _number(row, "osl", 1, 1e8)
    if isl + osl > model.shape.context_tokens:
        raise InputError(
            f"isl + osl: {isl:g} + {osl:g} is more than the {model.shape.context_tokens:,} tokens "
            f"of {model.id}"
        )
    drafted = _whole(row, "draft_tokens", 32, 0) if _text(row, "draft_tokens") else 0
    given = _text(row, "acceptance_length")
    wanted = _number(row, "acceptance_length", 1, drafted + 1) if given else None
    draft, length, _ = speculation(model, "decode", None, drafted, wanted)
    named = _text(row, "protocol")
    fixed = _text(row, "src") in FIXED_LENGTHS
    return Row(
        model=model,
        system=system,
        engine=load_engine(backend),
        protocol=load_protocol(named or ("fixed" if fixed else "inferencex")),
        precision=precision_of(model, system, labels),
        aggregated=mode == "agg",
        plan=plan,
        prefill_plan=prefill,
        prefill_workers=workers,
        decode_workers=decoders,
        isl=isl,
        osl=osl,
        concurrency=_number(row, "concurrency", 1e-3, 1e7),
        draft=draft,
        draft_tokens=drafted,
        acceptance_length=length,
    )


def evaluate(
    table: pd.DataFrame,
    mode: str = "calibrated",
    *,
    engine: str | None = None,
    overrides: Mapping[str, float] | None = None,
) -> pd.DataFrame:
    """Predictions for each row, with its index; `reason` is empty where there is one.

    engine: the card to use in place of each row's own (its name is still checked); overrides: step
    inputs to set, as in `serving.solve`. Columns: reason, model, chip, engine, precision,
    output_tokens (mean), and the columns of `serving.solve`.
    """
    check_columns(table)
    other = load_engine(engine) if engine else None
    done: dict[Hashable, Row] = {}
    reasons: dict[Hashable, str] = {}
    for i, row in zip(table.index, table.to_dict("records"), strict=True):
        try:
            done[i] = check(row)
        except (InputError, DoesNotFit) as e:
            reasons[i] = str(e)
    groups: dict[tuple[str, str, str | None], list[Hashable]] = {}
    for i, r in done.items():
        groups.setdefault((r.model.id, r.precision, r.draft), []).append(i)
    parts = [_solve([done[i] for i in ids], ids, mode, other, overrides) for ids in groups.values()]
    out = pd.concat(parts) if parts else pd.DataFrame()
    out = out.reindex(table.index)
    out.insert(0, "reason", "")
    spare = dict(zip(out.index, out["spare_bytes"].to_numpy(float), strict=True)) if parts else {}
    reasons |= {i: _too_big(r, spare[i]) for i, r in done.items() if spare[i] < 0}
    out["reason"] = [reasons.get(i, "") for i in out.index]
    refused = out["reason"] != ""
    numbers = [
        c for c in out.columns if c not in ("reason", "model", "chip", "engine", "precision")
    ]
    out.loc[refused, numbers] = np.nan
    return out


def _too_big(r: Row, spare: float) -> str:
    room = r.engine.values.memory_fraction.value * capacity(r.system)
    return (
        f"does not fit: {r.model.id} ({r.precision}) with {r.plan.label} and one request a rank "
        f"needs {(room - spare) / 1e9:.1f} GB per GPU of {room / 1e9:.1f} GB "
        f"({r.engine.values.memory_fraction.value:g} of {capacity(r.system) / 1e9:.0f} GB)"
    )


def capacity(system: System) -> float:
    """What the driver reports, where the card has it as the upper end of the data sheet's figure."""
    q = system.memory.capacity
    return q.value if q.high is None else q.high


def _solve(
    rows: list[Row],
    ids: list[Hashable],
    mode: str,
    engine: Engine | None,
    overrides: Mapping[str, float] | None,
) -> pd.DataFrame:
    model, precision = rows[0].model, rows[0].precision
    numbers = {
        s.id: {k: v for k, (v, _) in machine_numbers(s, mode).items()} | {"capacity": capacity(s)}
        for s in {r.system.id: r.system for r in rows}.values()
    }
    machine = stack([numbers[r.system.id] for r in rows])
    v = solve(
        model, precision, machine, [engine or r.engine for r in rows], [r.protocol for r in rows],
        stack([layout(r.plan, model) for r in rows]),
        stack([layout(r.prefill_plan, model) for r in rows]), load(rows), mode,
        rows[0].draft, overrides,
    )  # fmt: skip
    out = pd.DataFrame(v, index=pd.Index(ids))
    out["model"], out["precision"] = model.id, precision
    out["chip"] = [r.system.id for r in rows]
    out["engine"] = [r.engine.id for r in rows]
    out["output_tokens"] = [r.osl * r.protocol.values.lengths.value for r in rows]
    return out


def load(rows: list[Row]) -> dict[str, np.ndarray]:
    """The columns that `serving.solve` takes as rows."""
    return {
        "isl": np.array([r.isl for r in rows]),
        "osl": np.array([r.osl for r in rows]),
        "concurrency": np.array([r.concurrency for r in rows]),
        "prefill_workers": np.array([r.prefill_workers for r in rows]),
        "decode_workers": np.array([r.decode_workers for r in rows]),
        "aggregated": np.array([float(r.aggregated) for r in rows]),
        "draft_tokens": np.array([float(r.draft_tokens) for r in rows]),
        "acceptance_length": np.array([r.acceptance_length for r in rows]),
    }


def stack(dicts: list[dict[str, float]]) -> dict[str, Any]:
    return {k: np.array([d[k] for d in dicts]) for k in dicts[0]}
