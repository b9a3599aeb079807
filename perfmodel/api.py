"""The public face of the model: estimate one point, sweep columns, search plans, explain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from perfmodel import catalog
from perfmodel import explain as _explain
from perfmodel.bands import Band
from perfmodel.bands import band as find_band
from perfmodel.catalog import use_cards
from perfmodel.engine import Engine
from perfmodel.errors import DoesNotFit, InputError
from perfmodel.explain import Explanation, key_equations
from perfmodel.hardware import System
from perfmodel.model import Model
from perfmodel.operators.builder import Op
from perfmodel.plan import Plan
from perfmodel.plan import plans as _plans
from perfmodel.request import (
    BALANCES,
    BOUNDS,
    OVERLAPS,
    PHASES,
    POWER_BASES,
    PRICE_BASES,
    Run,
    as_model,
    as_system,
    check_plan,
    check_power,
    layout,
    list_engines,
    list_models,
    load_engine,
    load_model,
    load_system,
    prepare,
    whole,
)
from perfmodel.roofline import MODES
from perfmodel.step import StepChain
from perfmodel.symbolic import evaluate


def list_systems() -> list[str]:
    return catalog.list_systems()


def plans(model: str | Model, system: str | System, max_gpus: int | None = None) -> list[Plan]:
    """Every plan that makes sense for this model on this system (fitting or not)."""
    return _plans(as_model(model), as_system(system), max_gpus)


def precisions(model: str | Model) -> list[str]:
    """The precisions on the model's card; every call also takes "auto"."""
    return list(as_model(model).precision)


def drafts(model: str | Model) -> list[str]:
    return list(as_model(model).draft)


@dataclass(frozen=True)
class MemoryLine:
    name: str
    bytes: float


@dataclass(frozen=True)
class OperatorLine:
    """One operator on one GPU, all its layers together."""

    name: str
    layer_kind: str
    family: str
    count: float
    precision: str
    flops: float
    weight_bytes: float
    kv_bytes: float
    activation_bytes: float
    message_bytes: float
    compute_s: float
    memory_s: float
    link_s: float
    floor_s: float
    time_s: float
    bound: str
    efficiency: float | None
    efficiency_source: str


@dataclass(frozen=True)
class Estimate:
    """One operating point. Throughput counts output tokens in decode, uncached input in prefill."""

    model_id: str
    system_id: str
    plan: Plan
    phase: str
    mode: str
    engine: str
    overlap: str
    balance: str
    redundant_experts: int
    precision: str
    batch: int
    context_tokens: int
    new_tokens: int
    draft: str | None
    draft_tokens: int
    acceptance_length: float
    gpus: int
    step_time_s: float
    tpot_s: float | None
    interactivity_tok_s_user: float | None
    throughput_tok_s: float
    throughput_tok_s_gpu: float
    throughput_tok_s_mw: float | None
    power_basis: str
    power_w: float | None
    power_set: str | None
    price_basis: str
    price_set: str | None
    usd_per_mtok: float | None
    bound: str
    band: Band | None
    memory: list[MemoryLine]
    memory_bytes: float
    capacity_bytes: float
    operators: list[OperatorLine]
    outside_operators_s: float
    notes: list[str]
    values: dict[str, float] = field(repr=False)
    sources: dict[str, str] = field(repr=False)
    step: StepChain = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, with stable keys (docs/cli.md lists them)."""
        hidden = ("values", "sources", "step")
        d = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in hidden}
        for k in ("memory", "operators"):
            d[k] = [asdict(x) for x in d[k]]
        d["band"] = asdict(self.band) if self.band else None
        d["plan"] = {**asdict(self.plan), "label": self.plan.label, "gpus": self.plan.gpus}
        d["plan"]["ep"], d["plan"]["etp"] = self.plan.experts
        return d


def estimate(
    model: str | Model,
    system: str | System,
    plan: Plan,
    *,
    batch: int,
    context_tokens: int,
    phase: str = "decode",
    new_tokens: int = 1,
    precision: str = "auto",
    mode: str = "calibrated",
    engine: str | Engine = "typical",
    overlap: str = "none",
    balance: str = "balanced",
    redundant_experts: int = 0,
    draft: str | None = None,
    draft_tokens: int = 0,
    acceptance_length: float | None = None,
    power_basis: str = "all_in",
    price_basis: str = "owned",
) -> Estimate:
    """One operating point with its breakdown, memory and bases.

    Power and price are of the named sets (keys of POWER_BASES, PRICE_BASES); `power_set` and
    `price_set` say set, date and source. What needs a number that the card lacks is None.

    decode: `batch` sequences in the instance, each with `context_tokens` in the cache.
    prefill: `batch` prompts, each with `new_tokens` computed after `context_tokens` cached ones.
    Raises InputError for bad input and DoesNotFit (with the arithmetic) when memory is short.
    """
    run = prepare(
        model, system, phase=phase, new_tokens=new_tokens, precision=precision, mode=mode,
        engine=engine, overlap=overlap, balance=balance,
        redundant_experts=redundant_experts, draft=draft, draft_tokens=draft_tokens,
        acceptance_length=acceptance_length,
        power_basis=power_basis, price_basis=price_basis,
    )  # fmt: skip
    check_plan(plan, run)
    batch = whole("batch", batch, 1, 10**7)
    limit = run.model.shape.context_tokens
    context_tokens = whole("context_tokens", context_tokens, 1 if phase == "decode" else 0, limit)
    if phase == "prefill" and context_tokens + new_tokens > limit:
        raise InputError(
            f"context_tokens + new_tokens = {context_tokens + new_tokens:,} is more than the "
            f"{limit:,} of {run.model.id}"
        )
    inputs = {
        **run.inputs,
        **layout(plan, run.model),
        "B": float(batch),
        "T": float(context_tokens),
    }
    v = {k: float(x) for k, x in run.step.chain.compile()(**inputs).items()}
    _refuse(run, plan, batch, context_tokens, v)
    lines = [_line(run, op, f"o{i}", inputs, v) for i, op in enumerate(run.step.ops)]
    lines = [x for x in lines if x.time_s > 0 or x.flops > 0]
    return Estimate(
        model_id=run.model.id, system_id=run.system.id, plan=plan, phase=phase, mode=mode,
        engine=run.engine.id, overlap=overlap, balance=balance,
        redundant_experts=redundant_experts, precision=run.precision, batch=batch,
        context_tokens=context_tokens, new_tokens=new_tokens,
        draft=run.draft, draft_tokens=draft_tokens if run.draft else 0,
        acceptance_length=run.acceptance, gpus=plan.gpus,
        step_time_s=v["step_time"], tpot_s=v.get("tpot"),
        interactivity_tok_s_user=v.get("interactivity"), throughput_tok_s=v["throughput"],
        throughput_tok_s_gpu=v["throughput_gpu"],
        throughput_tok_s_mw=v["throughput_mw"] if run.power_set else None,
        power_basis=power_basis, power_set=run.power_set,
        power_w=inputs["P_gpu"] * plan.gpus if run.power_set else None,
        price_basis=price_basis, price_set=run.price_set,
        usd_per_mtok=v["usd_per_mtok"] if run.price_set else None,
        bound=_bound(v), band=_band(run, phase, mode, batch, context_tokens, new_tokens, plan),
        memory=_memory_lines(run, v), memory_bytes=v["memory"],
        capacity_bytes=run.capacity, operators=lines,
        outside_operators_s=v["step_time"] - v["t_through"], notes=list(run.notes),
        values={**inputs, **v}, sources=run.sources, step=run.step,
    )  # fmt: skip


def _band(
    run: Run, phase: str, mode: str, batch: int, context: int, new_tokens: int, plan: Plan
) -> Band | None:
    """How far measured rows of this kind lie from predictions; none at the speed of light.

    A decode step takes the TPOT of aggregated serving, a prefill the TTFT of lightly loaded one.
    """
    if mode == "speed-of-light":
        return None
    decode = phase == "decode"
    return find_band(
        "tpot" if decode else "ttft",
        mode="agg",
        concurrency=batch if decode else 1,
        model=run.model.id,
        chip=run.system.id,
        context_tokens=context + new_tokens,
        gpus=plan.gpus,
    )


def _bound(v: dict[str, float]) -> str:
    return max(BOUNDS, key=lambda k: v[f"sum_{k}"])


def _memory_lines(run: Run, v: dict[str, float]) -> list[MemoryLine]:
    defs = run.step.chain.defs
    return [
        MemoryLine(defs[n][0].doc, v[n]) for n in defs if n.startswith("mem_") and v.get(n, 0) > 0
    ]


def _refuse(run: Run, plan: Plan, batch: int, context: int, v: dict[str, float]) -> None:
    if v["memory"] <= run.capacity:
        return
    rows = "\n".join(f"  {x.name:<40}{x.bytes / 1e9:10.2f} GB" for x in _memory_lines(run, v))
    hint = ""
    if "tpot" not in v and v["mem_activations"] > 0.1 * run.capacity:
        hint = (
            "\n  activations grow with new_tokens: prefill in chunks, each after a longer context"
        )
    raise DoesNotFit(
        f"{run.model.id} does not fit on {run.system.id} with {plan.label}, batch {batch}, "
        f"context {context:,}: {v['memory'] / 1e9:.1f} GB per GPU needed, "
        f"{run.capacity / 1e9:.1f} GB there\n{rows}\n"
        f"  {'sum':<40}{v['memory'] / 1e9:10.2f} GB > {run.capacity / 1e9:.2f} GB{hint}"
    )


def _costs(op: Op, known: dict[str, float]) -> dict[str, float]:
    """What one operator computes and moves in one layer, by name of the family's definition."""
    bound = {k: evaluate(x, known) for k, x in op.bindings.items()}
    return {k: float(x) for k, x in op.formulas.compile()(**bound).items()}


def _line(run: Run, op: Op, key: str, inputs: dict[str, Any], v: dict[str, float]) -> OperatorLine:
    known = {**inputs, **v}
    n = evaluate(op.count, known)
    costs = _costs(op, known)

    def cost(what: str) -> float:
        return n * costs.get(what, 0.0)

    part = {k: n * v.get(f"{key}_{k}", 0.0) for k in BOUNDS}
    bound = max(BOUNDS, key=lambda k: part[k])
    name = {
        "compute": f"e_{op.compute_class}_{op.rate}",
        "memory": f"e_hbm_{op.memory_class}",
        "link": f"e_link_{'all_reduce' if op.link == 'send' else op.link}",
    }.get(bound)
    if op.formulas.name == "experts" and inputs["ov_fused"]:
        name = {"compute": "e_moe_fused", "memory": "e_hbm_moe_fused"}.get(bound)
    floor = f"tau_{op.link or 'kernel'}"
    return OperatorLine(
        name=op.name, layer_kind=op.layer_kind, family=op.formulas.name, count=n,
        precision=op.rate, flops=cost("flops"), weight_bytes=cost("weight_bytes"),
        kv_bytes=cost("kv_bytes"), activation_bytes=cost("act_bytes"),
        message_bytes=cost("message_bytes"), compute_s=part["compute"], memory_s=part["memory"],
        link_s=part["link"], floor_s=part["floor"], time_s=n * v[f"{key}_t"], bound=bound,
        efficiency=inputs[name] if name else None,
        efficiency_source=run.sources[name or floor],
    )  # fmt: skip


SWEEP = (
    "step_time", "tpot", "interactivity", "throughput_gpu", "throughput_mw", "usd_per_mtok",
    "memory", "sum_compute", "sum_memory", "sum_link", "sum_floor",
)  # fmt: skip
RENAME = {
    "step_time": "step_time_s",
    "tpot": "tpot_s",
    "interactivity": "interactivity_tok_s_user",
    "throughput_gpu": "throughput_tok_s_gpu",
    "throughput_mw": "throughput_tok_s_mw",
    "memory": "memory_bytes",
}
CHUNK = 1 << 15


def _evaluate(f: Callable[..., dict[str, Any]], inputs: dict[str, Any], n: int) -> dict[str, Any]:
    """Run a compiled chain over columns of length n in cache-sized chunks."""
    if n <= CHUNK:
        return {k: np.broadcast_to(np.asarray(x, float), n) for k, x in f(**inputs).items()}
    out: dict[str, Any] = {}
    for i in range(0, n, CHUNK):
        part = {k: x[i : i + CHUNK] if np.ndim(x) else x for k, x in inputs.items()}
        for k, x in f(**part).items():
            out.setdefault(k, np.empty(n))[i : i + CHUNK] = x
    return out


def sweep(
    model: str | Model,
    system: str | System,
    plan: Plan,
    *,
    batch: Any,
    context_tokens: Any,
    phase: str = "decode",
    new_tokens: int = 1,
    precision: str = "auto",
    mode: str = "calibrated",
    engine: str | Engine = "typical",
    overlap: str = "none",
    balance: str = "balanced",
    redundant_experts: int = 0,
    draft: str | None = None,
    draft_tokens: int = 0,
    acceptance_length: float | None = None,
    power_basis: str = "all_in",
    price_basis: str = "owned",
) -> dict[str, np.ndarray]:
    """Columns of operating points; `batch` and `context_tokens` broadcast, then flatten.

    Nothing is refused for memory: column `fits` says so. Raises InputError for bad input.
    """
    run = prepare(
        model, system, phase=phase, new_tokens=new_tokens, precision=precision, mode=mode,
        engine=engine, overlap=overlap, balance=balance,
        redundant_experts=redundant_experts, draft=draft, draft_tokens=draft_tokens,
        acceptance_length=acceptance_length,
        power_basis=power_basis, price_basis=price_basis,
    )  # fmt: skip
    check_plan(plan, run)
    return _columns(run, plan, *_points(run, batch, context_tokens))


def _points(run: Run, batch: Any, context: Any) -> tuple[np.ndarray, np.ndarray]:
    columns = []
    for name, x in (("batch", batch), ("context_tokens", context)):
        try:
            columns.append(np.asarray(x, float))
        except (TypeError, ValueError):
            raise InputError(f"{name}: {x!r:.80} is not a column of whole numbers") from None
    try:
        b, t = (x.ravel() for x in np.broadcast_arrays(*columns))
    except ValueError:
        raise InputError(
            f"batch and context_tokens: shapes {columns[0].shape} and {columns[1].shape} do not "
            "broadcast; expected equal lengths or one number"
        ) from None
    # as in `estimate`: decode attends at least one token, prefill's new ones must still fit
    decode = "tpot" in run.step.chain.defs
    limit = run.model.shape.context_tokens - (0 if decode else run.inputs["q"])
    for name, x, low, high in (("batch", b, 1, 1e7), ("context_tokens", t, int(decode), limit)):
        bad = ~((x >= low) & (x <= high) & (x == np.floor(x)))
        if bad.any():
            raise InputError(
                f"{name}: {x[bad][0]:g} is not a whole number from {low:,} to {high:,.0f}"
            )
    return b, t


def _columns(run: Run, plan: Plan, b: np.ndarray, t: np.ndarray) -> dict[str, np.ndarray]:
    f = run.step.chain.compile_columns(_outputs(run), ("B", "T"))
    v = _evaluate(f, {**run.inputs, **layout(plan, run.model), "B": b, "T": t}, b.size)
    return _result(run, v, b, t)


def _outputs(run: Run) -> tuple[str, ...]:
    return tuple(n for n in SWEEP if n in run.step.chain.defs)


def _result(
    run: Run, v: dict[str, np.ndarray], b: np.ndarray, t: np.ndarray
) -> dict[str, np.ndarray]:
    """The columns that `sweep` and `best` return, from the chain's outputs `v`."""
    sums = np.stack([v[f"sum_{k}"] for k in BOUNDS])
    out = {"batch": b, "context_tokens": t}
    out |= {RENAME.get(k, k): x for k, x in v.items() if not k.startswith("sum_")}
    out["fits"] = v["memory"] <= run.capacity
    out["bound"] = np.asarray(BOUNDS)[sums.argmax(axis=0)]
    return out


def best(
    model: str | Model,
    system: str | System,
    *,
    batch: Any,
    context_tokens: int,
    max_gpus: int | None = None,
    precision: str = "auto",
    mode: str = "calibrated",
    engine: str | Engine = "typical",
    overlap: str = "none",
    balance: str = "balanced",
    redundant_experts: int = 0,
    draft: str | None = None,
    draft_tokens: int = 0,
    acceptance_length: float | None = None,
    power_basis: str = "all_in",
    price_basis: str = "owned",
) -> dict[str, np.ndarray]:
    """Decode points on the Pareto front of interactivity against throughput per MW.

    Searches every plan of `plans` with each batch in `batch`, the list of
    instance batches tried. Columns as `sweep`, plus `plan` (label), `gpus` and
    those of `curve_band`; sorted by interactivity. Raises DoesNotFit when no plan fits at any batch,
    InputError also when the card has no power of the basis.
    """
    run = prepare(
        model, system, phase="decode", new_tokens=1, precision=precision, mode=mode,
        engine=engine, overlap=overlap, balance=balance,
        redundant_experts=redundant_experts, draft=draft, draft_tokens=draft_tokens,
        acceptance_length=acceptance_length,
        power_basis=power_basis, price_basis=price_basis,
    )  # fmt: skip
    check_power(run.system, power_basis)
    candidates = _plans(run.model, run.system, max_gpus, run.draft)
    b, t = _points(run, batch, context_tokens)
    layouts = [layout(p, run.model) for p in candidates]
    index = np.repeat(np.arange(len(candidates)), b.size)
    inputs = {**run.inputs, "B": np.tile(b, len(candidates)), "T": np.tile(t, len(candidates))}
    for k in layouts[0]:
        inputs[k] = np.asarray([x[k] for x in layouts])[index]
    v = _evaluate(run.step.chain.compile(*_outputs(run)), inputs, index.size)
    fits = v["memory"] <= run.capacity
    if not fits.any():
        i = int(np.argmin(v["memory"]))
        p = candidates[index[i]]
        raise DoesNotFit(
            f"{run.model.id} does not fit on {run.system.id} with any of {len(candidates)} plans: "
            f"the leanest, {p.label} at batch {inputs['B'][i]:.0f}, needs "
            f"{v['memory'][i] / 1e9:.1f} GB per GPU of {run.capacity / 1e9:.1f} GB"
        )
    x, y = v["interactivity"], v["throughput_mw"]
    order = np.flatnonzero(fits)
    order = order[np.lexsort((-y[order], -x[order]))]  # from the fastest user down
    best_so_far = np.maximum.accumulate(y[order])
    keep = np.concatenate(([True], y[order][1:] > best_so_far[:-1]))
    rows = order[keep][::-1]
    out = _result(run, {k: a[rows] for k, a in v.items()}, inputs["B"][rows], inputs["T"][rows])
    out["plan"] = np.asarray([p.label for p in candidates])[index[rows]]
    out["gpus"] = np.asarray([p.gpus for p in candidates])[index[rows]]
    return out | curve_band(run.model, run.system, out, mode)


def curve_band(
    model: str | Model, system: str | System, columns: Mapping[str, Any], mode: str = "calibrated"
) -> dict[str, np.ndarray]:
    """Where the middle half of measured rows of this kind would put a curve.

    columns: those of `sweep` or `best` for decode, with `gpus` or not. A TPOT that is r times as
    long divides interactivity and throughput by r, so each edge is the curve moved along both axes,
    read at the curve's own interactivities: `throughput_tok_s_mw_low` and `_high` (widened where no
    rows are, see `bands`). Beyond the fast end of the lower edge there is nothing: 1 % of the curve
    stands for that. nan at the speed of light.
    """
    m, s = as_model(model), as_system(system)
    x = np.asarray(columns["interactivity_tok_s_user"], float)
    y = np.asarray(columns["throughput_tok_s_mw"], float)
    out = {f"throughput_tok_s_mw_{k}": np.full(x.size, np.nan) for k in ("low", "high")}
    if mode == "speed-of-light" or not x.size:
        return out
    gpus = np.broadcast_to(np.asarray(columns.get("gpus", 1)), x.shape)
    found = [
        find_band(
            "tpot", mode="agg", concurrency=float(b), model=m.id, chip=s.id,
            context_tokens=float(t), gpus=int(g),
        )
        for b, t, g in zip(columns["batch"], columns["context_tokens"], gpus, strict=True)
    ]  # fmt: skip
    for name, ratio in (
        ("low", np.array([b.high_half for b in found])),
        ("high", np.array([b.low_half for b in found])),
    ):
        order = np.argsort(x / ratio)
        edge = np.interp(x, (x / ratio)[order], (y / ratio)[order])
        beyond = x > (x / ratio).max()
        out[f"throughput_tok_s_mw_{name}"] = np.where(beyond, 0.01 * y, edge)
    out["throughput_tok_s_mw_low"] = np.minimum(out["throughput_tok_s_mw_low"], y)
    out["throughput_tok_s_mw_high"] = np.maximum(out["throughput_tok_s_mw_high"], y)
    return out


def explain_names(e: Estimate) -> list[str]:
    """Every name that `explain` takes for this estimate."""
    return _explain.names(e, e.step)


def explain(e: Estimate, name: str) -> Explanation:
    """Formula, numbers and value of a metric, an operator (KIND.NAME) or a part of one.

    Raises InputError when the name is unknown.
    """
    return _explain.explain(e, e.step, name)


__all__ = [
    "BALANCES", "BOUNDS", "Estimate", "Explanation", "MODES", "MemoryLine", "OVERLAPS", "OperatorLine",
    "PHASES",
    "POWER_BASES", "PRICE_BASES", "Plan", "best", "check_power", "curve_band", "drafts", "estimate", "explain",
    "explain_names", "key_equations", "list_engines", "list_models", "list_systems",
    "load_engine", "load_model", "load_system", "plans", "precisions", "sweep", "use_cards",
]  # fmt: skip
