"""Lines of keys: against texts whose lines are known because they are written here piece by piece."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.paths import data_dir
from perfmodel.toml_lines import key_lines, line_of

NAMES = ["a", "b-1", "_", "1", "key with space", "ä", 'q"q', "x.y", "# no", "[t]", "= 1", ""]
SCALARS = [
    "1", "-2.5e3", "true", "inf", "1979-05-27 07:32:00", "0x1f", '"te # [x]\\" = t"', "'li]t = {'",
    '"""\none\n# no comment\n[no.table]\nend \\""" = 1"""', "'''\n[x]\ny = 'it''s'\n'''", '""', "''",
    '"""ends in a quote"""""', "'''so does this'''''", '"""\\\n   folded"""', '"\\\\"',
]  # fmt: skip
GAPS = ["", " ", "\n", "\n\n  ", " # it's [odd] = \"text\n", "\n# 'x\n\t"]


class Text:
    """Text as it grows, and the line of every key and item put into it."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw, self.text = draw, ""
        self.lines: dict[tuple[Any, ...], int] = {}

    @property
    def line(self) -> int:
        return self.text.count("\n") + 1

    def pick(self, options: list[Any]) -> Any:
        return self.draw(st.sampled_from(options))

    def name(self, name: str) -> None:
        bare = name and all(c.isascii() and (c.isalnum() or c in "-_") for c in name)
        styles = [json.dumps(name, ensure_ascii=False)] + ([name] if bare else [])
        styles += [f"'{name}'"] if "'" not in name else []
        self.text += self.pick(styles)

    def key(self, path: tuple[Any, ...], names: list[str]) -> tuple[Any, ...]:
        """A key, dotted where there are several names."""
        for i, name in enumerate(names):
            self.text += self.pick(["", " "]) + "." + self.pick(["", " "]) if i else ""
            path = (*path, name)
            self.lines.setdefault(path, self.line)
            self.name(name)
        return path

    def value(self, path: tuple[Any, ...], depth: int) -> None:
        kind = self.pick(["scalar", "scalar", "array", "table"]) if depth else "scalar"
        self.lines.setdefault(path, self.line)
        if kind == "scalar":
            self.text += self.pick(SCALARS)
        elif kind == "array":
            self.text += "["
            n = self.draw(st.integers(0, 3))
            for i in range(n):
                self.text += self.pick(GAPS)
                self.value((*path, i), depth - 1)
                self.text += self.pick(GAPS) + ("," if i < n - 1 else self.pick(["", ","]))
            self.text += self.pick(GAPS) + "]"
        else:
            self.text += "{ "
            for i, names in enumerate(self.keys(2)):
                self.text += ", " if i else ""
                self.pair(path, names, depth - 1)
            self.text += " }"

    def pair(self, path: tuple[Any, ...], names: list[str], depth: int) -> None:
        path = self.key(path, names)
        self.text += self.pick([" = ", "=", " =\t"])
        self.value(path, depth)

    def keys(self, most: int) -> list[list[str]]:
        """Keys of one table; the first name of each is its own, so that no two collide."""
        firsts = self.draw(st.lists(st.sampled_from(NAMES), max_size=most, unique=True))
        return [[n, *self.draw(st.lists(st.sampled_from(NAMES), max_size=2))] for n in firsts]

    def body(self, path: tuple[Any, ...]) -> None:
        for names in self.keys(3):
            self.text += self.pick(["", "  ", "# [c]\n", "\n\t"])
            self.pair(path, names, 2)
            self.text += self.pick(["\n", "  # 'end\n", "\r\n"])

    def tables(self) -> None:
        self.body(())
        for i in range(self.draw(st.integers(0, 3))):
            top = f"T{i}"
            array = self.draw(st.booleans())
            for n in range(self.draw(st.integers(1, 2)) if array else 1):
                here: tuple[Any, ...] = (top, n) if array else (top,)
                for p in ((top,), here) if array else ():
                    self.lines.setdefault(p, self.line)
                if not array:
                    self.lines[here] = self.line
                self.text += self.pick(["", " "]) + ("[[" if array else "[")
                self.name(top)
                self.text += ("]]" if array else "]") + self.pick(["\n", " # x\n"])
                self.body(here)
                if self.draw(st.booleans()):  # a table below, with the last item of the array
                    self.lines[(*here, "sub")] = self.line
                    self.text += "[ "
                    self.name(top)
                    self.text += " . sub ]\n"
                    self.body((*here, "sub"))


@st.composite
def texts(draw: st.DrawFn) -> Text:
    text = Text(draw)
    text.tables()
    return text


def places(node: Any, path: tuple[Any, ...] = ()) -> set[tuple[Any, ...]]:
    out = {path} if path else set()
    items: Any = node.items() if isinstance(node, dict) else ()
    for key, value in enumerate(node) if isinstance(node, list) else items:
        out |= places(value, (*path, key))
    return out


@settings(max_examples=300, deadline=None)
@given(text=texts())
def test_every_key_is_on_the_line_it_was_written(text: Text) -> None:
    data = tomllib.loads(text.text)
    got = key_lines(text.text)
    assert set(got) == places(data)
    assert got == text.lines


CARDS = [
    p
    for kind in ("hardware", "models", "engines", "protocols")
    for p in sorted(data_dir(kind).glob("*.toml"))
]


@pytest.mark.parametrize("path", CARDS, ids=lambda p: p.stem)
def test_every_key_of_a_card(path: Path) -> None:
    text = path.read_text()
    lines = text.splitlines()
    got = key_lines(text)
    assert set(got) == places(tomllib.loads(text))
    for place, line in got.items():
        if isinstance(place[-1], str):
            assert place[-1] in lines[line - 1], place


def test_tables_written_in_an_odd_order() -> None:
    text = "[a.b]\nx = 1\n[c]\n[a]\ny.z = 2\ny.w = 3\n[[d.e]]\n[[d.e]]\nf = [\n 1,\n [2,\n 3]]\n[d.e.g]\n"
    assert key_lines(text) == {
        ("a",): 4, ("a", "b"): 1, ("a", "b", "x"): 2, ("c",): 3, ("a", "y"): 5, ("a", "y", "z"): 5,
        ("a", "y", "w"): 6, ("d",): 7, ("d", "e"): 7, ("d", "e", 0): 7, ("d", "e", 1): 8,
        ("d", "e", 1, "f"): 9, ("d", "e", 1, "f", 0): 10, ("d", "e", 1, "f", 1): 11,
        ("d", "e", 1, "f", 1, 0): 11, ("d", "e", 1, "f", 1, 1): 12, ("d", "e", 1, "g"): 13,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("place", "line"),
    [((), 1), (("a",), 2), (("a", "x"), 3), (("a", "x", 7, "y"), 3), (("a", "no"), 2), (("z",), 1)],
)
def test_a_missing_key_is_where_its_table_is(place: tuple[Any, ...], line: int) -> None:
    assert line_of(key_lines("# head\n[a]\nx = 1\n"), place) == line


def test_nesting_without_end_is_no_error() -> None:
    assert key_lines("x = 1\ny = " + "[" * 5000 + "]" * 5000)[("x",)] == 1
