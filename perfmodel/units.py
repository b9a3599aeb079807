"""Units: people's spelling in cards ("4.8 TB/s", "284208 MiB"), SI numbers inside.

The unit table is our own and small. In a general one bits have no dimension, so that "4.8 THz"
would pass as a bandwidth, and `b` may mean barn.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

DEFINITIONS = (
    "nano- = 1e-9 = n-",
    "micro- = 1e-6 = u- = µ- = μ-",
    "milli- = 1e-3 = m-",
    "kilo- = 1e3 = k-",
    "mega- = 1e6 = M-",
    "giga- = 1e9 = G-",
    "tera- = 1e12 = T-",
    "peta- = 1e15 = P-",
    "exa- = 1e18 = E-",
    "kibi- = 1024 = Ki-",
    "mebi- = 1048576 = Mi-",
    "gibi- = 1073741824 = Gi-",
    "tebi- = 1099511627776 = Ti-",
    "second = [time] = s",
    "minute = 60 * second = min",
    "hour = 3600 * second = h",
    "bit = [information] = b",
    "byte = 8 * bit = B",
    "watt = [power] = W",
    "joule = watt * second = J",
    "FLOP = [compute]",
    "token = [text]",
    "USD = [money]",
)
# One example each; also the list of SI units a field may have.
EXAMPLES = {
    "B": "288 GB",
    "B/s": "4.8 TB/s",
    "FLOP/s": "989 TFLOP/s",
    "W": "1.2 kW",
    "s": "4.5 us",
    "USD/h": "2.31 USD/h",
    "USD": "30000 USD",
    "1": "0.8",
}
_LONGEST = 64
_TEXT = re.compile(r"\s*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(.*?)\s*")
_UNIT = re.compile(r"[A-Za-zµμ]+(?:\s*/\s*[A-Za-z]+)?")


def in_bits(text: Any) -> bool:
    """Whether a card's number is spelt in bits (`Tb/s`, `Gbit`) and not in bytes."""
    unit = _TEXT.fullmatch(text) if isinstance(text, str) else None
    return unit is not None and re.search(r"(?:b|bits?)(?:/|$)", unit[2]) is not None


@lru_cache(maxsize=1)
def registry() -> Any:
    """The pint registry of exactly the units above; bits, FLOP, token and USD are dimensions."""
    import pint  # here: it costs a fifth of a second, and not every command reads a card

    units: Any = pint.UnitRegistry(None)
    for line in DEFINITIONS:
        units.define(line)
    return units


@lru_cache(maxsize=1024)
def factor(unit: str, si_unit: str) -> float:
    """What to multiply a number in `unit` with to have it in `si_unit`.

    Raises ValueError for an unknown unit and for one of another dimension.
    """
    units = registry()
    try:
        return float(units.Quantity(1.0, unit).to(units.Unit(si_unit)).magnitude)
    except Exception as e:  # pint has several families of errors, not all of them its own
        known = type(e).__name__ == "DimensionalityError"
        what = f"{unit!r} measures something else" if known else f"{unit!r} is not a known unit"
        raise ValueError(what) from None


def parse(text: str | int | float, si_unit: str) -> float:
    """The value of `text` in `si_unit`; a plain number only where the field has no dimension.

    Raises ValueError saying what would be right.
    """
    example = repr(EXAMPLES.get(si_unit, f"1 {si_unit}"))
    plain = si_unit == "1"
    want = "expected a plain number without unit, such as 0.8"
    if not plain:
        want = f"expected a number with a unit that converts to {si_unit}, such as {example}"
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ValueError(want)
    if isinstance(text, str):
        found = _TEXT.fullmatch(text) if len(text) <= _LONGEST else None
        if not found:
            raise ValueError(want)
        value, unit = float(found[1]), found[2]
        if plain == bool(unit) or (unit and not _UNIT.fullmatch(unit)):
            raise ValueError(want)
        if unit:
            try:
                value *= factor(unit.replace(" ", ""), si_unit)
            except ValueError as e:
                raise ValueError(f"{want}; {e}") from None
    else:
        if not plain:
            raise ValueError(want)
        try:
            value = float(text)
        except OverflowError:
            value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"{want}; it must be finite")
    return value
