"""The kernel ring of validation: measured kernel times beside what the step predicts for them.

Each table becomes groups of rows that share operators. The operators are those of the step (the
family formulas, mostly through the same builder), and their times come from the same code as the
step's, so a change of a formula or of a machine card shows here. The tables stay outside the
project; `read` takes the folder that holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import sympy as sp

from perfmodel import step as _step
from perfmodel.api import load_model, load_system
from perfmodel.errors import CardError, InputError
from perfmodel.model import Model
from perfmodel.operators import families as fam
from perfmodel.operators import feedforward
from perfmodel.operators.builder import Builder, Op
from perfmodel.roofline import machine_numbers
from perfmodel.symbolic import Chain, smaller, symbol
from perfmodel.validation import errors

# Systems of the tables, and the card of each; a system whose card does not exist is left out.
CARDS = {
    "h200_sxm": "h200-nvl8",
    "b200_sxm": "b200-nvl8",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
}
FP4_SYSTEMS = ("b200_sxm", "gb200", "gb300")

# The columns that the readers use, by table.
TABLES: dict[str, tuple[str, ...]] = {
    "op_points": ("system", "backend", "family", "shape", "latency_ms", "source"),
    "mla_generation": ("system", "backend", "kv_cache_dtype", "num_heads", "batch_size", "step",
                       "latency"),
    "moe": ("system", "backend", "kernel_source", "moe_dtype", "num_tokens", "hidden_size",
            "inter_size", "topk", "num_experts", "moe_ep_size", "distribution", "latency"),
    "wideep_moe": ("system", "backend", "op_name", "moe_dtype", "num_tokens", "hidden_size",
                   "inter_size", "topk", "num_experts", "num_slots", "moe_ep_size",
                   "distribution", "latency"),
    "megamoe": ("system", "backend", "phase", "num_tokens", "global_num_tokens", "hidden_size",
                "inter_size", "topk", "num_experts", "moe_ep_size", "distribution", "latency"),
    "dsv4_generation": ("system", "backend", "model", "gemm_type", "batch_size", "tp_size", "step",
                        "compress_ratio", "latency"),
    "mhc": ("system", "backend", "op_name", "num_tokens", "num_sites", "latency"),
    "kda": ("system", "backend", "kernel_source", "phase", "batch_size", "seq_len", "num_tokens",
            "num_v_heads", "latency"),
    "custom_allreduce": ("system", "backend", "kernel_source", "num_gpus", "message_size",
                         "latency"),
    "nccl": ("system", "op_name", "num_gpus", "message_size", "latency"),
    "moe_a2a": ("system", "comm_backend", "phase", "comm_dtype", "ep_size", "hidden_size", "topk",
                "num_experts", "num_tokens", "latency"),
    "deepep_ll": ("system", "node_num", "hidden_size", "num_token", "num_topk", "num_experts",
                  "combine_avg_t_us", "dispatch_avg_t_us"),
    "deepep_normal": ("system", "node_num", "hidden_size", "num_token", "num_topk", "num_experts",
                      "dispatch_sms", "dispatch_transmit_us", "dispatch_notify_us",
                      "combine_transmit_us", "combine_notify_us"),
}  # fmt: skip


@dataclass(frozen=True)
class Exclusion:
    """Rows of a table that are not measurements of what they name: `where` is a pandas query."""

    table: str
    where: str
    reason: str


EXCLUDED = (
    Exclusion("op_points", "source != source",
              "no measurement: the tool has none for this point"),
    Exclusion("op_points", "source in ['estimated', 'empirical']",
              "estimated or interpolated by the tool that ships the table, not measured"),
    Exclusion("op_points", "family == 'gemm' and system == 'gb300' and backend == 'vllm'"
              " and shape.str.endswith('fp8_block')",
              "known bad: small GEMMs of 55-240 us, an artefact of the benchmark"),
    Exclusion("op_points", "family == 'generation_mla' and system == 'h200_sxm'"
              " and backend == 'sglang'",
              "known bad: H200 SGLang MLA decode"),
    Exclusion("mla_generation", "system == 'h200_sxm' and backend == 'sglang'",
              "known bad: H200 SGLang MLA decode"),
)  # fmt: skip


@dataclass
class Group:
    """Rows of one table that share operators.

    `frame` has the tidy columns; `inputs` binds the free symbols of the operators' formulas to
    columns of equal length.
    """

    frame: pd.DataFrame
    ops: list[Op]
    inputs: dict[str, Any] = field(default_factory=dict)


def read(folder: str | Path, tables: Sequence[str] = tuple(TABLES)) -> dict[str, pd.DataFrame]:
    """The tables of `folder`, without the rows of EXCLUDED.

    Raises InputError when the folder or a table is missing, or a table lacks a column, holds no
    rows, or a time in it is not a positive number.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"kernel tables: {folder} is not a folder")
    out = {}
    for name in tables:
        if name not in TABLES:
            raise InputError(f"kernel table: {name!r} is unknown; known: {', '.join(TABLES)}")
        out[name] = _read_table(folder / f"{name}.csv", name)
    return out


def _read_table(path: Path, name: str) -> pd.DataFrame:
    try:
        df = pd.read_csv(path)
    except FileNotFoundError:
        raise InputError(f"kernel tables: {path} is not there") from None
    except (OSError, ValueError, pd.errors.ParserError) as e:
        raise InputError(f"kernel tables: {path} cannot be read: {e}") from e
    if missing := [c for c in TABLES[name] if c not in df.columns]:
        raise InputError(f"kernel tables: {path} lacks the columns {', '.join(missing)}")
    if df.empty:
        raise InputError(f"kernel tables: {path} holds no rows")
    for x in EXCLUDED:
        if x.table == name:
            df = df[~np.asarray(df.eval(x.where, engine="python"), dtype=bool)]
    times = [c for c in TABLES[name] if c.startswith("latency") or c.endswith(("_t_us", "mit_us"))]
    for c in times:
        values = pd.to_numeric(df[c], errors="coerce")
        wrong = df.index[~(values > 0) | ~np.isfinite(values)]
        if len(wrong):
            raise InputError(
                f"kernel tables: {path}: {len(wrong)} rows of {c} are not positive numbers; "
                f"the first is in line {wrong[0] + 2}"
            )
    return df.reset_index(drop=True)


def groups(tables: dict[str, pd.DataFrame]) -> Iterator[Group]:
    """Every group of every table that the family formulas can express."""
    for name, df in tables.items():
        for system, rows in _split(df, "system", sort=True):
            for make in READERS[name]:
                yield from make(str(system), rows)


def ring(folder: str | Path, mode: str = "calibrated") -> pd.DataFrame:
    """Every row with its measured and predicted seconds.

    Columns: op, chip (card id), system, precision, engine, regime, sizes by table (NaN where a
    table has none), measured_s, predicted_s, table. Systems without a card are left out.
    """
    machines = {s: m for s in CARDS if (m := machine_of(s, mode)) is not None}
    out = []
    for g in groups(read(folder)):
        system = g.frame["system"].iloc[0]
        if system in machines:
            out.append(g.frame.assign(predicted_s=seconds(g, machines[system])))
    df = pd.concat(out, ignore_index=True)
    first = ["op", "chip", "system", "precision", "engine", "regime"]
    last = ["measured_s", "predicted_s", "table"]
    return df[first + [c for c in df.columns if c not in first + last] + last]


def error_table(df: pd.DataFrame, by: Sequence[str] = ("op", "chip")) -> pd.DataFrame:
    """`errors.error_table` of a ring's frame. Raises InputError when it lacks a column."""
    return errors.error_table(df, by, "measured_s", "predicted_s")


def seconds(group: Group, machine: dict[str, float]) -> np.ndarray:
    """Predicted seconds of each row: the sum of its operators, timed as the step times them."""
    chain = Chain("kernels")
    _step.declare(chain)
    _declare_free(chain, group.ops)
    for i, op in enumerate(group.ops):
        _step.op_time(chain, f"o{i}", op)
    names = [f"o{i}_t" for i in range(len(group.ops))]
    given = {**dict.fromkeys(chain.inputs, TINY), **machine, **_defaults(), **group.inputs}
    times = chain.compile(*names)(**given)
    total = sum(times.values())
    return np.broadcast_to(np.asarray(total, dtype=float), (len(group.frame),)).copy()


def parts(group: Group, tile_rows: float = 0.0) -> list[dict[str, Any]]:
    """Per operator: its counts (flops, weight_bytes, kv_bytes, act_bytes, touched, pairs, m) by
    row, its kernels, rate and classes: what a fit of machine numbers needs."""
    chain = Chain("kernels")
    _step.declare(chain)
    _declare_free(chain, group.ops)
    wanted = ("flops", "weight_bytes", "kv_bytes", "act_bytes", "message_bytes", "touched", "pairs")
    names: dict[tuple[int, str], str] = {}
    for i, op in enumerate(group.ops):
        for what in wanted:
            if what in op.formulas.defs:
                names[i, what] = f"o{i}_{what}"
                chain.define(names[i, what], "1", what, op.cost(what))
        if "m" in op.bindings:
            names[i, "m"] = f"o{i}_m"
            chain.define(names[i, "m"], "1", "rows", op.bindings["m"])
        names[i, "kernels"] = f"o{i}_kernels"
        chain.define(names[i, "kernels"], "1", "kernels", op.kernels)
    given = {
        **dict.fromkeys(chain.inputs, TINY),
        **dict.fromkeys((n for n in chain.inputs if n[:2] in ("W_", "P_", "e_")), 1.0),
        **_defaults(),
        "tau_tile_rows": tile_rows,
        **group.inputs,
    }
    values = chain.compile(*names.values())(**given) if names else {}
    out = []
    for i, op in enumerate(group.ops):
        row: dict[str, Any] = dict(
            name=op.name, rate=op.rate, compute_class=op.compute_class,
            memory_class=op.memory_class, link=op.link,
        )  # fmt: skip
        for what in (*wanted, "m", "kernels"):
            v = values[names[i, what]] if (i, what) in names else 0.0
            row[what] = np.broadcast_to(np.asarray(v, dtype=float), (len(group.frame),))
        out.append(row)
    return out


TINY = 1e-6  # for inputs of the step that no table has: none of it, and safe to divide by


def _defaults() -> dict[str, float]:
    """One GPU, one sequence, balanced: what a table does not vary."""
    one: tuple[str, ...] = ("B", "q", "tp", "dp", "pp", "ep", "etp", "dcp", "phi", "A", "b", "m")
    one += ("n_quantise_fp8", "n_quantise_fp4")  # as whole modules show
    return dict.fromkeys(one, 1.0)


def _declare_free(chain: Chain, ops: list[Op]) -> None:
    free = set()
    for op in ops:
        for what in op.formulas.defs:
            free |= {s.name for s in op.cost(what).free_symbols}
        for extra in (op.bindings.get("m", 0), op.kernels):
            free |= {s.name for s in sp.sympify(extra).free_symbols}
    for name in sorted(free - set(chain.inputs)):
        chain.input(name, "1", "column of the table")


def machine_of(system: str, mode: str = "calibrated") -> dict[str, float] | None:
    """The machine numbers of a system of the tables; None if it has no card."""
    try:
        card = load_system(CARDS[system])
    except CardError:
        raise
    except InputError:
        return None  # no such card
    return {k: v for k, (v, _) in machine_numbers(card, mode).items()}


# ---- helpers of the readers


def _split(rows: pd.DataFrame, by: Any, **how: Any) -> Any:
    """`groupby`, with keys of any type (its stubs know hashables only)."""
    return rows.groupby(by, **how)


def _frame(
    op: str, table: str, rows: pd.DataFrame, measured: Any, *, precision: Any, engine: Any,
    regime: Any, **sizes: Any,
) -> pd.DataFrame:  # fmt: skip
    system = rows["system"].iloc[0]
    return pd.DataFrame(
        {
            "op": op, "chip": CARDS.get(system, system), "system": system, "precision": precision,
            "engine": engine, "regime": regime, **sizes,
            "measured_s": np.asarray(measured, dtype=float), "table": table,
        }
    )  # fmt: skip


def _classed(values: Any, bounds: Sequence[float], names: Sequence[str]) -> np.ndarray:
    return np.asarray(names, dtype=object)[np.searchsorted(bounds, np.asarray(values, float))]


def _tokens_class(tokens: Any) -> np.ndarray:
    return _classed(tokens, (64, 1024), ("small", "medium", "large"))


def _context_class(batch: Any, context: Any) -> np.ndarray:
    size = _classed(np.asarray(batch, float) * np.asarray(context, float), (2**16, 2**20),
                    ("small", "medium", "large"))  # fmt: skip
    return size


def _bytes_class(size: Any) -> np.ndarray:
    return _classed(size, (2**16, 2**22), ("small", "medium", "large"))


def _shape(rows: pd.DataFrame, pattern: str) -> pd.DataFrame:
    """The named groups of `pattern` in the column `shape`, numbers where they are numbers."""
    found = rows["shape"].str.extract(pattern)
    for c in found.columns:
        numbers = pd.to_numeric(found[c], errors="coerce")
        if numbers.notna().all():
            found[c] = numbers
    return found


def _builder(weight: str, activation: str, phase: str = "decode", model: str = "deepseek-v4-pro",
             **cache: Any) -> Builder:  # fmt: skip
    """A builder whose every tensor has these formats; only its operators are used."""
    card = load_model(model)
    p = next(iter(card.precision.values()))
    p = p.model_copy(
        update=dict(
            weights={"default": weight},
            activations={"default": activation},
            cache=p.cache.model_copy(update=cache),
        )
    )
    return Builder(card, p, phase, layer_kind="kernel")


def _op_points(family: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    return lambda rows: rows[rows["family"] == family]


# ---- GEMM

GEMM_FORMATS = {
    "bfloat16": ("bf16", "bf16"),
    "fp8": ("fp8", "fp8"),
    "fp8_block": ("fp8_block", "fp8"),
    "nvfp4": ("nvfp4", "nvfp4"),
}


def _gemm(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    rows = rows[rows["family"] == "gemm"]
    at = _shape(rows, r"m=(?P<m>\d+) n=(?P<n>\d+) k=(?P<k>\d+) (?P<fmt>\w+)")
    for fmt, part in _split(at, "fmt"):
        r = rows.loc[part.index]
        b = _builder(*GEMM_FORMATS[fmt])
        b.linear("gemm", "attention", symbol("k_in"), symbol("k_out"), tokens=symbol("m"))  # type: ignore[arg-type]
        m, n, k = (part[c].to_numpy(float) for c in ("m", "n", "k"))
        yield Group(
            _frame("gemm", "op_points", r, r["latency_ms"] / 1e3, precision=fmt,
                   engine=r["backend"].to_numpy(), regime=_tokens_class(m), m=m, n=n, k=k),
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


def _gqa_decode(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    rows = rows[rows["family"] == "generation_attention"]
    at = _shape(
        rows, r"b=(?P<b>\d+) s=(?P<s>\d+) n=(?P<n>\d+) nkv=(?P<nkv>\d+) d=128 (?P<kv>\w+)kv"
    )
    for (n, nkv, kv), part in _split(at, ["n", "nkv", "kv"]):
        r = rows.loc[part.index]
        entry = 2 * nkv * 128 * (1 if kv == "fp8" else 2)
        b, s = part["b"].to_numpy(float), part["s"].to_numpy(float)
        yield Group(
            _frame("gqa_decode", "op_points", r, r["latency_ms"] / 1e3, precision=kv,
                   engine=r["backend"].to_numpy(), regime=_context_class(b, s), batch=b, context=s),
            [_core("core", decode=True, heads=n, d_qk=128, d_v=128, entry=entry, rate=kv)],
            dict(B=b, T=s, q=1.0),
        )  # fmt: skip


def _gqa_prefill(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    rows = rows[rows["family"] == "context_attention"]
    at = _shape(rows, r"b=(?P<b>\d+) s=(?P<s>\d+) n=(?P<n>\d+) nkv=(?P<nkv>\d+) d=128 (?P<p>\w+)")
    for (n, nkv, p), part in _split(at, ["n", "nkv", "p"]):
        r = rows.loc[part.index]
        b, s = part["b"].to_numpy(float), part["s"].to_numpy(float)
        yield Group(
            _frame("gqa_prefill", "op_points", r, r["latency_ms"] / 1e3, precision=p,
                   engine=r["backend"].to_numpy(), regime=_context_class(b, s), batch=b, context=s),
            [_core("core", decode=False, heads=n, d_qk=128, d_v=128, entry=4 * nkv * 128, rate=p)],
            dict(B=b, T=0.0, q=s),
        )  # fmt: skip


def _mla_prefill(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    rows = rows[rows["family"] == "context_mla"]
    at = _shape(rows, r"b=(?P<b>\d+) s=(?P<s>\d+) heads=(?P<n>\d+) (?P<p>\w+)")
    for (n, p), part in _split(at, ["n", "p"]):
        r = rows.loc[part.index]
        b, s = part["b"].to_numpy(float), part["s"].to_numpy(float)
        rate = "fp8" if p.startswith("fp8") else "bf16"
        entry = n * (192 + 128) * 2  # full heads, unfolded
        yield Group(
            _frame("mla_prefill", "op_points", r, r["latency_ms"] / 1e3, precision=rate,
                   engine=r["backend"].to_numpy(), regime=_context_class(b, s), batch=b, context=s,
                   heads=float(n)),
            [_core("core", decode=False, heads=n, d_qk=192, d_v=128, entry=entry, rate=rate)],
            dict(B=b, T=0.0, q=s),
        )  # fmt: skip


def _mla_decode_group(table: str, r: pd.DataFrame, measured: Any, kv: str, b: Any, s: Any,
                      heads: Any) -> Group:  # fmt: skip
    entry = 576 if kv == "fp8" else 1152
    return Group(
        _frame("mla_decode", table, r, measured, precision=kv, engine=r["backend"].to_numpy(),
               regime=_context_class(b, s), batch=b, context=s, heads=heads),
        [_core("core", decode=True, heads=symbol("k_heads"), d_qk=576, d_v=512, entry=entry,
               rate=kv)],
        dict(B=b, T=s, q=1.0, k_heads=heads),
    )  # fmt: skip


def _mla_decode(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    for dtype, r in _split(rows, "kv_cache_dtype"):
        kv = "fp8" if dtype == "fp8" else "bf16"
        b, s, h = (r[c].to_numpy(float) for c in ("batch_size", "step", "num_heads"))
        yield _mla_decode_group("mla_generation", r, r["latency"] / 1e3, kv, b, s + 1, h)


def _mla_decode_points(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    rows = rows[rows["family"] == "generation_mla"]
    at = _shape(rows, r"b=(?P<b>\d+) s=(?P<s>\d+) heads=(?P<n>\d+) (?P<kv>\w+)kv")
    for kv, part in _split(at, "kv"):
        r = rows.loc[part.index]
        b, s, h = (part[c].to_numpy(float) for c in ("b", "s", "n"))
        yield _mla_decode_group("op_points", r, r["latency_ms"] / 1e3, kv, b, s, h)


# ---- whole attention modules: projections, core, indexer, as in the step


def v4_flash() -> Model:
    """DeepSeek V4 Flash, as far as its attention goes: the Pro card with its own dims.

    Source: ai-dynamo/aiconfigurator, model_configs/deepseek-ai--DeepSeek-V4-Flash_config.json.
    """
    pro = load_model("deepseek-v4-pro")
    small = dict(heads=64, q_lora_rank=1024, o_groups=8, o_lora_rank=1024)
    attention = {}
    for name, a in pro.attention.items():
        update: dict[str, Any] = dict(small)
        if getattr(a, "indexer", None):
            update["indexer"] = a.indexer.model_copy(update=dict(top_k=512))  # type: ignore[union-attr]
        attention[name] = a.model_copy(update=update)
    shape = pro.shape.model_copy(update=dict(hidden_size=4096))
    return pro.model_copy(update=dict(id="deepseek-v4-flash", attention=attention, shape=shape))


def _module_ops(model: Model, precision: str, phase: str, kind: str) -> list[Op]:
    b = Builder(model, model.precision_named(precision), phase, layer_kind=kind)
    _step._attention(b, kind)
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


def _v4_decode(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    precision = "native" if system in FP4_SYSTEMS else "hopper"
    small = rows["model"].str.contains("Flash")
    for (ratio, gemm, flash), r in _split(rows, ["compress_ratio", "gemm_type", small]):
        kind = {4: "csa", 128: "hca"}[int(ratio)]
        model = v4_flash() if flash else load_model("deepseek-v4-pro")
        if gemm == "bfloat16":
            model = _with_weights(model, precision, "bf16")
        b, t, tp = (r[c].to_numpy(float) for c in ("batch_size", "step", "tp_size"))
        size = "flash" if flash else "pro"
        yield Group(
            _frame(f"v4_{kind}_decode", "dsv4_generation", r, r["latency"] / 1e3,
                   precision="bf16" if gemm == "bfloat16" else "fp8_block",
                   engine=r["backend"].to_numpy(), regime=_context_class(b, t), model=size,
                   batch=b, context=t + 1, tp=tp),
            _module_ops(model, precision, "decode", kind),
            dict(B=b, b=b, m=b, T=t + 1, q=1.0, tp=tp),
        )  # fmt: skip


def _v4_prefill(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    rows = rows[rows["family"].isin(["dsv4_CSA_context", "dsv4_HCA_context"])]
    precision = "native" if system in FP4_SYSTEMS else "hopper"
    at = _shape(rows, r"V4-Pro b=(?P<b>\d+) s=(?P<s>\d+) tp=(?P<tp>\d+)")
    for family, r in _split(rows, "family"):
        kind = "csa" if "CSA" in family else "hca"
        b, s, tp = (at.loc[r.index][c].to_numpy(float) for c in ("b", "s", "tp"))
        yield Group(
            _frame(f"v4_{kind}_prefill", "op_points", r, r["latency_ms"] / 1e3,
                   precision="fp8_block", engine=r["backend"].to_numpy(),
                   regime=_context_class(b, s), batch=b, context=s, tp=tp),
            _module_ops(load_model("deepseek-v4-pro"), precision, "prefill", kind),
            dict(B=b, b=b, m=b * s, T=0.0, q=s, tp=tp),
        )  # fmt: skip


def _dsa(family: str, phase: str) -> Callable[[str, pd.DataFrame], Iterator[Group]]:
    def make(system: str, rows: pd.DataFrame) -> Iterator[Group]:
        r = rows[rows["family"] == family]
        if r.empty:
            return
        at = _shape(r, r"b=(?P<b>\d+) s=(?P<s>\d+) heads=(?P<n>\d+)")
        b, s, n = (at[c].to_numpy(float) for c in ("b", "s", "n"))
        model = load_model("deepseek-v3.2")
        if family.startswith("mla_module"):  # the dense parent: V3, FP8 cache
            a = model.attention["dsa"].model_copy(update=dict(indexer=None))
            model = model.model_copy(update=dict(attention={"dsa": a}))
        name = family.replace("generation", "decode").replace("context", "prefill")
        inputs: dict[str, Any] = dict(B=b, b=b, tp=128 / n)
        inputs |= dict(m=b, T=s, q=1.0) if phase == "decode" else dict(m=b * s, T=0.0, q=s)
        yield Group(
            _frame(name, "op_points", r, r["latency_ms"] / 1e3, precision="fp8_block",
                   engine=r["backend"].to_numpy(), regime=_context_class(b, s), batch=b, context=s,
                   tp=128 / n),
            _module_ops(model, "native", phase, "dsa"),
            inputs,
        )  # fmt: skip

    return make


def _mhc(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    model = load_model("deepseek-v4-pro")
    b = Builder(model, model.precision_named("native"), "decode", layer_kind="residual")
    _step.misc.residual(b)
    h, n = model.shape.hidden_size, model.residual.streams or 1  # type: ignore[union-attr]
    for op_name, r in _split(rows, "op_name"):
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
            _frame(f"mhc_{op_name}", "mhc", r, r["latency"] / 1e3, precision="bf16",
                   engine=r["backend"].to_numpy(), regime=_tokens_class(m), m=m),
            ops,
            dict(m=m),
        )  # fmt: skip


def _kda(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    model = load_model("kimi-k3")
    for (phase, kernel), r in _split(rows, ["phase", "kernel_source"]):
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
            _frame(f"kda_{part}_{what}", "kda", r, r["latency"] / 1e3, precision="bf16",
                   engine=r["backend"].to_numpy(), regime=_tokens_class(b * s), kernel=kernel,
                   batch=b, context=s, tp=96 / n),
            [ops[x] for x in names],
            dict(B=b, b=b, m=b * s, T=s, q=s, tp=96 / n),
        )  # fmt: skip


# Kernels that hold the convolution as well.
FUSED_KDA = ("kda_fused_decode", "fused_kda_decode", "fused_kda_decode_mtp_dspark")


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
    b = _builder(*MOE_FORMATS[fmt])
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


def _moe(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    even_rows = rows["distribution"].isin(["balanced", "uniform"])
    keys = ["hidden_size", "inter_size", "topk", "num_experts"]
    for (*dims, fmt, even), r in _split(rows, [*keys, "moe_dtype", even_rows]):
        m, ep = (r[c].to_numpy(float) for c in ("num_tokens", "moe_ep_size"))
        yield Group(
            _frame("moe", "moe", r, r["latency"] / 1e3, precision=fmt,
                   engine=(r["backend"] + "/" + r["kernel_source"]).to_numpy(),
                   regime=_tokens_class(m), model=f"{dims[3]}x{dims[2]}", m=m, ep=ep,
                   distribution=r["distribution"].to_numpy()),
            _moe_ops(tuple(int(x) for x in dims), fmt, bool(even)),
            dict(M=m, m=m, ep=ep),
        )  # fmt: skip


def _wideep(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    """Experts of one rank; the tokens of these tables are those of the whole expert group."""
    even_rows = rows["distribution"].isin(["balanced", "uniform"])
    keys = ["hidden_size", "inter_size", "topk", "num_experts"]
    for (*dims, fmt, even, op_name), r in _split(rows, [*keys, "moe_dtype", even_rows, "op_name"]):
        m, ep = (r[c].to_numpy(float) for c in ("num_tokens", "moe_ep_size"))
        yield Group(
            _frame(op_name if op_name.startswith("wideep") else f"deepep_{op_name}", "wideep_moe",
                   r, r["latency"] / 1e3, precision=fmt, engine=r["backend"].to_numpy(),
                   regime=_tokens_class(m / ep), model=f"{dims[3]}x{dims[2]}", m=m / ep,
                   ep=ep, slots=r["num_slots"].to_numpy(float),
                   distribution=r["distribution"].to_numpy()),
            _moe_ops(tuple(int(x) for x in dims), fmt, bool(even)),
            dict(M=m, m=m / ep, ep=ep),
        )  # fmt: skip


def _megamoe(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    even_rows = rows["distribution"] == "balanced"
    keys = ["hidden_size", "inter_size", "topk", "num_experts"]
    for (*dims, even, phase), r in _split(rows, [*keys, even_rows, "phase"]):
        m, total, ep = (
            r[c].to_numpy(float) for c in ("num_tokens", "global_num_tokens", "moe_ep_size")
        )
        yield Group(
            _frame("megamoe", "megamoe", r, r["latency"] / 1e3, precision="w4a8_mxfp4_mxfp8",
                   engine=r["backend"].to_numpy(), regime=_tokens_class(m),
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
    b = _builder("bf16", "bf16")
    b.collective("collective", link, symbol("k_payload"), symbol("k_group"), crossings)
    return b.ops


def _all_reduce(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    g = rows["num_gpus"].to_numpy(float)
    x = rows["message_size"].to_numpy(float) * 2  # elements of BF16
    eager = rows["kernel_source"].str.endswith("eager")
    yield Group(
        _frame("all_reduce", "custom_allreduce", rows, rows["latency"] / 1e3, precision="bf16",
               engine=rows["kernel_source"].to_numpy(),
               regime=np.where(eager, "eager", _bytes_class(x)), payload=x, group=g),
        _reduce_ops(),
        dict(k_payload=x, k_group=g),
    )  # fmt: skip


def _reduce_ops() -> list[Op]:
    b = _builder("bf16", "bf16")
    b.reduce("collective", symbol("k_payload"), symbol("k_group"))
    return b.ops


def _nccl(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    for name, r in _split(rows, "op_name"):
        g = r["num_gpus"].to_numpy(float)
        x = r["message_size"].to_numpy(float) * 2
        reduce = name == "all_reduce"
        yield Group(
            _frame(f"nccl_{name}", "nccl", r, r["latency"] / 1e3, precision="bf16",
                   engine="nccl", regime=_bytes_class(x), payload=x, group=g),
            _reduce_ops() if reduce else _collective_ops("all_to_all", 1),
            dict(k_payload=x, k_group=g),
        )  # fmt: skip


def _a2a_group(op: str, table: str, r: pd.DataFrame, measured: Any, value_bytes: float, engine: Any,
               precision: str, ranks: Any, **sizes: Any) -> Group:  # fmt: skip
    m, k, h = sizes["m"], sizes["topk"], sizes["hidden"]
    x = m * k * h * value_bytes
    return Group(
        _frame(op, table, r, measured, precision=precision, engine=engine,
               regime=_classed(m, (64, 512), ("small", "medium", "large")), payload=x, group=ranks,
               **sizes),
        _collective_ops("all_to_all", 1),
        dict(k_payload=x, k_group=ranks),
    )  # fmt: skip


A2A_BYTES = {"bfloat16": 2.0, "fp8": 1.03125, "nvfp4": 0.5625, "fp4": 0.5625}


def _moe_a2a(system: str, rows: pd.DataFrame) -> Iterator[Group]:
    for (backend, phase, fmt), r in _split(rows, ["comm_backend", "phase", "comm_dtype"]):
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


def _deepep(kind: str) -> Callable[[str, pd.DataFrame], Iterator[Group]]:
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


READERS: dict[str, tuple[Callable[[str, pd.DataFrame], Iterator[Group]], ...]] = {
    "op_points": (
        _gemm, _gqa_decode, _gqa_prefill, _mla_prefill, _mla_decode_points, _v4_prefill,
        _dsa("dsa_generation", "decode"), _dsa("dsa_context", "prefill"),
        _dsa("mla_module_generation", "decode"), _dsa("mla_module_context", "prefill"),
    ),
    "mla_generation": (_mla_decode,),
    "moe": (_moe,),
    "wideep_moe": (_wideep,),
    "megamoe": (_megamoe,),
    "dsv4_generation": (_v4_decode,),
    "mhc": (_mhc,),
    "kda": (_kda,),
    "custom_allreduce": (_all_reduce,),
    "nccl": (_nccl,),
    "moe_a2a": (_moe_a2a,),
    "deepep_ll": (_deepep("ll"),),
    "deepep_normal": (_deepep("normal"),),
}  # fmt: skip
