"""Check cards of any kind: every fault with its line, and what a reviewer would ask.

A fault that can be judged only once another is repaired appears then.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from perfmodel import catalog
from perfmodel.catalog import FOLDERS, MAX_CARD_BYTES, Fault, Quantity, short
from perfmodel.engine import Engine, Protocol
from perfmodel.errors import CardError, InputError
from perfmodel.hardware import Chip, Efficiency, Power, System, cross_faults
from perfmodel.model import Model
from perfmodel.paths import data_dir
from perfmodel.toml_lines import Place, key_lines, line_of
from perfmodel.workload import Workload

CLASSES: dict[str, type[BaseModel]] = {
    "system": System,
    "model": Model,
    "engine": Engine,
    "protocol": Protocol,
    "workload": Workload,
}
NAMES = {
    "system": "machine",
    "model": "model",
    "engine": "engine",
    "protocol": "protocol",
    "workload": "workload",
}
FACTOR = 10  # times beyond the other cards that a number is asked about
_LINE = re.compile(r"\(at line (\d+), column \d+\)|\(at end of document\)")
# the field that a message of a whole section starts with: "shape.order[3] = ...", "o_groups 7 ..."
_FIELD = re.compile(r"([A-Za-z_][\w-]*(?:\.[\w-]+|\[\d+\])*)(?:(?: = |: )|(?= ))")


@dataclass(frozen=True)
class Finding:
    """One line of the report; a warning is a question, not a fault."""

    file: str
    line: int
    field: str
    value: str | None
    expected: str
    warning: bool

    def __str__(self) -> str:
        said = ": ".join(x for x in (self.field, self.value, self.expected) if x is not None)
        return f"{self.file}:{self.line}: {'warning: ' if self.warning else ''}{said}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def card_files(paths: Sequence[Path]) -> dict[Path, bool]:
    """The card files of these files and folders, each once; True for those named themselves.

    A folder holds cards side by side and in `hardware`, `models`, `engines`, `protocols`. Raises
    InputError for a path that is not there and a folder without cards.
    """
    out: dict[Path, tuple[Path, bool]] = {}
    for path in paths:
        if path.is_dir():
            folders = [path, *(path / name for name in FOLDERS.values())]
            found = [p for f in folders for p in sorted(f.glob("*.toml"))]
            if not found:
                raise InputError(f"{str(path)!r}: no cards (.toml) in this folder; expected some")
            for p in found:
                out.setdefault(p.resolve(), (p, False))
        elif path.is_file():
            out[path.resolve()] = (path, True)
        else:
            raise InputError(f"{str(path)!r}: no such file or folder; expected cards to check")
    return dict(out.values())


def check(files: Mapping[Path, bool]) -> list[Finding]:
    """Every finding of these cards (of `card_files`), by file and line."""
    out = []
    for path, named in files.items():
        found = list(_check(path, named))
        out += sorted(found, key=lambda f: (f.line, f.warning, f.field, f.expected))
    return out


def _check(path: Path, named: bool) -> Iterator[Finding]:
    try:
        data = catalog.load_toml(path)
        text = path.read_text("utf-8")
    except CardError as e:
        message = str(e).removeprefix(f"{path}: ")
        yield Finding(str(path), _broken_line(path), "card", None, message, False)
        return
    lines = key_lines(text)

    def finding(fault: Fault, warning: bool = False) -> Finding:
        line = line_of(lines, fault.path)
        return Finding(str(path), line, fault.field, fault.value, fault.expected, warning)

    what, fault = _kind(path, data)
    if what is None:
        # beside cards there may be other files, which nothing reads
        yield finding(fault, warning=bool(data) and not named and catalog.card_kind(data) is None)
        return
    faults, card = _faults(what, data)
    yield from (finding(f) for f in faults)
    for warning in _questions(what, path, data, card):
        yield finding(warning, True)


def _broken_line(path: Path) -> int:
    """The line where a file stops being TOML or UTF-8."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CARD_BYTES + 1)
        if len(raw) > MAX_CARD_BYTES:
            return 1
        tomllib.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as e:
        return raw[: e.start].count(b"\n") + 1
    except tomllib.TOMLDecodeError as e:
        match = _LINE.search(str(e))
        return int(match[1]) if match and match[1] else raw.count(b"\n") + 1
    except (OSError, ValueError, RecursionError):
        pass
    return 1


def _kind(path: Path, data: Mapping[str, Any]) -> tuple[str | None, Fault]:
    """What the card is of, by its folder or its tables; None where the fault says why not."""
    there = {folder: what for what, folder in FOLDERS.items()}.get(path.resolve().parent.name)
    what = catalog.card_kind(data)
    if not data:
        return None, Fault((), "card", None, "empty; expected id, name, [sources] and its sections")
    if there and what and there != what:
        return None, Fault(
            (), "card", None,
            f"this is a card of a {NAMES[what]}; expected a {NAMES[there]} in {FOLDERS[there]}/",
        )  # fmt: skip
    marks = "[chip] (a machine), [shape] (a model) or [values] (an engine, a protocol)"
    return there or what, Fault((), "card", None, f"of no kind; expected {marks}")


def _faults(what: str, data: dict[str, Any]) -> tuple[list[Fault], BaseModel | None]:
    """Every fault that can be told now, and the card if there is none."""
    cls = CLASSES[what]
    data = copy.deepcopy(data)
    out, sources = _sources(data)
    context = {"sources": sources}
    seen: set[str] = {str(f) for f in out}
    card = None
    for _ in range(3):  # without the unknown keys more can be told
        try:
            card = cls.model_validate(data, context=context)
            break
        except ValidationError as e:
            new = [_placed(f, data) for f in catalog.faults_of(cls, e)]
            out += [f for f in new if str(f) not in seen]
            seen |= {str(f) for f in new}
            if not _drop_unknown(cls, e, data):
                break
    if what == "system" and card is None:
        parts = {
            name: _part(part, data.get(name), context)
            for name, part in (("chip", Chip), ("efficiency", Efficiency), ("power", Power))
        }
        for key, value, expected in cross_faults(**parts):
            fault = Fault(tuple(key.split(".")), key, value, expected)
            out += [fault] if str(fault) not in seen else []
    return out, None if out else card


def _part(cls: type[BaseModel], raw: Any, context: dict[str, Any]) -> Any:
    """This section alone, or None if it has faults of its own."""
    try:
        return cls.model_validate(raw, context=context)
    except ValidationError:
        return None


def _sources(data: dict[str, Any]) -> tuple[list[Fault], dict[str, str]]:
    """Faults of [sources], and sources in which those keys stand, so that no other fault follows."""
    raw = data.get("sources", {})
    if not isinstance(raw, dict):
        return [Fault(("sources",), "sources", short(raw), "expected a table")], {}
    faults, good = [], {}
    for key, text in raw.items():
        good[key] = text if isinstance(text, str) and text.strip() else "?"
        if good[key] == "?" and text != "?":
            field = f"sources.{key}"
            faults.append(Fault(("sources", key), field, short(text), "expected a full citation"))
    data["sources"] = good
    return faults, good


def _placed(fault: Fault, data: Mapping[str, Any]) -> Fault:
    """A fault of a whole section, at the field that its message starts with."""
    match = _FIELD.match(fault.expected)
    if match is None or (fault.value is not None and not _holds(data, fault.path)):
        return fault
    names = re.findall(r"[\w-]+", match[1])
    inner = tuple(int(n) if n.isdigit() else n for n in names)
    path = (*fault.path, *inner)
    if not (_holds(data, path) or (len(inner) > 1 and _holds(data, path[:-1]))):
        return fault
    rest = fault.expected[match.end() :].strip()
    before = f"{fault.field}." if fault.path else ""
    if fault.expected[match.end(1)] == " " and not match[0].endswith(" = "):
        rest = fault.expected  # a sentence about the field
    return Fault(path, before + match[1], None, rest)


def _holds(data: Any, path: Place) -> bool:
    for key in path:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def _drop_unknown(cls: type[BaseModel], error: ValidationError, data: Any) -> bool:
    """Take the unknown keys out of `data`; False if there were none."""
    dropped = False
    for e in error.errors(include_url=False):
        loc = list(e["loc"])
        if e["type"] != "extra_forbidden":
            continue
        if len(loc) > 3 and loc[0] in ("attention", "ffn"):
            del loc[2]  # the type that pydantic chose by
        part = data
        try:
            for key in loc[:-1]:
                part = part[key]
            del part[loc[-1]]
            dropped = True
        except (KeyError, IndexError, TypeError):
            continue
    return dropped


# ---- what a reviewer would ask


def _questions(
    what: str, path: Path, data: Mapping[str, Any], card: BaseModel | None
) -> Iterator[Fault]:
    used = set(_used_sources(data))
    sources = data.get("sources")
    for key in sources if isinstance(sources, dict) else ():
        if key not in used:
            yield Fault(("sources", key), f"sources.{key}", None, "no number names this source")
    name = data.get("id")
    if isinstance(name, str) and name != path.stem:
        why = f"expected {path.stem!r}, the file's name, if it lies in a folder of cards"
        yield Fault(("id",), "id", repr(name), why)
    if card is None:
        return
    others = _others(what, path.stem)
    for place, general, number in _numbers(card, (), ()):
        field = ".".join(map(str, place))
        q = number if isinstance(number, Quantity) else None
        if q and q.kind == "estimate" and q.low is None and q.high is None:
            yield Fault(place, field, repr(q.text), "an estimate without a range")
        x = number.value if isinstance(number, Quantity) else number
        low, high, n = others.get(general, (0.0, 0.0, 0))
        if x > 0 and n >= 3 and not low / FACTOR <= x <= high * FACTOR:
            shown = number.text if isinstance(number, Quantity) else number
            why = f"more than {FACTOR} times beyond the other {n} cards ({low:g} to {high:g}, SI)"
            yield Fault(place, field, repr(shown), why)


def _used_sources(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("source"), str):
            yield node["source"]
        for value in node.values():
            yield from _used_sources(value)
    elif isinstance(node, list):
        for value in node:
            yield from _used_sources(value)


def _numbers(node: Any, place: Place, general: Place) -> Iterator[tuple[Place, Place, Any]]:
    """(where, the same without names that a card gives, number) of a card that was read."""
    if isinstance(node, Quantity):
        yield place, general, node
        return
    if isinstance(node, BaseModel):
        parts = {k: getattr(node, k) for k in type(node).model_fields}
        if general and general[-1] == "*":
            general = (*general[:-1], str(parts.get("type", "*")))
        for key, value in parts.items():
            yield from _numbers(value, (*place, key), (*general, key))
    elif isinstance(node, dict):
        for key, value in node.items():
            name = "*" if isinstance(value, BaseModel) else key
            if isinstance(value, Quantity):
                name = key
            yield from _numbers(value, (*place, key), (*general, name))
    elif isinstance(node, int | float) and not isinstance(node, bool):
        yield place, general, node


def _others(what: str, stem: str) -> dict[Place, tuple[float, float, int]]:
    """Lowest and highest number and how many, by field, over the project's other cards."""
    found: dict[Place, dict[Path, list[float]]] = {}
    folder = data_dir(FOLDERS[what])
    for other in sorted(folder.glob("*.toml")):
        if other.stem == stem:  # a changed copy of it isn't another card
            continue
        for general, x in _card_numbers(what, other, other.stat().st_mtime_ns):
            found.setdefault(general, {}).setdefault(other, []).append(x)
    return {
        general: (min(map(min, cards.values())), max(map(max, cards.values())), len(cards))
        for general, cards in found.items()
    }


@lru_cache(maxsize=256)
def _card_numbers(what: str, path: Path, _changed: int) -> tuple[tuple[Place, float], ...]:
    try:
        card = catalog.read_card(CLASSES[what], path)
    except CardError:
        return ()  # its own check says why
    out = []
    for _, general, number in _numbers(card, (), ()):
        x = number.value if isinstance(number, Quantity) else float(number)
        if x > 0:
            out.append((general, x))
    return tuple(out)
