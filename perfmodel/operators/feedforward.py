"""Feed-forward kinds: dense, and mixture of experts with shared and latent parts."""

from __future__ import annotations

import sympy as sp

from perfmodel.layers import Dense, MoE
from perfmodel.operators import families as fam
from perfmodel.operators.builder import DP, EP, ETP, TP, Builder
from perfmodel.precision import rate_of
from perfmodel.symbolic import either, symbol


def dense(b: Builder, f: Dense) -> None:
    """A feed-forward layer split over tensor-parallel ranks."""
    h = b.model.shape.hidden_size
    b.elementwise("norm", 2 * h)
    _up_and_down(b, "", "dense", f.intermediate, f.matrices)
    b.all_reduce("all_reduce", h)


def _up_and_down(b: Builder, prefix: str, tensor_class: str, width: int, matrices: int) -> None:
    """Hidden width to `width` (with a gate: twice) and back; the activation is a kernel."""
    h = b.model.shape.hidden_size
    up, n = ("gate_up", 2 * width) if matrices == 3 else ("up", width)
    b.linear(prefix + up, tensor_class, h, n, shards=TP, kernels=2)
    b.linear(prefix + "down", tensor_class, width, h, shards=TP)


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
            d=f.intermediate, n_mat=f.matrices, w=w.bytes_per_value, a=a.bytes_per_value,
            # the fused kernel packs tokens of all ranks, its efficiency has the padding in it
            r=either(symbol("ov_fused"), 0, symbol("tau_tile_rows")),
            R=symbol("n_redundant"), phi=symbol("phi") + symbol("phi_slope") * (EP - 1),
            nu=symbol("nu"), xi=symbol("xi"),
        ),
        rate=rate_of(w, a),
        compute_class="moe",
        memory_class="moe_4bit" if w.bits == 4 else "moe",
        # permute with quantise, (gate and) up, down, unpermute; FP4 engines fuse them into two
        kernels=2 if w.bits == 4 and a.rate != "bf16" else 4,
        tensor_class="experts",
        params=f.experts * f.matrices * width * f.intermediate,
        bytes_per_param=w.bytes_per_value,
        resident=f.experts / sp.ceiling((f.experts + symbol("n_redundant")) / EP) * ETP,
        active_params=f.experts_per_token * f.matrices * width * f.intermediate,
    )  # fmt: skip
    b.exchange("combine", 2, width, travels, k)
    if f.latent_dim:
        # partial sums are reduced at the latent width before the norm, apart from the shared ones
        b.reduce("latent_all_reduce", 2 * b.tokens * width, either(DP - 1, 1, TP))
        b.linear("latent_up", "latent", f.latent_dim, h, kernels=2)
    if f.shared_experts:
        _up_and_down(b, "shared_", "shared", f.shared_width, f.matrices)
    b.all_reduce("all_reduce", h)


KINDS = {Dense: dense, MoE: moe}
