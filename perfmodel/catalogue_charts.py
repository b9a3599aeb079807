"""The catalogue's charts, from the frames of `perfmodel.catalogue`."""

from __future__ import annotations

from typing import Any

import pandas as pd

from perfmodel import api
from perfmodel.catalogue import CAPEX, PRICES, kilo, pick, total_of
from perfmodel.catalogue_marks import bars, by_value, dots, stacked
from perfmodel.show import number

FAMILIES = {  # tensor class: what the bar of weights shows together
    "experts": "routed experts",
    "shared": "shared and dense FFN",
    "dense": "shared and dense FFN",
    "attention": "attention",
    "attention_out": "attention",
    "compressor": "attention",
    "indexer": "attention",
    "head": "head and embedding",
    "embedding": "head and embedding",
    "vision": "vision tower",
    "engram_tables": "tables in host memory",
}
OTHER = "router, latent, residual, other"
FAMILY_ORDER = (*dict.fromkeys(FAMILIES.values()), OTHER)


def ridge_chart(frame: pd.DataFrame) -> Any:
    """Ridge points of machines, one mark a precision."""
    rows = pick(frame, "ridge")
    return dots(
        rows, title="Ridge point (FLOP per byte of HBM)", unit="FLOP/B",
        series=list(dict.fromkeys(rows["part"])), legend="Precision",
        description="Dot chart: ridge point of each machine, in FLOP per byte, by precision.",
    )  # fmt: skip


def bytes_per_flop_chart(frame: pd.DataFrame, precision: str) -> Any:
    """Bytes that memory and links move per FLOP at a precision's peak."""
    rows = pick(frame, "bytes_per_flop", precision=precision)
    return dots(
        rows, title=f"Bytes per 1000 FLOP at the {precision.upper()} peak", unit="B/kFLOP",
        scale=1e3, series=list(dict.fromkeys(rows["part"])), legend="Tier",
        order=by_value(pick(rows, "bytes_per_flop", part="HBM")),
        description="Dot chart: bytes per thousand FLOP of memory, scale-up and scale-out links.",
    )  # fmt: skip


def memory_size_chart(frame: pd.DataFrame) -> Any:
    """HBM of one GPU and of all in a scale-up domain."""
    rows = pick(frame, "memory")
    return dots(
        rows, title="HBM (GB)", unit="GB", scale=1e-9, series=["one GPU", "scale-up domain"],
        legend="HBM of", description="Dot chart: HBM of one GPU and of its scale-up domain, in GB.",
    )  # fmt: skip


def power_chart(frame: pd.DataFrame, precision: str, power_set: str) -> Any:
    """Watts per TFLOP/s at a precision and per TB/s, in a named power set."""
    flops = pick(frame, "power_per_flops", precision=precision)
    return bars(
        [
            (f"W per TFLOP/s, {precision.upper()} peak", flops, 1e12, "W/(TFLOP/s)"),
            ("W per TB/s of HBM", pick(frame, "power_per_bandwidth"), 1e12, "W/(TB/s)"),
        ],
        description=f"Bar chart: power per peak and per bandwidth; {api.POWER_BASES[power_set]}.",
    )


def price_chart(frame: pd.DataFrame, precision: str, price_set: str) -> Any:
    """Dollars per PFLOP/s at a precision and per TB/s, in a named price set."""
    flops = pick(frame, "price_per_flops", precision=precision)
    money = "USD" if price_set == CAPEX else "USD/h"
    return bars(
        [
            (f"{money} per PFLOP/s, {precision.upper()} peak", flops, 1e15, f"{money}/(PFLOP/s)"),
            (
                f"{money} per TB/s of HBM",
                pick(frame, "price_per_bandwidth"),
                1e12,
                f"{money}/(TB/s)",
            ),
        ],
        description=f"Bar chart: price per peak and per bandwidth; {PRICES[price_set]}.",
    )


def parameters_chart(frame: pd.DataFrame) -> Any:
    """Total and active parameters, computed."""
    rows = frame[frame["metric"].isin(["total", "active"])]
    return dots(
        rows, by="metric", series=["active", "total"], title="Parameters (billions)", unit="G",
        scale=1e-9, legend="Parameters",
        description="Dot chart: active and total parameters of each model, in billions.",
    )  # fmt: skip


def _over_contexts(
    rows: pd.DataFrame, title: str, description: str, unit: str, scale: float, nested: bool = False
) -> Any:
    rows = rows.assign(at=[kilo(t) for t in rows["context"]])
    at = [kilo(t) for t in sorted(set(rows["context"]))]
    return dots(
        rows, by="at", series=at, title=title, unit=unit, scale=scale, legend="Context (tokens)",
        nested=nested, description=description,
    )  # fmt: skip


def kv_chart(frame: pd.DataFrame) -> Any:
    """Cache bytes that grow with the context, resident per token of context."""
    return _over_contexts(
        pick(frame, "kv_per_token"), "KV cache (kB per token of context, resident)",
        "Dot chart: resident KV bytes per token of context, by context length.", "kB/token", 1e-3,
        nested=True,  # but for windows and compressed caches it is one number at every context
    )  # fmt: skip


def read_chart(frame: pd.DataFrame) -> Any:
    """Cache bytes moved for one decoded token, by context."""
    return _over_contexts(
        total_of(pick(frame, "read")), "Cache moved per decoded token (MB)",
        "Dot chart: cache bytes read per decoded token, by context length.", "MB/token", 1e-6,
    )  # fmt: skip


FLOP_GROUPS = {"linear": "weights", "core": "attention over the cache", "indexer": "indexer"}


def flops_chart(frame: pd.DataFrame, context: int) -> Any:
    """FLOPs of one decoded token at a context, by what they are spent on."""
    rows = pick(frame, "flops", context=context)
    rows["group"] = [FLOP_GROUPS.get(p, p) or "weights" for p in rows["part"]]
    return stacked(
        rows, title=f"GFLOP per decoded token, {kilo(context)} context", unit="GFLOP", scale=1e-9,
        groups=list(dict.fromkeys([*FLOP_GROUPS.values(), *rows["group"]])),
        description="Stacked bar chart: FLOPs of a decoded token on weights, cache and indexer.",
    )  # fmt: skip


def weights_chart(frame: pd.DataFrame, share: bool = True) -> Any:
    """Weights by tensor class, as shares of the whole or in GB."""
    rows = pick(frame, "weights")
    rows["group"] = [FAMILIES.get(p, OTHER) for p in rows["part"]]
    count = pick(frame, "parameters").set_index(["id", "part"])["value"]
    keys = zip(rows["id"], rows["part"], rows["value"], strict=True)
    rows["each"] = [f"{number(size / count[card, part])} B" for card, part, size in keys]
    return stacked(
        rows, tips=[("each", "A parameter")], unit="GB",
        title="Share of the weights' bytes" if share else "Weights (GB)",
        scale=1e-9, groups=FAMILY_ORDER, share=share,
        description="Stacked bar chart: bytes of the weights of each model by tensor class.",
    )  # fmt: skip
