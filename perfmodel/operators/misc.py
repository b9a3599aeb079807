"""What is not a layer: embedding, head, residual mixing, drafts, pipeline sends."""

from __future__ import annotations

import sympy as sp

from perfmodel.layers import part_counts
from perfmodel.operators import families as fam
from perfmodel.operators.builder import DP, PP, SEQS, TP, Builder
from perfmodel.symbolic import symbol


def residual(b: Builder, first: int, last: int) -> None:
    """Hyper-connections (mHC) or attention residuals of layers `first` up to `last`.

    mHC as in ai-dynamo/aiconfigurator @095f58a, operators/mhc.py: two sites a layer, 2 (4h) 24 FLOP
    to mix, 4h read and written at each half. Attention residuals as in arXiv 2607.24653, 2.2.
    """
    r, h = b.model.residual, b.model.shape.hidden_size
    if r is None:
        return
    # a layer of attention or feed-forward alone has one site
    attention, ffn = part_counts(b.model.shape.order[first:last])
    sites = {"attention": attention.total(), "ffn": ffn.total()}
    if r.type == "mhc":
        n = r.streams or 1
        mix = (2 + n) * n
        for site, b.count in sites.items():
            if not b.count:
                continue
            # The mix is a tall thin product in fp32; it reads all streams, as the passes do.
            b.linear(f"mhc_{site}_mix", "residual", n * h, mix)
            values = (n * h + h) + (n * h + h + n * h)  # pre: streams -> input; post: merge back
            b.elementwise(f"mhc_{site}", values, flops=2 * n * n * h + 2 * n * h, kernels=2)
        return
    # Attention residuals, unfused: each site of a layer reads every block output so far.
    block = r.block_layers or 1
    sources = sp.Rational(sum(i // block + 1 for i in range(first, last)), last - first)
    n = sp.Rational(sum(sites.values()), last - first)  # aggregations a layer, mean
    b.elementwise("attention_residual", n * (sources + 1) * h, flops=2 * n * sources * h)


def engram(b: Builder) -> None:
    """Projection of the vectors that a layer looks up: a key for each residual stream, a value.

    Their transfer from host memory runs ahead of the layers (the rows depend on tokens alone) and is
    not timed.
    """
    e, h, r = b.model.engram, b.model.shape.hidden_size, b.model.residual
    if e is None:
        return
    streams = r.streams or 1 if r is not None and r.type == "mhc" else 1
    b.count = len(e.table_rows)
    b.linear("engram", "engram", e.rows_per_token * e.row_dim, (streams + 1) * h, shards=TP)
    b.elementwise("engram_gate", (3 * streams + 1) * h)


def embedding(b: Builder) -> None:
    h, v = b.model.shape.hidden_size, b.model.shape.vocab_size
    fmt = b.precision.weight("embedding")
    b.add(
        "embedding",
        fam.ELEMENTWISE,
        dict(m=b.tokens, n=2 * h, f=0, a=2),
        rate="bf16",
        compute_class="gemm",
        memory_class="stream",
        kernels=1,
        tensor_class="embedding",
        params=v * h,
        bytes_per_param=fmt.bytes_per_value,
        resident=TP,
    )


def head(b: Builder) -> None:
    """Final norm and vocabulary projection; prefill needs it for the last token only."""
    s = b.model.shape
    tokens = b.tokens if b.decode else SEQS
    b.linear("head", "head", s.hidden_size, s.vocab_size, shards=TP, tokens=tokens, kernels=3)
    gather_logits(b, tokens)


def gather_logits(b: Builder, tokens: sp.Expr) -> None:
    """fp32 logits of the vocabulary shards, gathered over the tensor-parallel ranks."""
    b.collective("gather_logits", "all_reduce", 4 * tokens * b.model.shape.vocab_size / TP, TP, 1)


def pipeline_send(b: Builder) -> None:
    """Hidden states (all residual streams) to the next pipeline stage."""
    r = b.model.residual
    streams = r.streams or 1 if r is not None and r.type == "mhc" else 1
    payload = 2 * b.tokens * b.model.shape.hidden_size * streams / TP
    b.add(
        "pipeline_send",
        fam.SEND,
        dict(
            x=payload, pp=PP, g=TP * DP * PP, D=symbol("D"),
            W_in=symbol("W_nvl") * symbol("e_link_all_reduce"),
            W_out=symbol("W_out") * symbol("e_link_scale_out"),
            l=symbol("tau_send"), l_out=symbol("tau_scale_out"),
        ),
        rate="bf16",
        compute_class="gemm",
        memory_class="stream",
        kernels=0,
        link="send",
    )  # fmt: skip
