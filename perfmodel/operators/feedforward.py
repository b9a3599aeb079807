"""Feed-forward kinds: dense, and mixture of experts with shared and latent parts."""

from __future__ import annotations

import sympy as sp

from perfmodel.model import Dense, MoE
from perfmodel.operators import families as fam
from perfmodel.operators.builder import DP, EP, ETP, TP, Builder
from perfmodel.precision import rate_of
from perfmodel.symbolic import either, symbol


def dense(b: Builder, f: Dense) -> None:
    """A gated feed-forward layer split over tensor-parallel ranks."""
    h = b.model.shape.hidden_size
    b.elementwise("norm", 2 * h)
    b.linear("gate_up", "dense", h, 2 * f.intermediate, shards=TP, kernels=2)
    b.linear("down", "dense", f.intermediate, h, shards=TP)
    b.all_reduce("all_reduce", h)


def moe(b: Builder, f: MoE) -> None:
    """Router, dispatch, routed experts, combine, shared experts.

    With attention data parallel (dp > 1) tokens travel to their experts and back, each rank
    sending its share of them; with dp = 1 every rank has all tokens and partial sums are reduced.
    """
    h = b.model.shape.hidden_size
    width = f.latent_dim or h
    w, a = b.precision.weight("experts"), b.precision.activation("experts")
    b.elementwise("norm", 2 * h)
    b.linear("router", "router", h, f.experts, kernels=2)  # with top-k
    if f.latent_dim:
        b.linear("latent_down", "latent", h, f.latent_dim)
    travels = either(DP - 1, EP, 1)
    k = f.experts_per_token
    b.exchange("dispatch", a.bytes_per_value, width, travels, k)
    b.add(
        "experts",
        fam.EXPERTS,
        dict(
            M=b.routed, E=f.experts, k=k, ep=EP, etp=ETP, h=width,
            d=f.intermediate, n_mat=3, w=w.bytes_per_value, a=a.bytes_per_value,
            # the fused kernel packs tokens of all ranks, its efficiency has the padding in it
            r=either(symbol("ov_fused"), 0, symbol("tau_tile_rows")),
            R=symbol("n_redundant"), phi=symbol("phi") + symbol("phi_slope") * (EP - 1),
            nu=symbol("nu"), xi=symbol("xi"),
        ),
        rate=rate_of(w, a),
        compute_class="moe",
        memory_class="moe_4bit" if w.bits == 4 else "moe",
        # permute with quantise, gate and up, down, unpermute; FP4 engines fuse them into two
        kernels=2 if w.bits == 4 and a.rate != "bf16" else 4,
        tensor_class="experts",
        params=f.experts * 3 * width * f.intermediate,
        bytes_per_param=w.bytes_per_value,
        resident=f.experts / sp.ceiling((f.experts + symbol("n_redundant")) / EP) * ETP,
        active_params=f.experts_per_token * 3 * width * f.intermediate,
    )  # fmt: skip
    b.exchange("combine", 2, width, travels, k)
    if f.latent_dim:
        # partial sums are reduced at the latent width before the norm, apart from the shared ones
        b.reduce("latent_all_reduce", 2 * b.tokens * width, either(DP - 1, 1, TP))
        b.linear("latent_up", "latent", f.latent_dim, h, kernels=2)
    if f.shared_experts:
        n = f.shared_experts * f.intermediate
        b.linear("shared_gate_up", "shared", h, 2 * n, shards=TP, kernels=2)
        b.linear("shared_down", "shared", n, h, shards=TP)
    b.all_reduce("all_reduce", h)


KINDS = {Dense: dense, MoE: moe}
