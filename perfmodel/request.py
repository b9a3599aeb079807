"""A checked request: from what the caller names to the chain and every input with its source."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from perfmodel import catalog
from perfmodel.engine import Engine
from perfmodel.errors import InputError
from perfmodel.hardware import System
from perfmodel.model import Model
from perfmodel.paths import data_dir
from perfmodel.plan import Plan, stage_layers
from perfmodel.precision import FORMATS
from perfmodel.roofline import MODES, machine_numbers
from perfmodel.step import StepChain, step_chain

# The dated sets are those of the SemiAnalysis registry; a card's source says where it differs.
POWER_BASES = {
    "chip": "chip TDP",
    "rack_it": "rack IT power",
    "all_in": "all-in utility power (set of September 2026)",
    "all_in_old": "all-in utility power (set of April 2026)",
}
PRICE_BASES = {
    "owned": "owned by a hyperscaler, 4-year life (set of September 2026)",
    "neocloud": "owned by a neocloud (set of September 2026)",
    "rental": "3-year rental (set of September 2026)",
    "owned_old": "owned by a hyperscaler, 4-year life (set of April 2026)",
    "neocloud_old": "owned by a neocloud (set of April 2026)",
    "rental_old": "3-year rental (set of April 2026)",
}
OVERLAPS = {
    "none": "dispatch and combine are waited for",
    "two-batch": "two half batches take turns: one exchanges while the other computes",
    "fused": "dispatch and combine inside the expert kernel (MegaMoE)",
}
BALANCES = {
    "balanced": "experts are moved or replicated so that ranks have about equal loads",
    "unbalanced": "experts stay where they are: the busiest rank's load grows with the ranks",
}
PHASES = ("decode", "prefill")
BOUNDS = ("compute", "memory", "link", "floor")


def list_models() -> list[str]:
    return catalog.list_cards("model")


def list_engines() -> list[str]:
    return catalog.list_cards("engine")


def load_model(model: str) -> Model:
    """The model card with this id, or of this path. Raises InputError, CardError."""
    return catalog.load_card(Model, model, data_dir("models"), "model")


def load_system(system: str) -> System:
    """The machine card with this id, or of this path. Raises InputError, CardError."""
    return catalog.load_system(system)


def load_engine(engine: str) -> Engine:
    """The engine card with this id, or of this path. Raises InputError, CardError."""
    return catalog.load_card(Engine, engine, data_dir("engines"), "engine")


def as_model(m: str | Model) -> Model:
    return m if isinstance(m, Model) else load_model(m)


def as_system(s: str | System) -> System:
    return s if isinstance(s, System) else load_system(s)


def as_engine(e: str | Engine) -> Engine:
    return e if isinstance(e, Engine) else load_engine(e)


@lru_cache(maxsize=1)
def assumptions() -> dict[str, catalog.Quantity]:
    return catalog.read_quantities(data_dir("models").parent / "assumptions.toml", "values")


@dataclass(frozen=True)
class Run:
    """A checked request: the chain and every scalar input with its source."""

    model: Model
    system: System
    engine: Engine
    precision: str
    step: StepChain
    inputs: dict[str, Any]
    sources: dict[str, str]
    draft: str | None
    acceptance: float
    notes: tuple[str, ...]
    capacity: float
    power_set: str | None  # words of the named set, its date and source; None: not on the card
    price_set: str | None


def choice(name: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise InputError(f"{name}: {value!r} is not one of {', '.join(allowed) or 'none'}")


def whole(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int in low .. high; raises InputError naming the field."""
    ok = isinstance(value, int | np.integer) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not ok or not low <= value <= high:
        raise InputError(f"{name}: {value!r} is not a whole number from {low:,} to {high:,}")
    return int(value)


def prepare(
    model: str | Model,
    system: str | System,
    *,
    phase: str,
    new_tokens: int,
    precision: str,
    mode: str,
    engine: str | Engine,
    overlap: str,
    balance: str,
    redundant_experts: int,
    draft: str | None,
    draft_tokens: int,
    acceptance_length: float | None,
    power_basis: str,
    price_basis: str,
) -> Run:
    m, s = as_model(model), as_system(system)
    choice("phase", phase, PHASES)
    choice("mode", mode, tuple(MODES))
    choice("precision", precision, ("auto", *m.precision))
    choice("balance", balance, tuple(BALANCES))
    redundant_experts = whole("redundant_experts", redundant_experts, 0, 4096)
    choice("overlap", overlap, tuple(OVERLAPS))
    if overlap == "fused" and s.floors.fused is None:
        raise InputError(
            f"overlap: 'fused', but the card of {s.id} has no fused expert kernel; expected "
            f"{' or '.join(x for x in OVERLAPS if x != 'fused')}"
        )
    choice("power_basis", power_basis, tuple(POWER_BASES))
    choice("price_basis", price_basis, tuple(PRICE_BASES))
    draft_tokens = whole("draft_tokens", draft_tokens, 0, 32)
    new_tokens = whole("new_tokens", new_tokens, 1, m.shape.context_tokens)
    if phase == "decode" and new_tokens != 1:
        raise InputError(
            f"new_tokens: {new_tokens} in decode; expected 1 (draft_tokens sets speculation)"
        )
    draft, acceptance, notes = speculation(m, phase, draft, draft_tokens, acceptance_length)
    precision = _precision(m, s, precision, notes)
    machine = machine_numbers(s, mode)
    inputs: dict[str, Any] = {k: v for k, (v, _) in machine.items()}
    sources = {k: src for k, (_, src) in machine.items()}
    serving = as_engine(engine)
    for name, (value, source) in serving_numbers(serving, phase, mode).items():
        inputs[name], sources[name] = value, source
    inputs["tau_kernel"] *= inputs.pop("kernel_scale")
    inputs["ov_two"], inputs["ov_fused"] = float(overlap == "two-batch"), float(overlap == "fused")
    inputs["n_redundant"] = float(redundant_experts)
    if balance == "balanced":
        inputs["phi_slope"] = 0.0
    elif mode != "speed-of-light":
        slope = assumptions()[f"imbalance_slope_{phase}"]
        inputs["phi"], sources["phi"] = 1.0, "unbalanced: grows with the ranks"
        inputs["phi_slope"], sources["phi_slope"] = slope.value, slope.source
    inputs["A"] = acceptance
    inputs["q"] = float(new_tokens if phase == "prefill" else 1 + draft_tokens)
    power, sources["P_gpu"], power_set = _of_set(s, "power", power_basis)
    price, sources["c_gpu"], price_set = _of_set(s, "price", price_basis)
    if power_set is None and power_bases(s):
        check_power(s, power_basis)
    if power_set is None:
        notes.append(f"{sources['P_gpu']}: nothing per MW")
    dated = price_set and power_basis.startswith("all_in")
    if dated and power_basis.endswith("_old") != price_basis.endswith("_old"):
        notes.append(f"sets of two dates: power {power_basis}, price {price_basis}")
    inputs["P_gpu"], inputs["c_gpu"] = power, price / 3600
    if mode != "speed-of-light":
        if any(
            q.kind == "estimate" and "borrow" in q.source.lower() for q in s.quantities().values()
        ):
            notes.append(
                f"extrapolated: {s.id} has no kernel measurements; it borrows efficiencies"
            )
        notes.append(
            "calibrated constants: kernel tables (machine card) and serving rows (engine card); "
            "docs/validation.md has the errors"
        )
    others = tuple(f"precision.{p}." for p in m.precision if p != precision)
    if unsure := [u for u in m.uncertain if not u.field.startswith(others)]:
        ranges = "; ".join(f"{u.field} ({u.low:g} to {u.high:g})" for u in unsure)
        notes.append(f"not public, an assumption of the model card: {ranges}")
    if s.profile != "as sold":
        notes.append(f"machine profile: {s.profile}")
    kinds = (("model", m), ("system", s), ("engine", serving))
    notes += [note for what, card in kinds if (note := catalog.hiding(what, card))]
    chain = step_chain_for(m, precision, phase, draft)
    return Run(
        m, s, serving, precision, chain, inputs, sources, draft, acceptance, tuple(notes),
        s.memory.capacity.value, power_set, price_set,
    )  # fmt: skip


def power_bases(system: System) -> list[str]:
    """The power sets on this card (keys of POWER_BASES)."""
    return [b for b in POWER_BASES if getattr(system.power, b) is not None]


def check_power(system: str | System, power_basis: str) -> None:
    """Raise InputError, naming the missing field, if the card lacks the power of this set."""
    s = as_system(system)
    choice("power_basis", power_basis, tuple(POWER_BASES))
    if getattr(s.power, power_basis) is None:
        has = ", ".join(power_bases(s)) or "none, so nothing is computed per MW"
        raise InputError(
            f"power_basis: {power_basis!r}: power.{power_basis} is not on the card of {s.id}; "
            f"it has: {has}"
        )


def _of_set(s: System, section: str, name: str) -> tuple[float, str, str | None]:
    """(SI value, source, words with the set's date) of a power or price; nan where there is none."""
    q = getattr(getattr(s, section), name)
    if q is None:
        return float("nan"), f"{section}.{name} is not on the card of {s.id}", None
    text = {"power": POWER_BASES, "price": PRICE_BASES}[section][name]
    words = f"{name}: {text}, {q.text} a GPU [{q.kind}]; card of {s.date}: {q.source}"
    return q.value, f"{q.source} [{q.kind}]", words


def serving_numbers(engine: Engine, phase: str, mode: str) -> dict[str, tuple[float, str]]:
    """What assumptions and the engine add to a step: name -> (SI value, source).

    At the speed of light nothing waits: ranks have equal loads, experts still their popularity.
    """
    a = assumptions()
    out = {
        "phi": (a[f"imbalance_{phase}"].value, a[f"imbalance_{phase}"].source),
        "nu": (a["routing_variance"].value, a["routing_variance"].source),
        "xi": (1.0, "the busiest rank"),
        "workspace": (a["workspace"].value, a["workspace"].source),
        "n_live": (a["live_vectors"].value, a["live_vectors"].source),
        "phi_slope": (0.0, "balanced"),
        "n_redundant": (0.0, "no replicas"),
        "ov_two": (0.0, "no overlap"),
        "ov_fused": (0.0, "no overlap"),
        "tau_sequence": (engine.values.sequence.value, engine.values.sequence.source),
        "n_quantise_fp8": (engine.values.quantise_fp8.value, engine.values.quantise_fp8.source),
        "n_quantise_fp4": (engine.values.quantise_fp4.value, engine.values.quantise_fp4.source),
        "kernel_scale": (engine.values.kernel_scale.value, engine.values.kernel_scale.source),
    }
    if mode == "speed-of-light":
        ideal = "speed of light: not applied"
        even = {
            "phi": 1.0,
            "xi": 0.0,
            "tau_sequence": 0.0,
            "n_quantise_fp8": 0.0,
            "n_quantise_fp4": 0.0,
        }
        out |= {k: (v, ideal) for k, v in even.items()}
    return out


def check_plan(plan: Any, run: Run) -> None:
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


def speculation(
    m: Model, phase: str, draft: str | None, draft_tokens: int, acceptance_length: float | None
) -> tuple[str | None, float, list[str]]:
    """(draft name, acceptance length, notes). `draft` None takes the checkpoint's own first."""
    if draft_tokens and phase == "prefill":
        raise InputError(f"draft_tokens: {draft_tokens} in prefill; expected 0 (drafts decode)")
    if draft is not None and not m.draft:
        raise InputError(f"draft: {draft!r}, but {m.id} has no draft on its card")
    if draft is not None:
        choice("draft", draft, tuple(m.draft))
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


def layout(plan: Plan, model: Model) -> dict[str, float]:
    ep, etp = plan.experts
    sizes = dict(tp=plan.tp, dp=plan.dp, pp=plan.pp, ep=ep, etp=etp, dcp=plan.dcp)
    sizes |= {f"L_{k}": n for k, n in stage_layers(model, plan.pp).items()}
    return {k: float(v) for k, v in sizes.items()}
