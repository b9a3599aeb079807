"""Exact counts of a model: parameters, checkpoint bytes, cache bytes, FLOPs of a token.

They come from the same operators that the step uses, so a check of a published count is a check
of the step's shapes.
"""

from __future__ import annotations

from collections import defaultdict

import sympy as sp

from perfmodel.model import Model
from perfmodel.operators.builder import Builder, Op
from perfmodel.operators.collect import collect


def _ops(model: Model, precision: str, draft: str | None) -> list[tuple[Op, int]]:
    """Weight-bearing operators with how often their weights exist (draft passes are not copies)."""
    ops = collect(model, precision, "decode", draft).ops
    return [(op, op.copies) for op in ops if op.params * op.copies]


def parameters(model: Model, draft: str | None = None) -> dict[str, float]:
    """Parameters by tensor class, with those of `draft` when named; vision and tables included."""
    out: dict[str, float] = defaultdict(float)
    for op, n in _ops(model, "native", draft):
        out[op.tensor_class or "other"] += n * op.params
    if model.vision:
        out["vision"] = float(model.vision.parameters)
    if model.engram:
        out["engram_tables"] = float(model.engram.table_parameters)
    return dict(out)


def active_parameters(model: Model) -> float:
    """Weights a token uses: routed top-k, everything else and the head, no input embedding.

    This is the convention of the published DeepSeek V4 and Kimi K3 figures.
    """
    return sum(n * op.active_params for op, n in _ops(model, "native", None))


def weight_bytes(
    model: Model, precision: str = "native", draft: str | None = None
) -> dict[str, float]:
    """Bytes of the weights with their scales, by tensor class; vision tower in BF16."""
    out: dict[str, float] = defaultdict(float)
    for op, n in _ops(model, precision, draft):
        out[op.tensor_class or "other"] += n * op.params * op.bytes_per_param
    if model.vision:
        out["vision"] = 2.0 * model.vision.parameters
    if model.engram:
        table = model.precision_named(precision).weight("engram_tables")
        out["engram_tables"] += model.engram.table_parameters * table.bytes_per_value
    return dict(out)


def checkpoint_bytes(model: Model, precision: str = "native", draft: str | None = None) -> float:
    """Bytes of all weights with their scales, vision tower in BF16."""
    return sum(weight_bytes(model, precision, draft).values())


def cache_bytes(model: Model, context_tokens: int, precision: str = "native") -> dict[str, float]:
    """Bytes a sequence keeps resident at this context, by layer kind; nothing sharded."""
    b: Builder = collect(model, precision, "decode")
    out: dict[str, float] = {}
    for line in b.caches:
        kind = line.name
        at = float(
            sp.sympify(line.per_sequence).subs({s: context_tokens for s in _t(line.per_sequence)})
        )
        out[kind] = out.get(kind, 0.0) + line.count * at
    return out


def _t(expr: sp.Expr) -> set[sp.Symbol]:
    return {s for s in sp.sympify(expr).free_symbols if s.name == "T"}


def _alone(context_tokens: int) -> dict[str, float]:
    """Symbols of one decoded token: one GPU, one sequence, no padding."""
    values: dict[str, float]
    values = dict(T=context_tokens, q=1, m=1, b=1, M=1, B=1, tp=1, dp=1, pp=1, ep=1, etp=1, dcp=1)
    return values | dict.fromkeys(("tau_context_decode", "tau_sparse_heads", "n_redundant"), 0)


def _value(expr: sp.Expr, values: dict[str, float]) -> float:
    expr = sp.sympify(expr)
    return float(expr.subs({s: values[s.name] for s in expr.free_symbols}))


_GROUPS = {"attention": "core", "indexer": "indexer"}  # of cost families


def cache_reads(model: Model, context_tokens: int, precision: str = "native") -> dict[str, float]:
    """Bytes of cache that one decoded token moves, by group: core, indexer, state.

    core and indexer are read; a recurrent state is read and written. Not what is resident: sparse
    attention reads only what it picks.
    """
    out: dict[str, float] = defaultdict(float)
    for op in collect(model, precision, "decode").ops:
        if (expr := op.cost("kv_bytes")) != 0:
            group = _GROUPS.get(op.formulas.name, "state")
            out[group] += float(op.count) * _value(expr, _alone(context_tokens))
    return dict(out)


def decode_flops(
    model: Model, context_tokens: int, precision: str = "native"
) -> dict[tuple[str, str], float]:
    """FLOPs of one decoded token by (group, rate); groups are linear, core and indexer.

    One GPU, one sequence, no tile padding: the convention of published FLOP counts.
    """
    out: dict[tuple[str, str], float] = defaultdict(float)
    for op in collect(model, precision, "decode").ops:
        if op.formulas.name == "elementwise" or op.link:
            continue
        if op.formulas.name == "experts":  # exactly top-k experts, nothing for tiles or imbalance
            flops = 2.0 * op.active_params
        else:
            flops = _value(op.cost("flops"), _alone(context_tokens))
        out[_GROUPS.get(op.formulas.name, "linear"), op.rate] += float(op.count) * flops
    return dict(out)
