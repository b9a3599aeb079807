"""The public face of the model: estimate one point, sweep columns, search plans, explain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any

import numpy as np

from perfmodel import catalog
from perfmodel import explain as _explain
from perfmodel.errors import DoesNotFit, InputError
from perfmodel.explain import Explanation, key_equations
from perfmodel.hardware import System
from perfmodel.model import Model
from perfmodel.operators.builder import Op
from perfmodel.paths import data_dir
from perfmodel.plan import Plan, stage_layers
from perfmodel.plan import plans as _plans
from perfmodel.precision import FORMATS
from perfmodel.roofline import MODES, machine_numbers
from perfmodel.step import StepChain, step_chain
from perfmodel.symbolic import evaluate

POWER_BASES = {
    "chip": "chip TDP",
    "rack_it": "rack IT power",
    "all_in": "all-in utility power (SemiAnalysis registry, September 2026)",
    "all_in_old": "all-in utility power (SemiAnalysis registry, April 2026)",
}
PRICE_BASES = {
    "owned": "owned by a hyperscaler, 4-year life",
    "neocloud": "owned by a neocloud",
    "rental": "3-year rental",
}
PHASES = ("decode", "prefill")
BOUNDS = ("compute", "memory", "link", "floor")


def list_models() -> list[str]:
    return sorted(p.stem for p in data_dir("models").glob("*.toml"))


def list_systems() -> list[str]:
    return catalog.list_systems()


def load_model(model: str) -> Model:
    """The model card with this id, or of this path. Raises InputError, CardError."""
    return catalog.load_card(Model, model, data_dir("models"), "model")


def load_system(system: str) -> System:
    """The machine card with this id, or of this path. Raises InputError, CardError."""
    return catalog.load_system(system)


def plans(model: str | Model, system: str | System, max_gpus: int | None = None) -> list[Plan]:
    """Every plan that makes sense for this model on this system (fitting or not)."""
    return _plans(_model(model), _system(system), max_gpus)


def precisions(model: str | Model) -> list[str]:
    """The precisions on the model's card; every call also takes "auto"."""
    return list(_model(model).precision)


def drafts(model: str | Model) -> list[str]:
    return list(_model(model).draft)


def _model(m: str | Model) -> Model:
    return m if isinstance(m, Model) else load_model(m)


def _system(s: str | System) -> System:
    return s if isinstance(s, System) else load_system(s)


@lru_cache(maxsize=1)
def _assumptions() -> dict[str, catalog.Quantity]:
    return catalog.read_quantities(data_dir("models").parent / "assumptions.toml", "values")


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
    throughput_tok_s_mw: float
    power_basis: str
    power_w: float
    price_basis: str
    usd_per_mtok: float | None
    bound: str
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
        d["plan"] = {**asdict(self.plan), "label": self.plan.label, "gpus": self.plan.gpus}
        d["plan"]["ep"], d["plan"]["etp"] = self.plan.experts
        return d


@dataclass(frozen=True)
class _Run:
    """A checked request: the chain and every scalar input with its source."""

    model: Model
    system: System
    precision: str
    step: StepChain
    inputs: dict[str, Any]
    sources: dict[str, str]
    draft: str | None
    acceptance: float
    notes: tuple[str, ...]
    capacity: float
    has_price: bool


def _choice(name: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise InputError(f"{name}: {value!r} is not one of {', '.join(allowed) or 'none'}")


def whole(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int in low .. high; raises InputError naming the field."""
    ok = isinstance(value, int | np.integer) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not ok or not low <= value <= high:
        raise InputError(f"{name}: {value!r} is not a whole number from {low:,} to {high:,}")
    return int(value)


def _prepare(
    model: str | Model,
    system: str | System,
    *,
    phase: str,
    new_tokens: int,
    precision: str,
    mode: str,
    draft: str | None,
    draft_tokens: int,
    acceptance_length: float | None,
    power_basis: str,
    price_basis: str,
) -> _Run:
    m, s = _model(model), _system(system)
    _choice("phase", phase, PHASES)
    _choice("mode", mode, tuple(MODES))
    _choice("precision", precision, ("auto", *m.precision))
    _choice("power_basis", power_basis, tuple(POWER_BASES))
    _choice("price_basis", price_basis, tuple(PRICE_BASES))
    draft_tokens = whole("draft_tokens", draft_tokens, 0, 32)
    new_tokens = whole("new_tokens", new_tokens, 1, m.shape.context_tokens)
    if phase == "decode" and new_tokens != 1:
        raise InputError(
            f"new_tokens: {new_tokens} in decode; expected 1 (draft_tokens sets speculation)"
        )
    draft, acceptance, notes = _speculation(m, phase, draft, draft_tokens, acceptance_length)
    precision = _precision(m, s, precision, notes)
    machine = machine_numbers(s, mode)
    inputs: dict[str, Any] = {k: v for k, (v, _) in machine.items()}
    sources = {k: src for k, (_, src) in machine.items()}
    assume = _assumptions()
    for name, key in (
        ("phi", f"imbalance_{phase}"),
        ("workspace", "workspace"),
        ("n_live", "live_vectors"),
    ):
        inputs[name], sources[name] = assume[key].value, assume[key].source
    if mode == "speed-of-light":
        inputs["phi"] = 1.0
    inputs["A"] = acceptance
    inputs["q"] = float(new_tokens if phase == "prefill" else 1 + draft_tokens)
    power = getattr(s.power, power_basis, None)
    if power is None:
        raise InputError(f"power_basis: {s.id} has no {power_basis!r} power on its card")
    inputs["P_gpu"], sources["P_gpu"] = power.value, f"{power.source} [{power.kind}]"
    price = getattr(s.price, price_basis, None)
    inputs["c_gpu"] = price.value / 3600 if price is not None else float("nan")
    sources["c_gpu"] = f"{price.source} [{price.kind}]" if price is not None else "not on the card"
    if mode != "speed-of-light":
        if any(
            q.kind == "estimate" and "borrow" in q.source.lower() for q in s.quantities().values()
        ):
            notes.append(
                f"extrapolated: {s.id} has no kernel measurements; it borrows efficiencies"
            )
        notes.append(
            "calibrated constants: medians of published kernels; kernel floor and tile rows come "
            "from serving rows of other models"
        )
    if s.profile != "as sold":
        notes.append(f"machine profile: {s.profile}")
    chain = step_chain_for(m, precision, phase, draft)
    return _Run(
        m, s, precision, chain, inputs, sources, draft, acceptance, tuple(notes),
        s.memory.capacity.value, price is not None,
    )  # fmt: skip


def _check_plan(plan: Any, run: _Run) -> None:
    if not isinstance(plan, Plan):
        raise InputError(f"plan: {plan!r} is not a Plan; write Plan(tp=8) or Plan.parse('tp=8')")
    plan.check(run.model, run.system, run.draft)


def _precision(m: Model, s: System, precision: str, notes: list[str]) -> str:
    """The named precision; `auto` is native, or what the card names for chips without FP4."""
    other = m.precision["native"].without_fp4
    if precision == "auto" and s.chip.peak_fp4 is None and other is not None:
        notes.append(f"precision {other}: {s.id} has no FP4 (automatic choice)")
        return other
    precision = "native" if precision == "auto" else precision
    if s.chip.peak_fp4 is None:
        p = m.precision[precision]
        instead = f"; precision {other!r} is what it would run" if other else ""
        if p.cache.index_rate == "fp4":
            notes.append(
                f"{s.id} has no FP4: precision {precision!r} keeps FP4 index keys, which its "
                f"kernels lack{instead}"
            )
        if any(FORMATS[f].rate == "fp4" for f in p.activations.values()):
            notes.append(
                f"{s.id} has no FP4: the FP4 products of precision {precision!r} run at the next "
                "wider rate"
            )
    return precision


def _speculation(
    m: Model, phase: str, draft: str | None, draft_tokens: int, acceptance_length: float | None
) -> tuple[str | None, float, list[str]]:
    """(draft name, acceptance length, notes). `draft` None takes the checkpoint's own first."""
    if draft_tokens and phase == "prefill":
        raise InputError(f"draft_tokens: {draft_tokens} in prefill; expected 0 (drafts decode)")
    if draft is not None and not m.draft:
        raise InputError(f"draft: {draft!r}, but {m.id} has no draft on its card")
    if draft is not None:
        _choice("draft", draft, tuple(m.draft))
    if draft_tokens == 0:
        if draft is not None:
            raise InputError(f"draft: {draft!r} without draft_tokens; expected draft_tokens > 0")
        if acceptance_length not in (None, 1, 1.0):
            raise InputError(
                f"acceptance_length: {acceptance_length} without draft_tokens; expected none or 1"
            )
        return None, 1.0, []
    if not m.draft:
        raise InputError(f"draft_tokens: {m.id} has no draft head on its card; expected 0")
    name = draft or next((n for n, d in m.draft.items() if d.in_checkpoint), next(iter(m.draft)))
    d = m.draft[name]
    if draft_tokens > d.max_tokens:
        raise InputError(f"draft_tokens: {draft_tokens} is more than the {d.max_tokens} of {name}")
    if acceptance_length is None:
        length = d.acceptance.get(str(draft_tokens))
        if length is None:
            raise InputError(
                f"acceptance_length: the card has none for {draft_tokens} draft tokens of {name}; "
                "give one"
            )
        return name, length, [f"acceptance length {length} for draft {name}: {d.source}"]
    number = isinstance(acceptance_length, int | float | np.number)
    if isinstance(acceptance_length, bool) or not number:
        raise InputError(f"acceptance_length: {acceptance_length!r} is not a number")
    if not 1 <= acceptance_length <= draft_tokens + 1:
        raise InputError(
            f"acceptance_length: {acceptance_length} must lie in 1 .. draft_tokens + 1 = "
            f"{draft_tokens + 1} (it counts the bonus token)"
        )
    return name, float(acceptance_length), []


_chains: dict[tuple[int, str, str, str | None], tuple[Model, StepChain]] = {}


def step_chain_for(m: Model, precision: str, phase: str, draft: str | None) -> StepChain:
    """The step chain, cached per model object (which holds tables and has no hash).

    The entry keeps its model alive, so that the id cannot come back as another model's.
    """
    key = (id(m), precision, phase, draft)
    if key not in _chains:
        if len(_chains) > 64:
            _chains.clear()
        _chains[key] = (m, step_chain(m, precision, phase, draft))
    return _chains[key][1]


def _layout(plan: Plan, model: Model) -> dict[str, float]:
    ep, etp = plan.experts
    sizes = dict(tp=plan.tp, dp=plan.dp, pp=plan.pp, ep=ep, etp=etp, dcp=plan.dcp)
    sizes |= {f"L_{k}": n for k, n in stage_layers(model, plan.pp).items()}
    return {k: float(v) for k, v in sizes.items()}


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
    draft: str | None = None,
    draft_tokens: int = 0,
    acceptance_length: float | None = None,
    power_basis: str = "all_in",
    price_basis: str = "owned",
) -> Estimate:
    """One operating point with its breakdown, memory and bases.

    decode: `batch` sequences in the instance, each with `context_tokens` in the cache.
    prefill: `batch` prompts, each with `new_tokens` computed after `context_tokens` cached ones.
    Raises InputError for bad input and DoesNotFit (with the arithmetic) when memory is short.
    """
    run = _prepare(
        model, system, phase=phase, new_tokens=new_tokens, precision=precision, mode=mode,
        draft=draft, draft_tokens=draft_tokens, acceptance_length=acceptance_length,
        power_basis=power_basis, price_basis=price_basis,
    )  # fmt: skip
    _check_plan(plan, run)
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
        **_layout(plan, run.model),
        "B": float(batch),
        "T": float(context_tokens),
    }
    v = {k: float(x) for k, x in run.step.chain.compile()(**inputs).items()}
    _refuse(run, plan, batch, context_tokens, v)
    lines = [_line(run, op, f"o{i}", inputs, v) for i, op in enumerate(run.step.ops)]
    lines = [x for x in lines if x.time_s > 0 or x.flops > 0]
    return Estimate(
        model_id=run.model.id, system_id=run.system.id, plan=plan, phase=phase, mode=mode,
        precision=run.precision, batch=batch, context_tokens=context_tokens, new_tokens=new_tokens,
        draft=run.draft, draft_tokens=draft_tokens if run.draft else 0,
        acceptance_length=run.acceptance, gpus=plan.gpus,
        step_time_s=v["step_time"], tpot_s=v.get("tpot"),
        interactivity_tok_s_user=v.get("interactivity"), throughput_tok_s=v["throughput"],
        throughput_tok_s_gpu=v["throughput_gpu"], throughput_tok_s_mw=v["throughput_mw"],
        power_basis=power_basis, power_w=inputs["P_gpu"] * plan.gpus, price_basis=price_basis,
        usd_per_mtok=v["usd_per_mtok"] if run.has_price else None,
        bound=_bound(v), memory=_memory_lines(run, v), memory_bytes=v["memory"],
        capacity_bytes=run.capacity, operators=lines,
        outside_operators_s=v["step_time"] - v["t_through"], notes=list(run.notes),
        values={**inputs, **v}, sources=run.sources, step=run.step,
    )  # fmt: skip


def _bound(v: dict[str, float]) -> str:
    return max(BOUNDS, key=lambda k: v[f"sum_{k}"])


def _memory_lines(run: _Run, v: dict[str, float]) -> list[MemoryLine]:
    defs = run.step.chain.defs
    return [
        MemoryLine(defs[n][0].doc, v[n]) for n in defs if n.startswith("mem_") and v.get(n, 0) > 0
    ]


def _refuse(run: _Run, plan: Plan, batch: int, context: int, v: dict[str, float]) -> None:
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


def _line(run: _Run, op: Op, key: str, inputs: dict[str, Any], v: dict[str, float]) -> OperatorLine:
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
    draft: str | None = None,
    draft_tokens: int = 0,
    acceptance_length: float | None = None,
    power_basis: str = "all_in",
    price_basis: str = "owned",
) -> dict[str, np.ndarray]:
    """Columns of operating points; `batch` and `context_tokens` broadcast, then flatten.

    Nothing is refused for memory: column `fits` says so. Raises InputError for bad input.
    """
    run = _prepare(
        model, system, phase=phase, new_tokens=new_tokens, precision=precision, mode=mode,
        draft=draft, draft_tokens=draft_tokens, acceptance_length=acceptance_length,
        power_basis=power_basis, price_basis=price_basis,
    )  # fmt: skip
    _check_plan(plan, run)
    return _columns(run, plan, *_points(run, batch, context_tokens))


def _points(run: _Run, batch: Any, context: Any) -> tuple[np.ndarray, np.ndarray]:
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


def _columns(run: _Run, plan: Plan, b: np.ndarray, t: np.ndarray) -> dict[str, np.ndarray]:
    f = run.step.chain.compile_columns(_outputs(run), ("B", "T"))
    v = _evaluate(f, {**run.inputs, **_layout(plan, run.model), "B": b, "T": t}, b.size)
    return _result(run, v, b, t)


def _outputs(run: _Run) -> tuple[str, ...]:
    return tuple(n for n in SWEEP if n in run.step.chain.defs)


def _result(
    run: _Run, v: dict[str, np.ndarray], b: np.ndarray, t: np.ndarray
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
    draft: str | None = None,
    draft_tokens: int = 0,
    acceptance_length: float | None = None,
    power_basis: str = "all_in",
    price_basis: str = "owned",
) -> dict[str, np.ndarray]:
    """Decode points on the Pareto front of interactivity against throughput per MW.

    Searches every plan of `plans` with each batch in `batch`, the list of
    instance batches tried. Columns as `sweep`, plus `plan` (label) and `gpus`; sorted by
    interactivity. Raises DoesNotFit when no plan fits at any batch.
    """
    run = _prepare(
        model, system, phase="decode", new_tokens=1, precision=precision, mode=mode,
        draft=draft, draft_tokens=draft_tokens, acceptance_length=acceptance_length,
        power_basis=power_basis, price_basis=price_basis,
    )  # fmt: skip
    candidates = _plans(run.model, run.system, max_gpus, run.draft)
    b, t = _points(run, batch, context_tokens)
    layouts = [_layout(p, run.model) for p in candidates]
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
    "BOUNDS", "Estimate", "Explanation", "MODES", "MemoryLine", "OperatorLine", "PHASES",
    "POWER_BASES", "PRICE_BASES", "Plan", "best", "drafts", "estimate", "explain",
    "explain_names", "key_equations", "list_models", "list_systems", "load_model",
    "load_system", "plans", "precisions", "sweep",
]  # fmt: skip
