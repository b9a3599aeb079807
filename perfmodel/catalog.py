"""Cards: read, validated, every number a `Quantity` with its kind, source and range.

A card is data: TOML of bounded size. Unknown keys are errors, and an error names the file, the
field, the value and what would be right.
"""

from __future__ import annotations

import datetime
import difflib
import os
import re
import sys
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from perfmodel.errors import CardError, CardsWarning, InputError
from perfmodel.paths import data_dir
from perfmodel.units import in_bits, parse

if TYPE_CHECKING:
    from perfmodel.hardware import System

MAX_CARD_BYTES = 1_000_000
Kind = Literal["vendor", "measured", "estimate"]
KINDS: tuple[str, ...] = get_args(Kind)
_KEYS = ("value", "kind", "source", "low", "high")
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,80}")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def _check_order(low: float | None, value: float, high: float | None) -> None:
    if (low is not None and low > value) or (high is not None and high < value):
        raise ValueError(
            f"low {low}, value {value}, high {high} are out of order; expected low <= value <= high"
        )


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong in a card: where, what stands there, what would be right."""

    path: tuple[str | int, ...]
    field: str  # `path` as text
    value: str | None
    expected: str

    def __str__(self) -> str:
        return ": ".join(x for x in (self.field, self.value, self.expected) if x is not None)


class Slips(ValueError):
    """Several faults of one part, for a validator to raise: (key, value, what is expected)."""

    def __init__(self, found: list[tuple[str, str | None, str]], mark: str = ": ") -> None:
        self.found = found
        key, value, expected = found[0]
        at = key if value is None else f"{key}{mark}{value}"
        super().__init__(f"{at}: {expected}" if at else expected)


class Quantity(BaseModel):
    """A number in SI units and where it comes from; `source` is the full citation.

    `low` and `high` are the range the number may lie in, `text` the number as the card writes it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    value: float
    unit: str
    kind: Kind
    source: str
    low: float | None = None
    high: float | None = None
    text: str

    @model_validator(mode="after")
    def _ordered(self) -> Quantity:
        _check_order(self.low, self.value, self.high)
        return self


def quantity_field(
    si_unit: str,
    lowest: float,
    highest: float,
    *,
    above: bool = True,
    whole: bool = False,
    bits: bool = True,
) -> Any:
    """A type for pydantic models: a card's `{ value, kind, source, low, high }` -> Quantity.

    Bounds are in `si_unit`; with `above` the lower one is not itself allowed. The source key is
    looked up in `context["sources"]` of the validation. Without `bits` a unit in bits is refused:
    nobody states memory in bits, so it is a slip for bytes.
    """
    unit = "" if si_unit == "1" else f" {si_unit}"
    bounds = f"{'more than' if above else 'at least'} {lowest:g} and at most {highest:g}{unit}"

    def number(raw: Any) -> float:
        x = parse(raw, si_unit)
        if not bits and in_bits(raw):
            raise ValueError("expected bytes (B), not bits (b)")
        if x < lowest or (above and x == lowest) or x > highest:
            raise ValueError(f"expected {bounds}")
        if whole and x != int(x):
            raise ValueError("expected a whole number")
        return x

    def convert(raw: Any, info: ValidationInfo) -> Any:
        if isinstance(raw, Quantity):
            if raw.unit != si_unit:
                raise ValueError(f"expected a quantity in {si_unit}, not in {raw.unit}")
            return raw
        if not isinstance(raw, Mapping):
            raise ValueError(
                f'expected {{ value = …, kind = "{"|".join(KINDS)}", source = "KEY" }}'
            )
        slips: list[tuple[str, str | None, str]] = [
            (short(k), None, f"unknown key; expected {', '.join(_KEYS)}")
            for k in sorted(set(raw) - set(_KEYS))
        ]
        slips += [
            (key, None, "missing; expected value, kind and source")
            for key in ("value", "kind", "source")
            if key not in raw
        ]
        kind, source = raw.get("kind"), raw.get("source")
        if "kind" in raw and kind not in KINDS:
            slips.append(("kind", short(kind), f"expected one of {', '.join(KINDS)}"))
        sources = (info.context or {}).get("sources", {})
        if "source" in raw and (not isinstance(source, str) or source not in sources):
            known = ", ".join(sources) or "none"
            slips.append(("source", short(source), f"expected a key of [sources]: {known}"))
        numbers: dict[str, float] = {}
        for key in ("low", "value", "high"):
            try:
                if key in raw:
                    numbers[key] = number(raw[key])
            except ValueError as e:
                slips.append((key, short(raw[key]), str(e)))
        if slips:
            raise Slips(slips, " ")
        low, high = numbers.get("low"), numbers.get("high")
        _check_order(low, numbers["value"], high)
        return Quantity(
            value=numbers["value"], unit=si_unit, kind=raw["kind"], source=sources[source],
            low=low, high=high, text=str(raw["value"]),
        )  # fmt: skip

    return Annotated[Quantity, BeforeValidator(convert)]


if TYPE_CHECKING:
    Bytes: TypeAlias = Quantity
    BytesPerSecond: TypeAlias = Quantity
    MemoryBandwidth: TypeAlias = Quantity
    FlopsPerSecond: TypeAlias = Quantity
    Watts: TypeAlias = Quantity
    Seconds: TypeAlias = Quantity
    UsdPerHour: TypeAlias = Quantity
    Usd: TypeAlias = Quantity
    Ratio: TypeAlias = Quantity
    Count: TypeAlias = Quantity
    Whole: TypeAlias = Quantity
    Number: TypeAlias = Quantity
    Factor: TypeAlias = Quantity
    Scale: TypeAlias = Quantity
    Share: TypeAlias = Quantity
else:
    # Upper bounds catch slips of a unit prefix; they are far beyond any real machine.
    Bytes = quantity_field("B", 1e6, 1e16, bits=False)
    BytesPerSecond = quantity_field("B/s", 1e8, 1e14)
    # slowest HBM or GDDR of an accelerator is above 0.1 TB/s; on-chip SRAM reaches 0.2 PB/s
    MemoryBandwidth = quantity_field("B/s", 1e11, 1e15, bits=False)
    FlopsPerSecond = quantity_field("FLOP/s", 1e12, 1e18)
    Watts = quantity_field("W", 1, 1e6, above=False)
    Seconds = quantity_field("s", 0, 60, above=False)
    UsdPerHour = quantity_field("USD/h", 0, 1e6)
    Usd = quantity_field("USD", 0, 1e9)
    Ratio = quantity_field("1", 0, 1)
    Count = quantity_field("1", 1, 1e15, above=False)
    Whole = quantity_field("1", 1, 1e7, above=False, whole=True)
    Number = quantity_field("1", 0, 1e15, above=False)
    Factor = quantity_field("1", 1, 10, above=False)
    Scale = quantity_field("1", 0, 10)
    Share = quantity_field("1", 0, 1, above=False)


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("expected one line of printable text")
    return text


def _iso(text: str) -> str:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        raise ValueError("expected a date such as '2026-11-30'") from None
    return text


# What cards share beside numbers.
Text = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=2000),
    AfterValidator(_printable),
]
Id = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
Date = Annotated[str, AfterValidator(_iso)]

Card = TypeVar("Card", bound=BaseModel)


def load_toml(path: Path) -> dict[str, Any]:
    """The TOML file as a dict; raises CardError naming the file (and the line of a slip)."""
    try:
        size = path.stat().st_size
        if size > MAX_CARD_BYTES:
            raise CardError(f"{path}: {size:,} bytes; expected at most {MAX_CARD_BYTES:,}")
        return tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as e:
        raise CardError(f"{path}: not valid TOML: {e}") from None
    except UnicodeDecodeError as e:
        raise CardError(f"{path}: not UTF-8 text: {e}") from None
    except RecursionError:
        raise CardError(f"{path}: nested too deeply for a card") from None
    except ValueError as e:
        if isinstance(e, CardError):
            raise
        raise CardError(f"{path}: not valid TOML: {e}") from None
    except OSError as e:
        raise CardError(f"{path}: {e.strerror or e}") from None


def short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a huge number"
    except RecursionError:
        return "tables within tables without end"
    return text if len(text) <= 80 else text[:77] + "..."


def _sources(data: Mapping[str, Any], path: Path) -> dict[str, str]:
    sources = data.get("sources", {})
    if not isinstance(sources, dict):
        raise CardError(f"{path}: sources: {short(sources)}: expected a table")
    for key, text in sources.items():
        if not isinstance(text, str) or not text.strip():
            raise CardError(f"{path}: sources.{key}: {short(text)}: expected a full citation")
    return sources


def _known_keys(cls: Any, where: tuple[Any, ...]) -> list[str]:
    """The field names of the section an error at `where` lies in; empty if not found."""
    for key in where[:-1]:
        field = cls.model_fields.get(key) if hasattr(cls, "model_fields") else None
        cls = field.annotation if field else None
    return list(getattr(cls, "model_fields", ()))


def _fault(cls: type[BaseModel], error: Any) -> Fault:
    """One pydantic error as a fault."""
    loc = list(error["loc"])
    if len(loc) > 2 and loc[0] in ("attention", "ffn"):
        del loc[2]  # the type that pydantic chose by; no part of the card's path
    # a key may hold anything, line breaks too: what isn't a plain name is shown as its repr
    where = ".".join(str(x) if _PLAIN.fullmatch(str(x)) else short(x) for x in loc) or "card"
    if error["type"] == "missing":
        return Fault(tuple(loc), where, None, "missing; expected a value")
    message = error["msg"].removeprefix("Value error, ")
    if not message.isprintable():  # pydantic quotes tags as they are
        message = short(message)
    if error["type"] == "extra_forbidden":
        known = _known_keys(cls, error["loc"])
        near = difflib.get_close_matches(str(error["loc"][-1]), known, 1)
        message = "unknown key" + (f"; expected {', '.join(near or known)}" if known else "")
    return Fault(tuple(loc), where, short(error["input"]) if loc else None, message)


def faults_of(cls: type[BaseModel], error: ValidationError) -> list[Fault]:
    """Every fault that pydantic found, the slips of one part each for itself."""
    out = []
    for e in error.errors(include_url=False):
        whole = _fault(cls, e)
        slips = (e.get("ctx") or {}).get("error")
        if not isinstance(slips, Slips):
            out.append(whole)
            continue
        for key, value, expected in slips.found:
            at: list[str | int] = [k for k in key.split(".") if k]
            field = ".".join(x for x in (whole.field if whole.path else "", key) if x)
            out.append(Fault((*whole.path, *at), field, value, expected))
    return out


def validate(cls: type[Card], data: Mapping[str, Any], path: Path) -> Card:
    """`data` as a card of type `cls`.

    Raises CardError: one line with the first fault and the number of the others; all of them are
    in its `faults`.
    """
    _expect_kind(cls, data, path)
    context = {"sources": _sources(data, path)}
    try:
        return cls.model_validate(data, context=context)
    except ValidationError as e:
        # unknown keys first: where a key is misspelt, "missing" is only what follows from it
        rank = {"extra_forbidden": 0, "missing": 2}
        errors = sorted(e.errors(include_url=False), key=lambda x: rank.get(x["type"], 1))
        faults = tuple(f"{path}: {_fault(cls, x)}" for x in errors)
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        error = CardError(faults[0] + more)
        error.faults = faults
        raise error from None


def _expect_kind(cls: type[BaseModel], data: Mapping[str, Any], path: Path) -> None:
    """Raise CardError for an empty card and for a machine card read as a model, or the reverse."""
    if not data:
        raise CardError(f"{path}: card: empty; expected id, name, [sources] and the other sections")
    kinds = {"Model": ("model", "shape"), "System": ("machine", "chip")}
    if cls.__name__ not in kinds:
        return
    wanted, mark = kinds[cls.__name__]
    for other, other_mark in kinds.values():
        if other != wanted and other_mark in data and mark not in data:
            raise CardError(f"{path}: card: this is a {other} card; expected a {wanted} card")


def read_card(cls: type[Card], path: Path) -> Card:
    """The card in file `path`; raises CardError naming the file, field and value."""
    return validate(cls, load_toml(path), path)


def read_quantities(path: Path, table: str) -> dict[str, Quantity]:
    """A table of quantities: bytes where the value is text, plain numbers otherwise.

    Raises CardError.
    """
    data = load_toml(path)
    context = {"sources": _sources(data, path)}
    if not isinstance(rows := data.get(table), dict):
        raise CardError(f"{path}: {table}: missing; expected a table of quantities")
    out: dict[str, Quantity] = {}
    for name, raw in rows.items():
        is_text = isinstance(raw, dict) and isinstance(raw.get("value"), str)
        adapter: TypeAdapter[Quantity] = TypeAdapter(Bytes if is_text else Number)
        try:
            out[name] = adapter.validate_python(raw, context=context)
        except ValidationError as e:
            message = e.errors()[0]["msg"].removeprefix("Value error, ")
            raise CardError(f"{path}: {table}.{name}: {short(raw)}: {message}") from None
    return out


# ---- where cards are found

CARDS_VARIABLE = "PERFMODEL_CARDS"
# what a card describes -> the folder of such cards, here and in a user's own folder
FOLDERS = {
    "system": "hardware",
    "model": "models",
    "engine": "engines",
    "protocol": "protocols",
    "workload": "workloads",
}


def use_cards(folder: str | Path | None) -> None:
    """Search this folder of the user's own cards before the project's; None ends that.

    The folder holds `hardware/*.toml`, `models/*.toml`, or cards side by side. The choice lies in
    the environment variable PERFMODEL_CARDS, so processes started from here make it too.
    Raises InputError when there is no such folder or it can't be read.
    """
    if folder is None:
        os.environ.pop(CARDS_VARIABLE, None)
    else:
        os.environ[CARDS_VARIABLE] = str(_readable(Path(folder), "cards").resolve())


def user_folder() -> Path | None:
    """The user's folder of cards (PERFMODEL_CARDS), or None; raises InputError as `use_cards`."""
    text = os.environ.get(CARDS_VARIABLE, "")
    return _readable(Path(text), CARDS_VARIABLE) if text else None


def _readable(folder: Path, name: str) -> Path:
    try:
        with os.scandir(folder):
            return folder
    except (OSError, ValueError) as e:  # ValueError: a null byte
        why = getattr(e, "strerror", None) or str(e)
        raise InputError(
            f"{name}: {short(str(folder))}: {why}; expected a readable folder of cards"
        ) from None


def card_kind(data: Mapping[str, Any]) -> str | None:
    """What a card describes, by its tables: a key of FOLDERS, or None if that can't be told."""
    if "chip" in data or "shape" in data:
        return "system" if "chip" in data else "model"
    if "call" in data:
        return "workload"
    values = data.get("values")
    if isinstance(values, Mapping):
        return "protocol" if {"lengths", "wave", "in_step"} & set(values) else "engine"
    return None


def user_cards(what: str) -> dict[str, Path]:
    """The user's cards of this kind (a key of FOLDERS): id, which is the file's name -> file.

    Raises InputError for an id that two files have, CardError for a file that can't be read.
    """
    folder = user_folder()
    if folder is None:
        return {}
    files = sorted((folder / FOLDERS[what]).glob("*.toml"))
    files += [p for p in sorted(folder.glob("*.toml")) if card_kind(load_toml(p)) == what]
    found: dict[str, Path] = {}
    for path in files:
        if path.stem in found:
            raise _twice(path.stem, what, found[path.stem], path)
        found[path.stem] = path
    return found


def user_card(name: str, what: str) -> Path | None:
    """The user's card with this id, if there is one; raises as `user_cards`."""
    folder = user_folder()
    if folder is None or not _ID.fullmatch(name):
        return None
    inside, beside = folder / FOLDERS[what] / f"{name}.toml", folder / f"{name}.toml"
    # one whose kind can't be told is taken: reading it says what it lacks
    mine = beside.is_file() and card_kind(load_toml(beside)) in (what, None)
    if mine and inside.is_file():
        raise _twice(name, what, inside, beside)
    return beside if mine else inside if inside.is_file() else None


def _twice(name: str, what: str, first: Path, second: Path) -> InputError:
    return InputError(
        f"{what}: {name!r} is there twice, {first} and {second}; expected one of them"
    )


def _project_card(name: str, folder: Path) -> Path | None:
    path = folder / f"{name}.toml"
    return path if _ID.fullmatch(name) and path.is_file() else None


def _hides(what: str, name: str, path: Path) -> str:
    return f"{what} {name}: your card {path} is used, not the project's card of this name"


def warn(text: str) -> None:
    """Give a CardsWarning at the line outside this package that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("perfmodel."):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, CardsWarning, stacklevel=level)


def hiding(what: str, card: BaseModel) -> str | None:
    """A sentence if `card` is the user's own and hides a card of the project, else None."""
    name = str(getattr(card, "id", ""))
    path = user_card(name, what)
    if path is None or _project_card(name, data_dir(FOLDERS[what])) is None:
        return None
    mine = _read(type(card), path, path.stat().st_mtime_ns)
    return _hides(what, name, path) if mine == card else None


def resolve(name: str | Path, folder: Path, what: str) -> Path:
    """The card file for an id or a path ending in .toml: the user's folder first, then `folder`.

    Warns (CardsWarning) where both have the id. Raises InputError naming `what`, the nearest id
    and all known ones.
    """
    if not isinstance(name, str | Path) or not str(name):
        raise InputError(f"{what}: {name!r} is not an id or a path of a card")
    text = str(name)
    own, found = user_card(text, what), _project_card(text, folder)
    if own and found:
        warn(_hides(what, text, own))
    if path := own or found:
        return path
    if text.endswith(".toml"):
        try:
            if Path(text).is_file():
                return Path(text)
        except (OSError, ValueError):  # too long a name, a null byte
            pass
        raise InputError(f"{what}: {short(text)}: there is no such file")
    known = list_cards(what, folder)
    near = difflib.get_close_matches(text[:80].lower(), known, 1, 0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InputError(f"{what}: {short(text)} is unknown; {hint}known: {', '.join(known)}")


def list_cards(what: str, folder: Path | None = None) -> list[str]:
    """The ids of the cards of this kind (a key of FOLDERS): the project's and the user's."""
    folder = data_dir(FOLDERS[what]) if folder is None else folder
    return sorted({p.stem for p in folder.glob("*.toml")} | set(user_cards(what)))


def list_systems() -> list[str]:
    """The ids of the machine cards: the project's and those of the user's folder."""
    return list_cards("system")


def load_card(cls: type[Card], name: str | Path, folder: Path, what: str) -> Card:
    """The card with this id (see `resolve`), or of this path; raises InputError or CardError."""
    path = resolve(name, folder, what)
    card = _read(cls, path, path.stat().st_mtime_ns)
    found = getattr(card, "id", None)
    if not str(name).endswith(".toml") and found != path.stem:
        # the id stands in every result: another one there would name another card
        raise CardError(f"{path}: id: {found!r}: expected {path.stem!r}, the file's name")
    return card


@lru_cache(maxsize=128)
def _read(cls: type[Card], path: Path, _changed: int) -> Card:
    # The file's time is part of the key: a card edited in a running session is read again.
    return read_card(cls, path)


def load_system(name: str | Path) -> System:
    """The machine card with this id or path; raises InputError or CardError."""
    from perfmodel.hardware import System

    return load_card(System, name, data_dir("hardware"), "system")
