"""Units: human spelling in cards ("4.8 TB/s"), SI numbers inside. Parsed with pint."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

DEFINITIONS = ("FLOP = [compute]", "token = [text]", "USD = [money]")


@lru_cache(maxsize=1)
def registry() -> Any:
    """The pint registry with FLOP, token and USD as dimensions of their own."""
    import pint  # here: it costs a fifth of a second, and a cached card does not need it

    u: Any = pint.UnitRegistry()
    u.define("FLOP = [compute]")
    u.define("token = [text]")
    u.define("USD = [money]")
    u.define("layer = []")
    return u


@lru_cache(maxsize=1024)
def _factor(unit: str, si_unit: str) -> float:
    u = registry()
    return float(u.Quantity(1.0, unit).to(u.Unit(si_unit)).magnitude)


_TEXT = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*")
_UNIT = re.compile(r"[A-Za-z]+(?:\s*/\s*[A-Za-z]+)?")


def parse(text: str | int | float, si_unit: str) -> float:
    """`text` in `si_unit`; plain numbers only where the field has no dimension.

    Raises ValueError saying what would be right.
    """
    want = "a plain number" if si_unit == "1" else f"a number with a unit of {si_unit}"
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ValueError(f"expected {want}")
    if not isinstance(text, str):
        if si_unit != "1":
            raise ValueError(f"expected {want}, such as {_example(si_unit)}")
        value = float(text)
    else:
        m = _TEXT.fullmatch(text)
        if not m or len(text) > 64:
            raise ValueError(f"expected {want}, such as {_example(si_unit)}")
        value, unit = float(m[1]), m[2]
        if si_unit == "1":
            if unit:
                raise ValueError("expected a plain number without unit")
        else:
            if not _UNIT.fullmatch(unit):
                raise ValueError(f"expected {want}, such as {_example(si_unit)}")
            try:
                value *= _factor(unit.replace(" ", ""), _SI.get(si_unit, si_unit))
            except Exception as e:  # pint raises its own family for unknown and for wrong units
                raise ValueError(
                    f"expected {want}, such as {_example(si_unit)} ({type(e).__name__})"
                ) from None
    if not math.isfinite(value):
        raise ValueError("expected a finite number")
    return value


# The spelling pint uses for our SI units.
_SI = {"B": "byte", "B/s": "byte/s", "USD/h": "USD/hour"}
_EXAMPLES = {
    "B": "288 GB",
    "B/s": "4.8 TB/s",
    "FLOP/s": "989 TFLOP/s",
    "W": "1.2 kW",
    "s": "4.5 us",
    "USD/h": "2.31 USD/h",
    "USD": "30000 USD",
    "1": "0.8",
}


def _example(si_unit: str) -> str:
    return repr(_EXAMPLES.get(si_unit, f"1 {si_unit}"))
