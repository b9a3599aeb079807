"""Machine cards: chip, memory, links by tier, host, power, price, efficiencies and floors.

All rates are per GPU; link bandwidths are one direction; FLOP/s are dense. SI units inside.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, model_validator

from perfmodel.catalog import (
    Bytes,
    BytesPerSecond,
    Date,
    Factor,
    FlopsPerSecond,
    Id,
    MemoryBandwidth,
    Number,
    Quantity,
    Ratio,
    Seconds,
    Share,
    Slips,
    Text,
    Usd,
    UsdPerHour,
    Watts,
    Whole,
)
from perfmodel.errors import InputError


class Part(BaseModel):
    """A table of a card: fixed once read, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Chip(Part):
    """Dense peaks; a peak that is left out means the chip lacks that precision."""

    name: Text
    architecture: Text
    peak_bf16: FlopsPerSecond
    peak_fp8: FlopsPerSecond | None = None
    peak_fp4: FlopsPerSecond | None = None


class Memory(Part):
    """HBM: usable capacity and specified bandwidth."""

    capacity: Bytes
    bandwidth: MemoryBandwidth


class ScaleUp(Part):
    """The NVLink domain: how many GPUs, and each one's bandwidth in one direction."""

    gpus: Whole
    bandwidth: BytesPerSecond


class ScaleOut(Part):
    """The network between domains, one GPU's share in one direction."""

    bandwidth: BytesPerSecond
    gpus_max: Whole | None = None


class Host(Part):
    """CPU memory: one GPU's share of capacity and of the link, one direction."""

    bandwidth: BytesPerSecond
    memory: Bytes


class Layout(Part):
    gpus_per_node: Whole
    gpus_per_rack: Whole


class Power(Part):
    """Watts per GPU: the chip, all IT of the rack, all of the site (newer and older analyst set).

    PUE: site power over IT power. A number that nobody has published is left out; metrics that
    need it are then refused.
    """

    chip: Watts | None = None
    rack_it: Watts | None = None
    all_in: Watts | None = None
    all_in_old: Watts | None = None
    pue: Factor | None = None


class Price(Part):
    """Per GPU: hourly cost to a hyperscaler, to a neocloud, as a 3-year rental; purchase price.

    Those that end in _old are of the older analyst set, which goes with `power.all_in_old`.
    """

    owned: UsdPerHour | None = None
    neocloud: UsdPerHour | None = None
    rental: UsdPerHour | None = None
    owned_old: UsdPerHour | None = None
    neocloud_old: UsdPerHour | None = None
    rental_old: UsdPerHour | None = None
    capex: Usd | None = None


class Efficiency(Part):
    """Achieved share of the peak, by operator class and precision.

    hbm_moe, hbm_moe_4bit: weights of experts, wide and of 4 bits. hbm_sparse: gathered cache
    entries (sparse attention). hbm_scan: the passes of a recurrent prefill. moe_fused,
    hbm_moe_fused: the expert kernel that holds dispatch and combine (MegaMoE), where there is one.
    unhidden: share of the smaller of compute and memory time that does not overlap
    (unhidden_attention: in decode attention). link_all_reduce is the two-shot one,
    link_all_reduce_one the one-shot.
    """

    gemm_bf16: Ratio
    gemm_fp8: Ratio | None = None
    gemm_fp4: Ratio | None = None
    moe_bf16: Ratio
    moe_fp8: Ratio | None = None
    moe_fp4: Ratio | None = None
    attention_prefill_bf16: Ratio
    attention_prefill_fp8: Ratio | None = None
    attention_decode_bf16: Ratio
    attention_decode_fp8: Ratio | None = None
    hbm_gemm: Ratio
    hbm_moe: Ratio
    hbm_moe_4bit: Ratio
    hbm_attention: Ratio
    moe_fused: Ratio | None = None
    hbm_moe_fused: Ratio | None = None
    hbm_stream: Ratio
    hbm_sparse: Ratio
    hbm_scan: Ratio
    unhidden: Share
    unhidden_attention: Share
    link_all_reduce_one: Ratio
    link_all_reduce: Ratio
    link_all_to_all: Ratio
    link_scale_out: Ratio


class Floors(Part):
    """Latencies that no bandwidth hides, and sizes below which a kernel works in vain.

    all_reduce: one-shot; all_reduce_two: two-shot; all_reduce_rank: of each rank beyond two.
    tile_rows: rows of padding that each touched expert costs. context_decode, context_prefill:
    cache entries of padding that an attention core computes. sparse_heads: heads that a sparse
    prefill core computes at least. scan_token: a token's turn in a recurrent prefill.
    fused: the fused expert kernel.
    """

    kernel: Seconds
    all_reduce: Seconds
    all_reduce_two: Seconds
    all_reduce_rank: Seconds
    all_to_all: Seconds
    scale_out: Seconds
    send: Seconds
    step: Seconds
    tile_rows: Number
    context_decode: Number
    context_prefill: Number
    sparse_heads: Number
    scan_token: Seconds
    fused: Seconds | None = None


def cross_faults(
    chip: Chip | None, efficiency: Efficiency | None, power: Power | None
) -> list[tuple[str, str | None, str]]:
    """What doesn't fit together: (field, value, what is expected); a part may be unknown (None)."""
    out: list[tuple[str, str | None, str]] = []
    # Without these the roofline would have a peak and nothing to multiply it with.
    for rate in ("fp8", "fp4") if chip and efficiency else ():
        peak = getattr(chip, f"peak_{rate}")
        for name in (n for n in Efficiency.model_fields if n.endswith(f"_{rate}")):
            q = getattr(efficiency, name)
            at = f"efficiency.{name}"
            if peak is not None and q is None:
                why = f"missing; expected a value because chip.peak_{rate} is set"
                out.append((at, None, why))
            if peak is None and q is not None:
                why = f"expected none, because chip.peak_{rate} is not on the card"
                out.append((at, repr(q.text), why))
    # A narrower format is never slower: the other way round is a slip of a prefix.
    names = ("peak_bf16", "peak_fp8", "peak_fp4")
    peaks = [(n, q) for n in names if (q := getattr(chip, n, None)) is not None]
    for (wide, a), (narrow, b) in zip(peaks, peaks[1:], strict=False):
        if b.value < a.value:
            out.append(
                (f"chip.{narrow}", repr(b.text), f"expected at least chip.{wide} ({a.text})")
            )
    if power and power.chip and power.rack_it and power.chip.value > power.rack_it.value:
        why = f"expected at least power.chip ({power.chip.text})"
        out.append(("power.rack_it", repr(power.rack_it.text), why))
    return out


class System(Part):
    """A whole machine card."""

    id: Id
    name: Text
    vendor: Text
    summary: Text
    profile: Literal["as sold", "vendor claim", "conservative"]
    date: Date
    notes: list[Text] = []
    also: list[Text] = []  # other names of the same machine, as benchmark rows write them
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

    @model_validator(mode="after")
    def _complete(self) -> System:
        if slips := cross_faults(self.chip, self.efficiency, self.power):
            raise Slips(slips)
        return self

    def quantities(self) -> dict[str, Quantity]:
        """Every number of the card by dotted path, in the order of the card."""
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
        section, _, name = path.partition(".")
        part = getattr(self, section, None) if section in type(self).model_fields else None
        if isinstance(part, Part) and name in type(part).model_fields:
            q = getattr(part, name)
            if isinstance(q, Quantity):
                return q
        known = ", ".join(self.quantities())
        raise InputError(f"{self.id}: there is no number at {path!r}; known: {known}")
