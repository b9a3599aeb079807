"""Groups of the kernel tables of GEMMs, attention (GQA, MLA, sparse, compressed), mHC and KDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd

from perfmodel.api import load_model
from perfmodel.model import Model
from perfmodel.operators import attention, misc
from perfmodel.operators import families as fam
from perfmodel.operators.builder import Builder, Op
from perfmodel.symbolic import symbol
from perfmodel.validation.kernel_tables import (
    FP4_SYSTEMS,
    Group,
    context_class,
    plain_builder,
    shape_columns,
    split,
    tidy,
    tokens_class,
)

# ---- GEMM

GEMM_FORMATS = {
    "bfloat16": ("bf16", "bf16"),
    "fp8": ("fp8", "fp8"),
    "fp8_block": ("fp8_block", "fp8"),
    "nvfp4": ("nvfp4", "nvfp4"),
}


def gemm(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    rows = rows[rows["family"] == "gemm"]
    at = shape_columns(rows, r"m=(?P<m>\d+) n=(?P<n>\d+) k=(?P<k>\d+) (?P<fmt>\w+)")
    for fmt, part in split(at, "fmt"):
        r = rows.loc[part.index]
        b = plain_builder(*GEMM_FORMATS[fmt])
        b.linear("gemm", "attention", symbol("k_in"), symbol("k_out"), tokens=symbol("m"))  # type: ignore[arg-type]
        m, n, k = (part[c].to_numpy(float) for c in ("m", "n", "k"))
        yield Group(
            tidy("gemm", "op_points", r, r["latency_ms"] / 1e3, precision=fmt,
                   engine=r["backend"].to_numpy(), regime=tokens_class(m), m=m, n=n, k=k),
            b.ops,
            dict(m=m, k_in=k, k_out=n),
        )  # fmt: skip


# ---- attention cores


def _core(
    name: str, *, decode: bool, heads: Any, d_qk: int, d_v: int, entry: float, rate: str
) -> Op:
    """The softmax core over B sequences of q new tokens after T: as the step's, for plain rows."""
    t, q, b = symbol("T"), symbol("q"), symbol("B")
    return Op(
        name=name, layer_kind="kernel", count=1, formulas=fam.ATTENTION,
        bindings=dict(
            m=b * q, b=b, H=heads, s=1, A=t if decode else t + (q + 1) / 2, d_qk=d_qk, d_v=d_v,
            R=t if decode else t + q, e=entry, dcp=1, a=2,
            l=symbol("tau_context_decode" if decode else "tau_context_prefill"), h=0,
        ),
        rate=rate, compute_class="attention_decode" if decode else "attention_prefill",
        memory_class="attention", kernels=4 if decode else 2,  # decode: plan, parts, merge
    )  # fmt: skip


def gqa_decode(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    rows = rows[rows["family"] == "generation_attention"]
    at = shape_columns(
        rows, r"b=(?P<b>\d+) s=(?P<s>\d+) n=(?P<n>\d+) nkv=(?P<nkv>\d+) d=128 (?P<kv>\w+)kv"
    )
    for (n, nkv, kv), part in split(at, ["n", "nkv", "kv"]):
        r = rows.loc[part.index]
        entry = 2 * nkv * 128 * (1 if kv == "fp8" else 2)
        b, s = part["b"].to_numpy(float), part["s"].to_numpy(float)
        yield Group(
            tidy("gqa_decode", "op_points", r, r["latency_ms"] / 1e3, precision=kv,
                   engine=r["backend"].to_numpy(), regime=context_class(b, s), batch=b, context=s),
            [_core("core", decode=True, heads=n, d_qk=128, d_v=128, entry=entry, rate=kv)],
            dict(B=b, T=s, q=1.0),
        )  # fmt: skip


def gqa_prefill(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    rows = rows[rows["family"] == "context_attention"]
    at = shape_columns(
        rows, r"b=(?P<b>\d+) s=(?P<s>\d+) n=(?P<n>\d+) nkv=(?P<nkv>\d+) d=128 (?P<p>\w+)"
    )
    for (n, nkv, p), part in split(at, ["n", "nkv", "p"]):
        r = rows.loc[part.index]
        b, s = part["b"].to_numpy(float), part["s"].to_numpy(float)
        yield Group(
            tidy("gqa_prefill", "op_points", r, r["latency_ms"] / 1e3, precision=p,
                   engine=r["backend"].to_numpy(), regime=context_class(b, s), batch=b, context=s),
            [_core("core", decode=False, heads=n, d_qk=128, d_v=128, entry=4 * nkv * 128, rate=p)],
            dict(B=b, T=0.0, q=s),
        )  # fmt: skip


def mla_prefill(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    rows = rows[rows["family"] == "context_mla"]
    at = shape_columns(rows, r"b=(?P<b>\d+) s=(?P<s>\d+) heads=(?P<n>\d+) (?P<p>\w+)")
    for (n, p), part in split(at, ["n", "p"]):
        r = rows.loc[part.index]
        b, s = part["b"].to_numpy(float), part["s"].to_numpy(float)
        rate = "fp8" if p.startswith("fp8") else "bf16"
        entry = n * (192 + 128) * 2  # full heads, unfolded
        yield Group(
            tidy("mla_prefill", "op_points", r, r["latency_ms"] / 1e3, precision=rate,
                   engine=r["backend"].to_numpy(), regime=context_class(b, s), batch=b, context=s,
                   heads=float(n)),
            [_core("core", decode=False, heads=n, d_qk=192, d_v=128, entry=entry, rate=rate)],
            dict(B=b, T=0.0, q=s),
        )  # fmt: skip


def _mla_decode_group(table: str, r: pd.DataFrame, measured: Any, kv: str, b: Any, s: Any,
                      heads: Any) -> Group:  # fmt: skip
    entry = 576 if kv == "fp8" else 1152
    return Group(
        tidy("mla_decode", table, r, measured, precision=kv, engine=r["backend"].to_numpy(),
               regime=context_class(b, s), batch=b, context=s, heads=heads),
        [_core("core", decode=True, heads=symbol("k_heads"), d_qk=576, d_v=512, entry=entry,
               rate=kv)],
        dict(B=b, T=s, q=1.0, k_heads=heads),
    )  # fmt: skip


def mla_decode(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    for dtype, r in split(rows, "kv_cache_dtype"):
        kv = "fp8" if dtype == "fp8" else "bf16"
        b, s, h = (r[c].to_numpy(float) for c in ("batch_size", "step", "num_heads"))
        yield _mla_decode_group("mla_generation", r, r["latency"] / 1e3, kv, b, s + 1, h)


def mla_decode_points(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    rows = rows[rows["family"] == "generation_mla"]
    at = shape_columns(rows, r"b=(?P<b>\d+) s=(?P<s>\d+) heads=(?P<n>\d+) (?P<kv>\w+)kv")
    for kv, part in split(at, "kv"):
        r = rows.loc[part.index]
        b, s, h = (part[c].to_numpy(float) for c in ("b", "s", "n"))
        yield _mla_decode_group("op_points", r, r["latency_ms"] / 1e3, kv, b, s, h)


# ---- whole attention modules: projections, core, indexer, as in the step


def _module_ops(model: Model, precision: str, phase: str, kind: str) -> list[Op]:
    b = Builder(model, model.precision_named(precision), phase, layer_kind=kind)
    a = model.attention[kind]
    attention.KINDS[type(a)](b, a)  # type: ignore[operator]
    return [op for op in b.ops if op.link is None]  # collectives are not in these tables


def _with_weights(model: Model, precision: str, weights: str) -> Model:
    """The model with every weight and activation of `precision` in one format."""
    p = model.precision_named(precision)
    act = "bf16" if weights == "bf16" else "fp8"
    update = dict(
        weights={**p.weights, "default": weights}, activations={**p.activations, "default": act}
    )
    return model.model_copy(
        update=dict(precision={**model.precision, precision: p.model_copy(update=update)})
    )


def v4_decode(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    precision = "native" if system in FP4_SYSTEMS else "hopper"
    small = rows["model"].str.contains("Flash")
    for (ratio, gemm, flash), r in split(rows, ["compress_ratio", "gemm_type", small]):
        kind = {4: "csa", 128: "hca"}[int(ratio)]
        model = load_model("deepseek-v4-flash" if flash else "deepseek-v4-pro")
        if gemm == "bfloat16":
            model = _with_weights(model, precision, "bf16")
        b, t, tp = (r[c].to_numpy(float) for c in ("batch_size", "step", "tp_size"))
        size = "flash" if flash else "pro"
        yield Group(
            tidy(f"v4_{kind}_decode", "dsv4_generation", r, r["latency"] / 1e3,
                   precision="bf16" if gemm == "bfloat16" else "fp8_block",
                   engine=r["backend"].to_numpy(), regime=context_class(b, t), model=size,
                   batch=b, context=t + 1, tp=tp),
            _module_ops(model, precision, "decode", kind),
            dict(B=b, b=b, m=b, T=t + 1, q=1.0, tp=tp),
        )  # fmt: skip


def v4_prefill(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    rows = rows[rows["family"].isin(["dsv4_CSA_context", "dsv4_HCA_context"])]
    precision = "native" if system in FP4_SYSTEMS else "hopper"
    at = shape_columns(rows, r"V4-Pro b=(?P<b>\d+) s=(?P<s>\d+) tp=(?P<tp>\d+)")
    for family, r in split(rows, "family"):
        kind = "csa" if "CSA" in family else "hca"
        b, s, tp = (at.loc[r.index][c].to_numpy(float) for c in ("b", "s", "tp"))
        yield Group(
            tidy(f"v4_{kind}_prefill", "op_points", r, r["latency_ms"] / 1e3,
                   precision="fp8_block", engine=r["backend"].to_numpy(),
                   regime=context_class(b, s), batch=b, context=s, tp=tp),
            _module_ops(load_model("deepseek-v4-pro"), precision, "prefill", kind),
            dict(B=b, b=b, m=b * s, T=0.0, q=s, tp=tp),
        )  # fmt: skip


def dsa(family: str, phase: str) -> Callable[[str, pd.DataFrame], Iterator[Group]]:
    def make(system: str, rows: pd.DataFrame) -> Iterator[Group]:
        r = rows[rows["family"] == family]
        if r.empty:
            return
        at = shape_columns(r, r"b=(?P<b>\d+) s=(?P<s>\d+) heads=(?P<n>\d+)")
        b, s, n = (at[c].to_numpy(float) for c in ("b", "s", "n"))
        model = load_model("deepseek-v3.2")
        if family.startswith("mla_module"):  # the dense parent: V3, FP8 cache
            a = model.attention["dsa"].model_copy(update=dict(indexer=None))
            model = model.model_copy(update=dict(attention={"dsa": a}))
        name = family.replace("generation", "decode").replace("context", "prefill")
        inputs: dict[str, Any] = dict(B=b, b=b, tp=128 / n)
        inputs |= dict(m=b, T=s, q=1.0) if phase == "decode" else dict(m=b * s, T=0.0, q=s)
        yield Group(
            tidy(name, "op_points", r, r["latency_ms"] / 1e3, precision="fp8_block",
                   engine=r["backend"].to_numpy(), regime=context_class(b, s), batch=b, context=s,
                   tp=128 / n),
            _module_ops(model, "native", phase, "dsa"),
            inputs,
        )  # fmt: skip

    return make


def mhc(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    model = load_model("deepseek-v4-pro")
    b = Builder(model, model.precision_named("native"), "decode", layer_kind="residual")
    misc.residual(b, 0, model.layers)
    h, n = model.shape.hidden_size, model.residual.streams or 1  # type: ignore[union-attr]
    for op_name, r in split(rows, "op_name"):
        ops = []
        # The step has both halves of a site in one pass; a table row is one half of both sites.
        for op in b.ops:
            if op.name.endswith("_mix"):
                ops += [op] if op_name == "pre" else []
            else:
                values = (n * h + h) if op_name == "pre" else (n * h + h + n * h)
                own = {**op.bindings, "n": values}
                ops.append(Op(**{**op.__dict__, "bindings": own, "kernels": 1}))
        m = r["num_tokens"].to_numpy(float)
        yield Group(
            tidy(f"mhc_{op_name}", "mhc", r, r["latency"] / 1e3, precision="bf16",
                   engine=r["backend"].to_numpy(), regime=tokens_class(m), m=m),
            ops,
            dict(m=m),
        )  # fmt: skip


def kda(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    model = load_model("kimi-k3")
    for (phase, kernel), r in split(rows, ["phase", "kernel_source"]):
        prefill = phase == "context"
        ops = {
            op.name: op
            for op in _module_ops(model, "native", "prefill" if prefill else "decode", "kda")
        }
        if "conv" in kernel:
            names = ["conv"]
        elif kernel in FUSED_KDA:
            names = ["conv", "core"]
        else:
            names = ["core"]
        b, s, n = (r[c].to_numpy(float) for c in ("batch_size", "seq_len", "num_v_heads"))
        what = {"context": "prefill", "generation": "decode", "verify": "verify"}[phase]
        part = "conv" if names == ["conv"] else "core"
        yield Group(
            tidy(f"kda_{part}_{what}", "kda", r, r["latency"] / 1e3, precision="bf16",
                   engine=r["backend"].to_numpy(), regime=tokens_class(b * s), kernel=kernel,
                   batch=b, context=s, tp=96 / n),
            [ops[x] for x in names],
            dict(B=b, b=b, m=b * s, T=s, q=s, tp=96 / n),
        )  # fmt: skip


# Kernels that hold the convolution as well.
FUSED_KDA = ("kda_fused_decode", "fused_kda_decode", "fused_kda_decode_mtp_dspark")
