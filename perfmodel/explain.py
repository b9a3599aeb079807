"""Any result as formula, then numbers, then value; and the equations a report prints."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import sympy as sp

from perfmodel.errors import InputError
from perfmodel.operators import families as fam
from perfmodel.operators.builder import Op
from perfmodel.roofline import ROOFLINE
from perfmodel.step import METRICS, StepChain, unhidden
from perfmodel.symbolic import Chain, evaluate

if TYPE_CHECKING:
    from perfmodel.api import Estimate


@dataclass(frozen=True)
class Explanation:
    """`inputs` are (symbol, value, unit, doc, source) of everything the formula names."""

    name: str
    unit: str
    doc: str
    formula: str
    latex: str
    numbers: str
    value: float
    inputs: list[tuple[str, float, str, str, str]]


TOP = (
    "step_time",
    "tpot",
    "interactivity",
    "throughput",
    "throughput_gpu",
    "throughput_mw",
    "usd_per_mtok",
    "memory",
)
PARTS = ("flops", "weight_bytes", "kv_bytes", "act_bytes", "message_bytes", "link_s", "latency_s")


def _operators(e: Estimate, step: StepChain) -> dict[str, int]:
    shown = {(o.layer_kind, o.name) for o in e.operators}
    return {
        f"{op.layer_kind}.{op.name}": i
        for i, op in enumerate(step.ops)
        if (op.layer_kind, op.name) in shown
    }


def names(e: Estimate, step: StepChain) -> list[str]:
    """What can be explained: metrics, operators (KIND.OPERATOR) and their parts (....flops)."""
    out = [n for n in TOP if n in step.chain.defs]
    for op, i in _operators(e, step).items():
        out.append(op)
        out += [f"{op}.{p}" for p in PARTS if p in step.ops[i].formulas.defs]
    return out


def explain(e: Estimate, step: StepChain, name: str) -> Explanation:
    """The explanation of one name; raises InputError listing near ones when it is unknown."""
    if name in TOP and name in step.chain.defs:
        if math.isnan(e.values[name]):
            used = {s.name for s in step.chain.expr(name).free_symbols}
            missing = next(k for k in ("P_gpu", "c_gpu") if k in used and math.isnan(e.values[k]))
            raise InputError(f"explain: {name} has no value: {e.sources[missing]}")
        return _definition(step.chain, name, e.values, e.sources)
    ops = _operators(e, step)
    if name in ops:
        return _operator_time(e, step, name, ops[name])
    stem, _, part = name.rpartition(".")
    if stem in ops and part in step.ops[ops[stem]].formulas.defs:
        return _operator_part(e, step.ops[ops[stem]], name, part)
    import difflib

    near = difflib.get_close_matches(name, names(e, step), 3, 0.4)
    raise InputError(
        f"explain: {name!r} is unknown; did you mean {', '.join(near) or 'step_time'}? "
        "(`perfmodel explain list` shows all)"
    )


def _number(x: float) -> str:
    return f"{x:,.0f}" if float(x).is_integer() and abs(x) < 1e7 else f"{x:.4g}"


_NAME = re.compile(r"[A-Za-z_]\w*")


def _with_numbers(expr: sp.Expr, values: dict[str, float]) -> str:
    """The formula as text with each symbol replaced by its number (functions keep their name)."""
    return _NAME.sub(lambda m: _number(values[m[0]]) if m[0] in values else m[0], str(expr))


def _inputs(
    expr: sp.Expr, chain: Chain, values: dict[str, float], source: Callable[[str], str]
) -> list[tuple[str, float, str, str, str]]:
    """(symbol, value, unit, doc, source) of everything that `expr` names, by name."""
    names = sorted(s.name for s in expr.free_symbols)
    return [(n, values[n], chain.term(n).unit, chain.term(n).doc, source(n)) for n in names]


def _definition(
    chain: Chain, name: str, values: dict[str, float], sources: dict[str, str], shown: str = ""
) -> Explanation:
    term, expr = chain.defs[name]
    expr = expr.xreplace({t.symbol: v for t, v in chain.constants.values()})

    def source(n: str) -> str:
        return sources.get(n, "defined by the model" if n in chain.defs else "given")

    inputs = _inputs(expr, chain, values, source)
    return Explanation(
        shown or name, term.unit, term.doc, f"{name} = {expr}", chain.latex(name),
        _with_numbers(expr, values), values[name], inputs,
    )  # fmt: skip


def _operator_part(e: Estimate, op: Op, name: str, part: str) -> Explanation:
    values: dict[str, float] = {}
    chain = op.formulas
    for n in chain.inputs:
        if n in op.bindings:
            values[n] = evaluate(op.bindings[n], e.values)
    for n, (_, expr) in chain.defs.items():
        e2 = expr.xreplace({t.symbol: v for t, v in chain.constants.values()})
        values[n] = evaluate(e2, values)
    sources = {n: f"{n} = {op.bindings[n]}" for n in chain.inputs if n in op.bindings}
    return _definition(chain, part, values, sources, name)


def _operator_time(e: Estimate, step: StepChain, name: str, i: int) -> Explanation:
    op, v = step.ops[i], e.values
    if op.link is not None:
        return _collective_time(e, op, name, v[f"o{i}_t"])
    moved = sum(evaluate(op.cost(p), v) for p in ("weight_bytes", "kv_bytes", "act_bytes"))
    peak, ec = f"P_{op.rate}", f"e_{op.compute_class}_{op.rate}"
    em = f"e_hbm_{op.memory_class}"
    kernels, tau = evaluate(op.kernels, v), "tau_kernel"
    if op.formulas.name == "experts" and v["ov_fused"]:
        ec, em, kernels, tau = "e_moe_fused", "e_hbm_moe_fused", 1.0, "tau_fused"
    values = dict(
        F=evaluate(op.cost("flops"), v), X=moved, P=v[peak], e_c=v[ec], W=v["W_hbm"], e_m=v[em],
        n_k=kernels, tau=v[tau], s=evaluate(unhidden(op), v),
    )  # fmt: skip
    sources = {
        "F": f"see {name}.flops", "X": f"weights, cache and activations: see {name}.weight_bytes",
        "P": e.sources[peak], "e_c": e.sources[ec], "W": e.sources["W_hbm"],
        "e_m": e.sources[em], "n_k": "kernels counted for this operator",
        "tau": e.sources[tau],
        "s": e.sources.get(getattr(unhidden(op), "name", ""), "attention prefill: all overlaps"),
    }  # fmt: skip
    for n, (_, expr) in ROOFLINE.defs.items():
        values[n] = evaluate(expr, values)
    expr = ROOFLINE.expr("t_op")
    inputs = _inputs(expr, ROOFLINE, values, sources.__getitem__)
    return Explanation(
        name, "s", f"time of {name} in one of {op.count} layers", f"t_op = {expr}",
        ROOFLINE.latex("t_op"), _with_numbers(expr, values), v[f"o{i}_t"], inputs,
    )  # fmt: skip


def _collective_time(e: Estimate, op: Op, name: str, value: float) -> Explanation:
    """Transfer plus latency of one collective, in the machine's numbers."""
    chain = op.formulas
    expr = chain.expr("link_s") + chain.expr("latency_s")
    values = {n: evaluate(op.bindings[n], e.values) for n in chain.inputs}

    def source(n: str) -> str:
        bound = sp.sympify(op.bindings[n])
        used = sorted(s.name for s in bound.free_symbols)
        cited = [e.sources[u] for u in used if u in e.sources]
        return "; ".join(cited) if cited else f"{n} = {bound}"

    inputs = _inputs(expr, chain, values, source)
    latex = f"{chain.latex('link_s')},\\quad {chain.latex('latency_s')}"
    return Explanation(
        name, "s", f"time of {name} in one of {op.count} layers", f"t_op = {expr}", latex,
        _with_numbers(expr, values), value, inputs,
    )  # fmt: skip


def key_equations() -> list[tuple[str, str, str]]:
    """(name, what it says, LaTeX) of the equations that carry the model, for reports."""
    out = []
    for chain, wanted in (
        (ROOFLINE, ("t_c", "t_m", "t_f", "t_op")),
        (fam.LINEAR, ("flops", "weight_bytes")),
        (fam.EXPERTS, ("touched", "flops", "weight_bytes")),
        (fam.ATTENTION, ("flops", "kv_bytes")),
        (fam.INDEXER, ("flops", "kv_bytes")),
        (fam.DELTA_RULE, ("kv_bytes",)),
        (fam.COLLECTIVE, ("share_out", "message_bytes", "t_in", "t_out", "link_s", "latency_s")),
        (
            METRICS["decode"],
            ("tpot", "interactivity", "throughput", "throughput_mw", "usd_per_mtok"),
        ),
    ):
        for n in wanted:
            out.append(
                (f"{chain.name}.{n}", f"{chain.doc}: {chain.defs[n][0].doc}", chain.latex(n))
            )
    return out
