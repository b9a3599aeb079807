"""The line of every key in a TOML text, which `tomllib` does not keep.

The text must already be valid TOML: this reads only far enough to know where keys and values are.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress

Place = tuple[str | int, ...]

_SPACE = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_BASIC = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_LITERAL = re.compile(r"'[^'\n]*'")
# up to two quotes may stand right before the closing three
_LONG_BASIC = re.compile(r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*"{3,5}', re.DOTALL)
_LONG_LITERAL = re.compile(r"'''(?:[^']|'{1,2}(?!'))*'{3,5}")
_OTHER = re.compile(r"[^,\]}#\n]+")


def key_lines(text: str) -> dict[Place, int]:
    """Every key and array item of valid TOML: path (names, and indexes of items) -> line from 1."""
    scan = _Scan(text)
    with suppress(RecursionError):  # nested deeper than any card: what was found so far
        scan.document()
    return scan.lines


def line_of(lines: Mapping[Place, int], path: Place) -> int:
    """The line of `path`, or of the table around it where the key is missing; 1 for the whole."""
    for end in range(len(path), 0, -1):
        if path[:end] in lines:
            return lines[path[:end]]
    return 1


class _Scan:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Place, int] = {}
        self.arrays: dict[Place, int] = {}  # array of tables -> how many so far
        self.starts = [0, *(m.end() for m in re.finditer("\n", text))]

    def here(self) -> int:
        return bisect_right(self.starts, self.at)

    def space(self) -> None:
        match = _SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        if match is None:
            raise ValueError(f"line {self.here()}: not TOML as expected")
        self.at = match.end()
        return match[0]

    def next(self, *marks: str) -> str | None:
        """The first of `marks` that stands here, or None."""
        return next((m for m in marks if self.text.startswith(m, self.at)), None)

    def document(self) -> None:
        table: Place = ()
        self.space()
        while self.at < len(self.text):
            if mark := self.next("[[", "["):
                line = self.here()
                self.at += len(mark)
                table = self.header(self.key(), mark == "[[", line)
                self.at += len(mark)
            else:
                self.pair(table)
            self.space()

    def header(self, key: list[str], array: bool, line: int) -> Place:
        path: Place = ()
        for i, name in enumerate(key):
            path = (*path, name)
            last = i == len(key) - 1
            if last and array:
                self.arrays[path] = self.arrays.get(path, 0) + 1
            if not last or array:
                self.lines.setdefault(path, line)
            if path in self.arrays:
                path = (*path, self.arrays[path] - 1)
                self.lines.setdefault(path, line)
        if not array:
            self.lines[path] = line  # its own header, even after tables below it
        return path

    def key(self) -> list[str]:
        names = []
        while True:
            self.space()
            if self.next('"', "'"):
                quoted = self.take(_BASIC if self.next('"') else _LITERAL)
                names.append(tomllib.loads(f"x = {quoted}")["x"])
            else:
                names.append(self.take(_BARE))
            self.space()
            if not self.next("."):
                return names
            self.at += 1

    def pair(self, table: Place) -> None:
        self.space()
        line = self.here()
        path = table
        for name in self.key():
            path = (*path, name)
            self.lines.setdefault(path, line)
        self.at += 1  # the equals sign
        self.space()
        self.value(path)

    def value(self, path: Place) -> None:
        self.lines.setdefault(path, self.here())
        if self.next('"""'):
            self.take(_LONG_BASIC)
        elif self.next("'''"):
            self.take(_LONG_LITERAL)
        elif self.next('"'):
            self.take(_BASIC)
        elif self.next("'"):
            self.take(_LITERAL)
        elif self.next("["):
            self.items(path, "]")
        elif self.next("{"):
            self.items(path, "}")
        else:
            self.take(_OTHER)

    def items(self, path: Place, end: str) -> None:
        """The items of an array, or the pairs of an inline table."""
        self.at += 1
        n = 0
        self.space()
        while not self.next(end):
            if end == "]":
                self.value((*path, n))
            else:
                self.pair(path)
            n += 1
            self.space()
            if self.next(","):
                self.at += 1
                self.space()
        self.at += 1
