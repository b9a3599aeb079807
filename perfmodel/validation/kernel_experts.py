"""Groups of the kernel tables of experts and of collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd

from perfmodel.operators import feedforward
from perfmodel.operators.builder import Op
from perfmodel.symbolic import Chain, smaller, symbol
from perfmodel.validation.kernel_tables import (
    Group,
    bytes_class,
    classed,
    plain_builder,
    split,
    tidy,
    tokens_class,
)

# ---- experts

MOE_FORMATS = {
    "fp8_block": ("fp8_block", "fp8"),
    "nvfp4": ("nvfp4", "nvfp4"),
    "w4a16_mxfp4": ("mxfp4", "bf16"),
    "w4a8_mxfp4_mxfp8": ("mxfp4", "mxfp8"),
}


def _even(chain: Chain) -> Chain:
    """The experts' formulas where routing is even to the last token, as «balanced» rows are."""
    out = Chain(chain.name, chain.doc)
    out.inputs, out.constants, out.tex = dict(chain.inputs), dict(chain.constants), chain.tex
    out.defs = dict(chain.defs)
    term, _ = out.defs["touched"]
    held, m, k, ep = (symbol(n) for n in ("held", "M", "k", "ep"))
    out.defs["touched"] = (term, smaller(held, m * k / ep))
    return out


def _moe_ops(dims: tuple[int, ...], fmt: str, even: bool, *, comms: bool = False) -> list[Op]:
    """The step's routed experts (with dispatch and combine, if `comms`) for these dims."""
    h, d, k, e = dims
    b = plain_builder(*MOE_FORMATS[fmt])
    f = b.model.ffn["moe"].model_copy(
        update=dict(experts=e, experts_per_token=k, intermediate=d, latent_dim=h, shared_experts=0)
    )
    feedforward.KINDS[type(f)](b, f)  # type: ignore[operator]
    names = ("dispatch", "experts", "combine") if comms else ("experts",)
    ops = [op for op in b.ops if op.name in names]
    if even:
        ops = [
            Op(**{**op.__dict__, "formulas": _even(op.formulas)}) if op.name == "experts" else op
            for op in ops
        ]
    return ops


def moe(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    even_rows = rows["distribution"].isin(["balanced", "uniform"])
    keys = ["hidden_size", "inter_size", "topk", "num_experts"]
    for (*dims, fmt, even), r in split(rows, [*keys, "moe_dtype", even_rows]):
        m, ep = (r[c].to_numpy(float) for c in ("num_tokens", "moe_ep_size"))
        yield Group(
            tidy("moe", "moe", r, r["latency"] / 1e3, precision=fmt,
                   engine=(r["backend"] + "/" + r["kernel_source"]).to_numpy(),
                   regime=tokens_class(m), model=f"{dims[3]}x{dims[2]}", m=m, ep=ep,
                   distribution=r["distribution"].to_numpy()),
            _moe_ops(tuple(int(x) for x in dims), fmt, bool(even)),
            dict(M=m, m=m, ep=ep),
        )  # fmt: skip


def wideep(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    """Experts of one rank; the tokens of these tables are those of the whole expert group."""
    even_rows = rows["distribution"].isin(["balanced", "uniform"])
    keys = ["hidden_size", "inter_size", "topk", "num_experts"]
    for (*dims, fmt, even, op_name), r in split(rows, [*keys, "moe_dtype", even_rows, "op_name"]):
        m, ep = (r[c].to_numpy(float) for c in ("num_tokens", "moe_ep_size"))
        yield Group(
            tidy(op_name if op_name.startswith("wideep") else f"deepep_{op_name}", "wideep_moe",
                   r, r["latency"] / 1e3, precision=fmt, engine=r["backend"].to_numpy(),
                   regime=tokens_class(m / ep), model=f"{dims[3]}x{dims[2]}", m=m / ep,
                   ep=ep, slots=r["num_slots"].to_numpy(float),
                   distribution=r["distribution"].to_numpy()),
            _moe_ops(tuple(int(x) for x in dims), fmt, bool(even)),
            dict(M=m, m=m / ep, ep=ep),
        )  # fmt: skip


def megamoe(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    even_rows = rows["distribution"] == "balanced"
    keys = ["hidden_size", "inter_size", "topk", "num_experts"]
    for (*dims, even, phase), r in split(rows, [*keys, even_rows, "phase"]):
        m, total, ep = (
            r[c].to_numpy(float) for c in ("num_tokens", "global_num_tokens", "moe_ep_size")
        )
        yield Group(
            tidy("megamoe", "megamoe", r, r["latency"] / 1e3, precision="w4a8_mxfp4_mxfp8",
                   engine=r["backend"].to_numpy(), regime=tokens_class(m),
                   model=f"{dims[3]}x{dims[2]}", m=m, ep=ep, phase=phase,
                   distribution=r["distribution"].to_numpy()),
            _moe_ops(tuple(int(x) for x in dims), "w4a8_mxfp4_mxfp8", bool(even)),
            dict(M=total, m=m, ep=ep, dp=ep, ov_fused=1.0, phi=_skew(r["distribution"], ep)),
        )  # fmt: skip


# Busiest rank over the mean, 1 + slope (ep - 1), for routing that no balancing evens out; slopes of
# `calibration/fit_kernels.py`, from the same table: its rows with skewed routing are no hold-out.
SKEW = {"balanced": 0.0, "power_law_1.01": 0.08, "power_law_1.2": 0.145,
        "power_law_sampled_1.9": 0.125}  # fmt: skip


def _skew(law: pd.Series, ep: np.ndarray) -> np.ndarray:
    return 1 + law.map(SKEW).to_numpy(float) * (ep - 1)


# ---- collectives


def _collective_ops(link: str, crossings: float) -> list[Op]:
    b = plain_builder("bf16", "bf16")
    b.collective("collective", link, symbol("k_payload"), symbol("k_group"), crossings)
    return b.ops


def all_reduce(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    g = rows["num_gpus"].to_numpy(float)
    x = rows["message_size"].to_numpy(float) * 2  # elements of BF16
    eager = rows["kernel_source"].str.endswith("eager")
    yield Group(
        tidy("all_reduce", "custom_allreduce", rows, rows["latency"] / 1e3, precision="bf16",
               engine=rows["kernel_source"].to_numpy(),
               regime=np.where(eager, "eager", bytes_class(x)), payload=x, group=g),
        _reduce_ops(),
        dict(k_payload=x, k_group=g),
    )  # fmt: skip


def _reduce_ops() -> list[Op]:
    b = plain_builder("bf16", "bf16")
    b.reduce("collective", symbol("k_payload"), symbol("k_group"))
    return b.ops


def nccl(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    for name, r in split(rows, "op_name"):
        g = r["num_gpus"].to_numpy(float)
        x = r["message_size"].to_numpy(float) * 2
        reduce = name == "all_reduce"
        yield Group(
            tidy(f"nccl_{name}", "nccl", r, r["latency"] / 1e3, precision="bf16",
                   engine="nccl", regime=bytes_class(x), payload=x, group=g),
            _reduce_ops() if reduce else _collective_ops("all_to_all", 1),
            dict(k_payload=x, k_group=g),
        )  # fmt: skip


def _a2a_group(op: str, table: str, r: pd.DataFrame, measured: Any, value_bytes: float, engine: Any,
               precision: str, ranks: Any, **sizes: Any) -> Group:  # fmt: skip
    m, k, h = sizes["m"], sizes["topk"], sizes["hidden"]
    x = m * k * h * value_bytes
    return Group(
        tidy(op, table, r, measured, precision=precision, engine=engine,
               regime=classed(m, (64, 512), ("small", "medium", "large")), payload=x, group=ranks,
               **sizes),
        _collective_ops("all_to_all", 1),
        dict(k_payload=x, k_group=ranks),
    )  # fmt: skip


A2A_BYTES = {"bfloat16": 2.0, "fp8": 1.03125, "nvfp4": 0.5625, "fp4": 0.5625}


def moe_a2a(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    for (backend, phase, fmt), r in split(rows, ["comm_backend", "phase", "comm_dtype"]):
        # DeepEP's default: FP8 out (low latency), BF16 back
        size = A2A_BYTES.get(fmt, 1.03125 if phase == "dispatch" and "ll" in backend else 2.0)
        yield _a2a_group(
            f"a2a_{backend}_{phase}", "moe_a2a", r, r["latency"] / 1e6, size,
            r["backend"].to_numpy(), fmt, r["ep_size"].to_numpy(float),
            m=r["num_tokens"].to_numpy(float), topk=r["topk"].to_numpy(float),
            hidden=r["hidden_size"].to_numpy(float), experts=r["num_experts"].to_numpy(float),
        )  # fmt: skip


def _ranks(system: str, nodes: pd.Series) -> np.ndarray:
    return nodes.to_numpy(float) * (4 if system in ("gb200", "gb300") else 8)


def deepep(kind: str) -> Callable[[str, pd.DataFrame], Iterator[Group]]:
    def make(system: str, r: pd.DataFrame) -> Iterator[Group]:
        for phase in ("dispatch", "combine"):
            parts_us = ("avg_t",) if kind == "ll" else ("transmit", "notify")
            us = sum(r[f"{phase}_{x}_us"] for x in parts_us)
            size = A2A_BYTES["fp8"] if phase == "dispatch" else 2.0
            extra = {} if kind == "ll" else dict(sms=r["dispatch_sms"].to_numpy(float))
            yield _a2a_group(
                f"deepep_{kind}_{phase}", f"deepep_{kind}", r, us / 1e6, size,
                r["backend"].to_numpy(), "fp8" if phase == "dispatch" else "bf16",
                _ranks(system, r["node_num"]), m=r["num_token"].to_numpy(float),
                topk=r["num_topk"].to_numpy(float), hidden=r["hidden_size"].to_numpy(float),
                experts=r["num_experts"].to_numpy(float), nodes=r["node_num"].to_numpy(float),
                **extra,
            )  # fmt: skip

    return make
