"""Machine cards: chip, memory, links by tier, host, power, price, efficiencies and floors.

All rates are per GPU; link bandwidths are one direction; FLOP/s are dense.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from perfmodel.catalog import (
    Bytes,
    BytesPerSecond,
    Count,
    FlopsPerSecond,
    Number,
    Quantity,
    Ratio,
    Seconds,
    Usd,
    UsdPerHour,
    Watts,
)
from perfmodel.errors import InputError


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Chip(Part):
    name: str
    architecture: str
    peak_bf16: FlopsPerSecond
    peak_fp8: FlopsPerSecond | None = None
    peak_fp4: FlopsPerSecond | None = None


class Memory(Part):
    capacity: Bytes
    bandwidth: BytesPerSecond


class ScaleUp(Part):
    gpus: Count
    bandwidth: BytesPerSecond


class ScaleOut(Part):
    bandwidth: BytesPerSecond
    gpus_max: Count | None = None


class Host(Part):
    bandwidth: BytesPerSecond
    memory: Bytes


class Layout(Part):
    gpus_per_node: Count
    gpus_per_rack: Count


class Power(Part):
    chip: Watts
    rack_it: Watts
    all_in: Watts
    all_in_old: Watts | None = None
    pue: Count


class Price(Part):
    owned: UsdPerHour | None = None
    neocloud: UsdPerHour | None = None
    rental: UsdPerHour | None = None
    capex: Usd | None = None


class Efficiency(Part):
    """Achieved share of the peak, by operator class and precision."""

    gemm_bf16: Ratio
    gemm_fp8: Ratio
    gemm_fp4: Ratio | None = None
    moe_bf16: Ratio
    moe_fp8: Ratio
    moe_fp4: Ratio | None = None
    attention_prefill_bf16: Ratio
    attention_prefill_fp8: Ratio
    attention_decode_bf16: Ratio
    attention_decode_fp8: Ratio
    hbm_gemm: Ratio
    hbm_moe: Ratio
    hbm_attention: Ratio
    hbm_stream: Ratio
    link_all_reduce: Ratio
    link_all_to_all: Ratio
    link_scale_out: Ratio


class Floors(Part):
    """Latency floors, and the rows of tile padding each touched expert costs."""

    kernel: Seconds
    all_reduce: Seconds
    all_to_all: Seconds
    scale_out: Seconds
    send: Seconds
    step: Seconds
    tile_rows: Number


class System(Part):
    """A whole machine card."""

    id: str
    name: str
    vendor: str
    summary: str
    profile: Literal["as sold", "vendor claim", "conservative"]
    date: str
    notes: list[str] = []
    sources: dict[str, str]
    chip: Chip
    memory: Memory
    scale_up: ScaleUp
    scale_out: ScaleOut
    host: Host
    layout: Layout
    power: Power
    price: Price
    efficiency: Efficiency
    floors: Floors

    def quantities(self) -> dict[str, Quantity]:
        """Every number of the card by dotted path."""
        out = {}
        for section in type(self).model_fields:
            part = getattr(self, section)
            if isinstance(part, Part):
                for name in type(part).model_fields:
                    if isinstance(q := getattr(part, name), Quantity):
                        out[f"{section}.{name}"] = q
        return out

    def field(self, path: str) -> Quantity:
        """The number at `path` ("memory.bandwidth"); raises InputError naming the known ones."""
        q = self.quantities().get(path)
        if q is None:
            raise InputError(
                f"{self.id}: no number at {path!r}; known: {', '.join(self.quantities())}"
            )
        return q
