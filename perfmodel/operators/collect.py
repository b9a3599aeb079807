"""All operators of one step: layer kinds, what joins them, the ends and a draft."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy as sp

from perfmodel.layers import part_counts
from perfmodel.model import Model
from perfmodel.operators import attention, feedforward, misc
from perfmodel.operators.builder import GROUP_SEQS, ROUTED, SEQS, TOKENS, TP, Builder, Q, T
from perfmodel.symbolic import smaller


def collect(model: Model, precision: str, phase: str, draft: str | None = None) -> Builder:
    """All operators of one step, layer kinds first, then embedding, head and pipeline sends."""
    b = Builder(model, model.precision_named(precision), phase)
    whole = model.shape.prefill_layers if phase == "prefill" else None
    _layers(b, 0, whole or model.layers, "residual")
    if whole:
        _late_layers(b, whole)
    b.layer_kind, b.count = "engram", 1
    misc.engram(b)
    b.layer_kind, b.count = "ends", 1
    misc.embedding(b)
    misc.head(b)
    misc.pipeline_send(b)
    if draft is not None and phase == "decode":
        _draft(b, draft)
    return b


def _layers(b: Builder, first: int, last: int, residual: str) -> None:
    attentions, feed_forwards = part_counts(b.model.shape.order[first:last])
    for name, n in attentions.items():
        b.layer_kind, b.count = name, n
        _attention(b, name)
    for name, n in feed_forwards.items():
        b.layer_kind, b.count = name, n
        _feed_forward(b, name)
    b.layer_kind, b.count = residual, last - first
    misc.residual(b, first, last)


def _late_layers(b: Builder, first: int) -> None:
    """Layers that a prefill runs for the last tokens alone, the others being in the cache."""
    tail = smaller(b.model.shape.prefill_tail_tokens, Q)
    early, b.ops = b.ops, []
    b.tokens, b.routed, b.query = SEQS * tail, GROUP_SEQS * tail, tail
    _layers(b, first, b.model.layers, "late residual")
    start = {T: T + Q - tail}
    for op in b.ops:
        moved = {
            k: v.xreplace(start) if isinstance(v, sp.Basic) else v for k, v in op.bindings.items()
        }
        early.append(replace(op, bindings=moved))
    b.ops = early
    b.tokens, b.routed, b.query = TOKENS, ROUTED, Q


def _attention(b: Builder, name: str) -> None:
    a = b.model.attention[name]
    attention.KINDS[type(a)](b, a)  # type: ignore[operator]


def _feed_forward(b: Builder, name: str) -> None:
    f = b.model.ffn[name]
    feedforward.KINDS[type(f)](b, f)  # type: ignore[operator]


def _draft(b: Builder, name: str) -> None:
    """The draft's layers: `mtp` runs once per drafted token, `dspark` once over the block."""
    d, main = b.model.draft[name], b.precision
    b.precision = main.of_draft()
    drafted = Q - 1
    b.layer_kind = f"draft {name}"
    b.tokens = SEQS * drafted if d.block else SEQS
    b.routed = GROUP_SEQS * drafted if d.block else GROUP_SEQS
    b.query = drafted if d.block else sp.Integer(1)
    passes: Any = smaller(1, drafted) if d.block else drafted
    attentions, feed_forwards = part_counts(d.layers)
    for kind, n in attentions.items():
        b.count, b.copies = n * passes, n
        _attention(b, kind)
    for kind, n in feed_forwards.items():
        b.count, b.copies = n * passes, n
        _feed_forward(b, kind)
    b.count, b.copies = passes, 1
    h = b.model.shape.hidden_size
    for i in range(d.projections):
        b.linear(f"projection_{i + 1}", "draft_projection", h, h)
    # The draft shares the main head: no copy of its weights, but its pass is paid again.
    b.copies, b.precision = 0, main
    s = b.model.shape
    b.linear("head", "head", s.hidden_size, s.vocab_size, shards=TP, kernels=2)
    misc.gather_logits(b, b.tokens)
