"""The kernel ring of validation: measured kernel times beside what the step predicts for them.

Each table becomes groups of rows that share operators. The operators are those of the step (the
family formulas, mostly through the same builder), and their times come from the same code as the
step's, so a change of a formula or of a machine card shows here. The tables stay outside the
project; `read` takes the folder that holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import sympy as sp

from perfmodel import step
from perfmodel.api import load_system
from perfmodel.errors import CardError, InputError
from perfmodel.operators.builder import Op
from perfmodel.roofline import machine_numbers
from perfmodel.symbolic import Chain
from perfmodel.validation import errors
from perfmodel.validation import kernel_attention as attention
from perfmodel.validation import kernel_experts as experts
from perfmodel.validation.kernel_tables import CARDS, EXCLUDED, TABLES, Group, read, split

__all__ = [
    "CARDS",
    "EXCLUDED",
    "TABLES",
    "Group",
    "error_table",
    "groups",
    "machine_of",
    "parts",
    "read",
    "ring",
    "seconds",
]


def groups(tables: dict[str, pd.DataFrame]) -> Iterator[Group]:
    """Every group of every table that the family formulas can express."""
    for name, df in tables.items():
        for system, rows in split(df, "system", sort=True):
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
    step.declare(chain)
    _declare_free(chain, group.ops)
    for i, op in enumerate(group.ops):
        step.op_time(chain, f"o{i}", op)
    names = [f"o{i}_t" for i in range(len(group.ops))]
    given = {**dict.fromkeys(chain.inputs, TINY), **machine, **_defaults(), **group.inputs}
    times = chain.compile(*names)(**given)
    total = sum(times.values())
    return np.broadcast_to(np.asarray(total, dtype=float), (len(group.frame),)).copy()


def parts(group: Group, tile_rows: float = 0.0) -> list[dict[str, Any]]:
    """Per operator: its counts (flops, weight_bytes, kv_bytes, act_bytes, touched, pairs, m) by
    row, its kernels, rate and classes: what a fit of machine numbers needs."""
    chain = Chain("kernels")
    step.declare(chain)
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


READERS: dict[str, tuple[Callable[[str, pd.DataFrame], Iterator[Group]], ...]] = {
    "op_points": (
        attention.gemm, attention.gqa_decode, attention.gqa_prefill, attention.mla_prefill,
        attention.mla_decode_points, attention.v4_prefill,
        attention.dsa("dsa_generation", "decode"), attention.dsa("dsa_context", "prefill"),
        attention.dsa("mla_module_generation", "decode"), attention.dsa("mla_module_context", "prefill"),
    ),
    "mla_generation": (attention.mla_decode,),
    "moe": (experts.moe,),
    "wideep_moe": (experts.wideep,),
    "megamoe": (experts.megamoe,),
    "dsv4_generation": (attention.v4_decode,),
    "mhc": (attention.mhc,),
    "kda": (attention.kda,),
    "custom_allreduce": (experts.all_reduce,),
    "nccl": (experts.nccl,),
    "moe_a2a": (experts.moe_a2a,),
    "deepep_ll": (experts.deepep("ll"),),
    "deepep_normal": (experts.deepep("normal"),),
}  # fmt: skip
