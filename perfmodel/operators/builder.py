"""Collects the operators of one step: family formulas bound to dims and step symbols.

The kernels counted per operator are ours: what an engine launches for it, chosen with the measured
times of whole modules in view (docs/validation.md says what that makes of the comparison).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy as sp

from perfmodel.model import Model, Precision
from perfmodel.operators import families as fam
from perfmodel.precision import rate_of
from perfmodel.symbolic import Chain, larger, smaller, symbol

# Symbols that every step chain declares; `step.py` gives them units and definitions.
B, T, Q = symbol("B"), symbol("T"), symbol("q")
TP, DP, PP, EP, ETP, DCP = (symbol(n) for n in ("tp", "dp", "pp", "ep", "etp", "dcp"))
# sequences and tokens on this GPU; sequences and tokens of the whole expert group
SEQS, TOKENS, GROUP_SEQS, ROUTED = symbol("b"), symbol("m"), symbol("b_g"), symbol("M")


@dataclass(frozen=True)
class Op:
    """One operator of a layer kind, on one GPU.

    `count` is how often a step runs it and `copies` how often its weights exist (they differ for
    drafts); `params` are the unsharded weights of one copy, of which the fullest GPU holds one
    part in `resident`.
    """

    name: str
    layer_kind: str
    count: Any
    formulas: Chain
    bindings: dict[str, Any]
    rate: str
    compute_class: str
    memory_class: str
    kernels: Any
    tensor_class: str | None = None
    params: int = 0
    bytes_per_param: float = 0.0
    resident: Any = 1
    active_params: int = 0
    copies: int = 1
    link: str | None = None  # collectives: "all_reduce" | "all_to_all" | "send"

    def cost(self, what: str) -> sp.Expr:
        """`flops`, `weight_bytes`, `kv_bytes`, `act_bytes` ... in step symbols; 0 if it has none."""
        if what not in self.formulas.defs:
            return sp.Integer(0)
        return self.formulas.bind(what, self.bindings)


@dataclass(frozen=True)
class CacheLine:
    """Bytes resident per sequence for one layer kind: `per_sequence` in T; split `shards` ways."""

    name: str
    layer_kind: str
    count: int
    per_sequence: sp.Expr
    shards: Any


@dataclass
class Builder:
    """Adds operators for one model, precision and phase ("decode" or "prefill")."""

    model: Model
    precision: Precision
    phase: str
    ops: list[Op] = field(default_factory=list)
    caches: list[CacheLine] = field(default_factory=list)
    layer_kind: str = ""
    count: Any = 1
    tokens: sp.Expr = TOKENS
    routed: sp.Expr = ROUTED
    query: sp.Expr = Q
    copies: int | None = None  # layers of a draft: its passes do not multiply what is resident

    @property
    def decode(self) -> bool:
        return self.phase == "decode"

    def mean_context(self) -> sp.Expr:
        """Mean tokens a query attends: all of them in decode, the causal mean in prefill."""
        return T if self.decode else T + (self.query + 1) / 2

    def last_context(self) -> sp.Expr:
        """Tokens in the cache once this step's are written (what a step reads)."""
        return T if self.decode else T + self.query

    def mean_capped(self, cap: int, stride: int) -> sp.Expr:
        """Mean over queries of min(cap, context/stride), exact for the causal ramp of prefill."""
        if self.decode:
            return smaller(cap, sp.floor(T / stride)) if stride > 1 else smaller(cap, T)

        def integral(u: sp.Expr) -> sp.Expr:
            return smaller(u, cap) ** 2 / 2 + cap * larger(u - cap, 0)

        lo, hi = T / stride, (T + self.query) / stride
        return (integral(hi) - integral(lo)) * stride / self.query

    def add(self, name: str, formulas: Chain, bindings: dict[str, Any], **kw: Any) -> None:
        self.ops.append(
            Op(
                name=name,
                layer_kind=self.layer_kind,
                count=self.count,
                formulas=formulas,
                bindings=bindings,
                copies=int(self.count) if self.copies is None else self.copies,
                **kw,
            )
        )

    def linear(
        self,
        name: str,
        tensor_class: str,
        n_in: int,
        n_out: int,
        *,
        shards: Any = 1,
        groups: int = 1,
        kernels: int = 1,
        tokens: Any = None,
        extra_params: int = 0,
        stored_as: str | None = None,
    ) -> None:
        """A projection n_in -> n_out (per group); its weights are split `shards` ways.

        `stored_as` names the class whose number format they have, where it is another's.
        """
        w = self.precision.weight(stored_as or tensor_class)
        a = self.precision.activation(stored_as or tensor_class)
        params = groups * n_in * n_out + extra_params
        self.add(
            name,
            fam.LINEAR,
            dict(
                m=self.tokens if tokens is None else tokens,
                g=groups,
                n_in=n_in,
                n_out=n_out,
                s=shards,
                w=w.bytes_per_value,
                a=2,  # activations cross HBM in BF16; quantised copies stay on chip
            ),
            rate=rate_of(w, a),
            compute_class="gemm",
            memory_class="gemm",
            kernels=kernels + (symbol(f"n_quantise_{w.quantised}") if w.quantised else 0),
            tensor_class=tensor_class,
            params=params,
            bytes_per_param=w.bytes_per_value,
            resident=shards,
            active_params=params,
        )

    def elementwise(self, name: str, values: Any, *, flops: Any = 0, kernels: int = 1) -> None:
        """A memory pass over `values` numbers per token (reads plus writes, BF16)."""
        self.add(
            name,
            fam.ELEMENTWISE,
            dict(m=self.tokens, n=values, f=flops, a=2),
            rate="bf16",
            compute_class="gemm",
            memory_class="stream",
            kernels=kernels,
        )

    def attention_class(self) -> str:
        return "attention_decode" if self.decode else "attention_prefill"

    def collective(self, name: str, link: str, payload: Any, group: Any, crossings: Any) -> None:
        self.add(
            name,
            fam.COLLECTIVE,
            dict(
                x=payload,
                g=group,
                v=crossings,
                D=symbol("D"),
                W_in=symbol("W_nvl") * symbol(f"e_link_{link}"),
                W_out=symbol("W_out") * symbol("e_link_scale_out"),
                l=symbol(f"tau_{link}"),
                l_out=symbol("tau_scale_out"),
            ),
            rate="bf16",
            compute_class="gemm",
            memory_class="stream",
            kernels=0,
            link=link,
        )

    def exchange(self, name: str, value_bytes: float, width: int, group: Any, k: int) -> None:
        """Tokens (`width` values each) to their k experts, or back, among `group` GPUs.

        Decode sends a copy for each expert (low-latency kernels); prefill sends a token to a rank,
        and over the network to a domain, only once.
        """
        self.add(
            name,
            fam.EXCHANGE,
            dict(
                x=value_bytes * self.tokens * width,
                k=k,
                once=0 if self.decode else 1,
                g=group,
                tp=TP,
                D=symbol("D"),
                W_in=symbol("W_nvl") * symbol("e_link_all_to_all"),
                W_ag=symbol("W_nvl") * symbol("e_link_all_reduce"),
                W_out=symbol("W_out") * symbol("e_link_scale_out"),
                l=symbol("tau_all_to_all"),
                l_ag=symbol("tau_all_reduce_two"),
                l_out=symbol("tau_scale_out"),
            ),
            rate="bf16",
            compute_class="gemm",
            memory_class="stream",
            kernels=0,
            link="all_to_all",
        )

    def all_reduce(self, name: str, width: int) -> None:
        """Sum of the tensor-parallel partial results, BF16."""
        self.reduce(name, 2 * self.tokens * width, TP)

    def reduce(self, name: str, payload: Any, group: Any) -> None:
        """All-reduce of `payload` bytes over `group` GPUs, one-shot or two-shot."""
        self.add(
            name,
            fam.ALL_REDUCE,
            dict(
                x=payload,
                g=group,
                D=symbol("D"),
                W_one=symbol("W_nvl") * symbol("e_link_all_reduce_one"),
                W_two=symbol("W_nvl") * symbol("e_link_all_reduce"),
                W_out=symbol("W_out") * symbol("e_link_scale_out"),
                l_one=symbol("tau_all_reduce"),
                l_two=symbol("tau_all_reduce_two"),
                l_rank=symbol("tau_all_reduce_rank"),
                l_out=symbol("tau_scale_out"),
            ),
            rate="bf16",
            compute_class="gemm",
            memory_class="stream",
            kernels=0,
            link="all_reduce",
        )

    def cache(self, name: str, per_sequence: sp.Expr, shards: Any) -> None:
        n = self.count if self.copies is None else self.copies
        self.caches.append(CacheLine(name, self.layer_kind, n, per_sequence, shards))
