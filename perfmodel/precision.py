"""Number formats: how many bytes a value takes, scales included, and which peak it runs at.

A *format* says how a tensor is stored; a *rate* ("bf16", "fp8", "fp4") says which peak of the chip
multiplies it. Both operands count: FP4 weights with FP8 activations run at the FP8 rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from perfmodel.errors import InputError


@dataclass(frozen=True)
class Format:
    """A storage format; `bytes_per_value` includes its share of the scale factors."""

    name: str
    bits: int
    scale_bits: int = 0
    group: int = 1
    rate: str = "bf16"
    # The kernels that quantise a product's activations depend on its weights' scales: block-scaled
    # FP8 and NVFP4 need scales anew for each product; one scale a tensor (fp8) is fused elsewhere.
    quantised: str | None = None

    @property
    def bytes_per_value(self) -> float:
        return float(Fraction(self.bits, 8) + Fraction(self.scale_bits, 8 * self.group))


FORMATS = {
    f.name: f
    for f in (
        Format("fp32", 32),
        Format("bf16", 16),
        Format("fp8", 8, rate="fp8"),
        # 128 x 128 weight blocks, one fp32 scale (UE8M0 stored widened in most checkpoints)
        Format("fp8_block", 8, 32, 128 * 128, rate="fp8", quantised="fp8"),
        Format("mxfp8", 8, 8, 32, rate="fp8", quantised="fp8"),
        Format("mxfp4", 4, 8, 32, rate="fp4"),
        Format("nvfp4", 4, 8, 16, rate="fp4", quantised="fp4"),
        Format("int4_g32", 4, 16, 32, rate="bf16"),
    )
}

# Rates from the widest to the narrowest; the wider of two operands decides the peak.
RATES = ("bf16", "fp8", "fp4")


def format_named(name: str) -> Format:
    """The format called `name`; raises InputError listing the known ones."""
    try:
        return FORMATS[name]
    except KeyError:
        raise InputError(
            f"number format: {name!r} is unknown; known: {', '.join(FORMATS)}"
        ) from None


def rate_of(weight: Format, activation: Format) -> str:
    """The peak a product runs at: that of its wider operand (FP8 x FP4 runs at FP8 rate)."""
    return RATES[min(RATES.index(weight.rate), RATES.index(activation.rate))]
