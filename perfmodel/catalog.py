"""Cards: read, validated, every number a `Quantity` with its kind, source and range.

A card is data. It is TOML of bounded size, unknown keys are errors, and an error names the file,
the field, the value and what would be right.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    create_model,
)

from perfmodel.errors import CardError, InputError
from perfmodel.paths import data_dir
from perfmodel.units import parse

if TYPE_CHECKING:
    from perfmodel.hardware import System

MAX_CARD_BYTES = 1_000_000
KINDS = ("vendor", "measured", "estimate")


class Quantity(BaseModel):
    """A number in SI units with where it comes from; low <= value <= high where given."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    value: float
    unit: str
    kind: Literal["vendor", "measured", "estimate"]
    source: str
    low: float | None = None
    high: float | None = None
    text: str


def _quantity(si_unit: str, lowest: float, highest: float, low_open: bool = True) -> Any:
    def convert(raw: Any, info: ValidationInfo) -> Any:
        if isinstance(raw, Quantity):
            return raw
        if not isinstance(raw, Mapping):
            raise ValueError(
                'expected { value = "…", kind = "vendor|measured|estimate", source = "KEY" }'
            )
        unknown = set(raw) - {"value", "kind", "source", "low", "high"}
        if unknown:
            raise ValueError(
                f"unknown key {sorted(unknown)[0]!r}; known: value, kind, source, low, high"
            )
        for k in ("value", "kind", "source"):
            if k not in raw:
                raise ValueError(f"{k} is missing")
        if raw["kind"] not in KINDS:
            raise ValueError(f"kind {raw['kind']!r} is not one of {', '.join(KINDS)}")
        sources = (info.context or {}).get("sources", {})
        if raw["source"] not in sources:
            raise ValueError(
                f"source {raw['source']!r} is not a key of [sources]; known: {', '.join(sources)}"
            )
        number = {}
        for k in ("value", "low", "high"):
            if k in raw:
                try:
                    number[k] = parse(raw[k], si_unit)
                except ValueError as e:
                    raise ValueError(f"{k} {raw[k]!r}: {e}") from None
                x = number[k]
                if not (lowest < x or (not low_open and x == lowest)) or x > highest:
                    raise ValueError(
                        f"{k} {raw[k]!r}: expected {'more than' if low_open else 'at least'} "
                        f"{lowest:g} and at most {highest:g} {si_unit if si_unit != '1' else ''}".strip()
                    )
        low, value, high = number.get("low"), number["value"], number.get("high")
        if (low is not None and low > value) or (high is not None and high < value):
            raise ValueError(
                f"low {raw.get('low')!r}, value {raw['value']!r}, high {raw.get('high')!r} are out "
                "of order; expected low <= value <= high"
            )
        return Quantity(
            value=value, unit=si_unit, kind=raw["kind"], source=sources[raw["source"]],
            low=low, high=high, text=str(raw["value"]),
        )  # fmt: skip

    return Annotated[Quantity, BeforeValidator(convert)]


if TYPE_CHECKING:
    Bytes = BytesPerSecond = FlopsPerSecond = Watts = Seconds = Quantity
    UsdPerHour = Usd = Ratio = Count = Number = Quantity
else:
    Bytes = _quantity("B", 0, 1e18)
    BytesPerSecond = _quantity("B/s", 0, 1e18)
    FlopsPerSecond = _quantity("FLOP/s", 0, 1e20)
    Watts = _quantity("W", 0, 1e9)
    Seconds = _quantity("s", 0, 3600, low_open=False)
    UsdPerHour = _quantity("USD/h", 0, 1e6)
    Usd = _quantity("USD", 0, 1e9)
    Ratio = _quantity("1", 0, 1)
    Count = _quantity("1", 0, 1e15)
    Number = _quantity("1", 0, 1e15, low_open=False)

Card = TypeVar("Card", bound=BaseModel)


def load_toml(path: Path) -> dict[str, Any]:
    """The TOML file as a dict; raises CardError naming the file (and the line of a slip)."""
    try:
        size = path.stat().st_size
        if size > MAX_CARD_BYTES:
            raise CardError(f"{path}: {size:,} bytes; a card has at most {MAX_CARD_BYTES:,}")
        return tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as e:
        raise CardError(f"{path}: not valid TOML: {e}") from None
    except UnicodeDecodeError as e:
        raise CardError(f"{path}: not UTF-8 text: {e}") from None
    except OSError as e:
        raise CardError(f"{path}: {e.strerror or e}") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def validate(cls: type[Card], data: dict[str, Any], path: Path) -> Card:
    """`data` as a card of type `cls`; every fault in one CardError, a line each."""
    sources = data.get("sources", {})
    if not isinstance(sources, dict) or not all(
        isinstance(v, str) and v.strip() for v in sources.values()
    ):
        raise CardError(f'{path}: sources: expected KEY = "full citation" entries')
    try:
        return cls.model_validate(data, context={"sources": sources})
    except ValidationError as e:
        lines = []
        for err in e.errors(include_url=False):
            where = ".".join(str(x) for x in err["loc"]) or "card"
            message = err["msg"].removeprefix("Value error, ")
            if err["type"] == "extra_forbidden":
                message = "unknown key; not part of this card"
            elif err["type"] == "missing":
                lines.append(f"{path}: {where}: missing; expected a value")
                continue
            lines.append(f"{path}: {where}: {_short(err['input'])}: {message}")
        raise CardError("\n".join(lines)) from None


def read_card(cls: type[Card], path: Path) -> Card:
    return validate(cls, load_toml(path), path)


def read_quantities(path: Path, table: str) -> dict[str, Quantity]:
    """A table of quantities (bytes where the text has a unit, plain numbers otherwise)."""
    data = load_toml(path)
    out = {}
    for name, raw in data[table].items():
        unit = Bytes if isinstance(raw.get("value"), str) else Number

        One = create_model("One", q=(unit, ...))
        out[name] = _one(One, raw, data, path).q
    return out


def _one(cls: Any, raw: Any, data: dict[str, Any], path: Path) -> Any:
    try:
        return cls.model_validate({"q": raw}, context={"sources": data.get("sources", {})})
    except ValidationError as e:
        raise CardError(f"{path}: {e.errors()[0]['msg']}") from None


def resolve(name: str, folder: Path, what: str) -> Path:
    """The card file for an id or a path; raises InputError with the known ids."""
    if not isinstance(name, str) or not name:
        raise InputError(f"{what}: {name!r} is not an id or a path of a card")
    known = sorted(p.stem for p in folder.glob("*.toml"))
    if name in known:
        return folder / f"{name}.toml"
    if name.endswith(".toml") and Path(name).is_file():
        return Path(name)
    near = difflib.get_close_matches(name.lower(), known, 1, 0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InputError(f"{what}: {name!r} is unknown; {hint}known: {', '.join(known)}")


def list_systems() -> list[str]:
    return sorted(p.stem for p in data_dir("hardware").glob("*.toml"))


@lru_cache(maxsize=64)
def load_system(name: str) -> System:
    """The machine card with this id or path. Raises InputError, CardError."""
    from perfmodel.hardware import System

    return read_card(System, resolve(name, data_dir("hardware"), "system"))
