"""Measured kernel tables: reading, what is left out of them, and rows as groups with operators.

The tables stay outside the project; `read` takes the folder that holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perfmodel.api import load_model
from perfmodel.errors import InputError
from perfmodel.operators.builder import Builder, Op

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


def split(rows: pd.DataFrame, by: Any, **how: Any) -> Any:
    """`groupby`, with keys of any type (its stubs know hashables only)."""
    return rows.groupby(by, **how)


def tidy(
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


def classed(values: Any, bounds: Sequence[float], names: Sequence[str]) -> np.ndarray:
    return np.asarray(names, dtype=object)[np.searchsorted(bounds, np.asarray(values, float))]


def tokens_class(tokens: Any) -> np.ndarray:
    return classed(tokens, (64, 1024), ("small", "medium", "large"))


def context_class(batch: Any, context: Any) -> np.ndarray:
    size = classed(np.asarray(batch, float) * np.asarray(context, float), (2**16, 2**20),
                    ("small", "medium", "large"))  # fmt: skip
    return size


def bytes_class(size: Any) -> np.ndarray:
    return classed(size, (2**16, 2**22), ("small", "medium", "large"))


def shape_columns(rows: pd.DataFrame, pattern: str) -> pd.DataFrame:
    """The named groups of `pattern` in the column `shape`, numbers where they are numbers."""
    found = rows["shape"].str.extract(pattern)
    for c in found.columns:
        numbers = pd.to_numeric(found[c], errors="coerce")
        if numbers.notna().all():
            found[c] = numbers
    return found


def plain_builder(weight: str, activation: str, phase: str = "decode", model: str = "deepseek-v4-pro",
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


def op_points(family: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    return lambda rows: rows[rows["family"] == family]
