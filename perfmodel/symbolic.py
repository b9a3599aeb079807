"""SymPy as the one source of formulas: LaTeX, generated NumPy, derivatives and unit checks.

A `Chain` is an ordered list of named definitions, each with its unit and one line of doc. The
notebook shows it as LaTeX; the sweep runs it as generated NumPy in which every definition stays a
named local variable (lambdify's `cse` hook); sensitivity differentiates it; `explain` prints it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy as sp
from sympy.printing.numpy import NumPyPrinter
from sympy.printing.precedence import PRECEDENCE


class _Printer(NumPyPrinter):
    """NumPyPrinter that divides fast."""

    def _print_Pow(self, expr: sp.Expr, rational: bool = False) -> str:  # noqa: N802 (SymPy's)
        if expr.exp == -1:  # a division is several times as fast as a power
            return f"(1/{self.parenthesize(expr.base, PRECEDENCE['Pow'])})"
        return super()._print_Pow(expr, rational=rational)


class _Choice(sp.Function):
    """Base of `larger` and `smaller`: SymPy's Max and Min compare their arguments symbolically
    at every rebuild, which costs seconds over a step; these stay as written."""

    nargs = 2
    _pick: Callable[..., Any]
    _word = ""

    @classmethod
    def eval(cls, a: sp.Expr, b: sp.Expr) -> sp.Expr | None:
        if a.is_number and b.is_number:  # log(8) is a number, too, though no literal one
            return cls._pick(a, b, key=float)
        return None

    def _eval_is_extended_positive(self) -> bool | None:
        return all(a.is_extended_positive for a in self.args) or None

    def _latex(self, printer: Any, **_: Any) -> str:
        inner = ", ".join(printer._print(a) for a in self.args)
        return rf"\{self._word}\left({inner}\right)"

    def _sympystr(self, printer: Any) -> str:
        return f"{self._word}({', '.join(printer._print(a) for a in self.args)})"

    def _numpycode(self, printer: Any) -> str:
        name = printer._module_format(f"numpy.{self._word}imum")
        return f"{name}({', '.join(printer._print(a) for a in self.args)})"


class larger(_Choice):  # noqa: N801 (a function in formulas)
    """The larger of two; its derivative is a Heaviside step."""

    _pick, _word = staticmethod(max), "max"

    @classmethod
    def eval(cls, a: sp.Expr, b: sp.Expr) -> sp.Expr | None:
        if a.is_zero and b.is_positive:  # an operator that computes nothing has one time only
            return b
        return super().eval(a, b)

    def fdiff(self, argindex: int = 1) -> sp.Expr:
        a, b = self.args
        return sp.Heaviside(a - b if argindex == 1 else b - a)


class smaller(_Choice):  # noqa: N801
    """The smaller of two."""

    _pick, _word = staticmethod(min), "min"

    def fdiff(self, argindex: int = 1) -> sp.Expr:
        a, b = self.args
        return sp.Heaviside(b - a if argindex == 1 else a - b)


class either(sp.Function):  # noqa: N801
    """either(x, a, b): a where x > 0, else b. SymPy's Piecewise simplifies its conditions at every
    rebuild, which costs seconds over a step; this stays as written."""

    nargs = 3

    @classmethod
    def eval(cls, x: sp.Expr, a: sp.Expr, b: sp.Expr) -> sp.Expr | None:
        if a == b:
            return a
        if x.is_number:
            return a if float(x) > 0 else b
        return None

    def fdiff(self, argindex: int = 1) -> sp.Expr:
        """Zero for the test: it only switches between two expressions."""
        if argindex == 1:
            return sp.S.Zero
        x = self.args[0]
        return sp.Heaviside(x, 0) if argindex == 2 else sp.Heaviside(-x, 1)

    def _eval_is_extended_positive(self) -> bool | None:
        return all(a.is_extended_positive for a in self.args[1:]) or None

    def _latex(self, printer: Any, **_: Any) -> str:
        x, a, b = (printer._print(z) for z in self.args)
        return rf"\begin{{cases}} {a} & {x} > 0 \\ {b} & \text{{else}} \end{{cases}}"

    def _sympystr(self, printer: Any) -> str:
        x, a, b = (printer._print(z) for z in self.args)
        return f"({a} if {x} > 0 else {b})"

    def _numpycode(self, printer: Any) -> str:
        name = printer._module_format("numpy.where")
        x, a, b = (printer._print(z) for z in self.args)
        return f"{name}({x} > 0, {a}, {b})"


@dataclass(frozen=True)
class Term:
    """A symbol of a chain: its unit (pint's spelling) and meaning."""

    symbol: sp.Symbol
    unit: str
    doc: str


class Chain:
    """Ordered definitions over declared inputs. Names are unique; every symbol is positive."""

    def __init__(self, name: str, doc: str = "") -> None:
        self.name, self.doc = name, doc
        self.inputs: dict[str, Term] = {}
        self.constants: dict[str, tuple[Term, sp.Expr]] = {}
        self.defs: dict[str, tuple[Term, sp.Expr]] = {}
        self.tex: dict[sp.Symbol, str] = {}
        self._compiled: dict[tuple[str, ...], Compiled] = {}
        self._expanded: dict[str, sp.Expr] = {}

    def _term(self, name: str, unit: str, doc: str, tex: str | None) -> Term:
        if name in self.inputs or name in self.defs or name in self.constants:
            raise ValueError(f"chain {self.name}: {name!r} is declared twice")
        t = Term(symbol(name), unit, doc)
        if tex:
            self.tex[t.symbol] = tex
        elif len(name) > 1 and name.isalpha():  # "ep" is one name, not e times p
            self.tex[t.symbol] = rf"\mathrm{{{name}}}"
        return t

    def input(self, name: str, unit: str, doc: str, tex: str | None = None) -> sp.Symbol:
        self.inputs[name] = t = self._term(name, unit, doc, tex)
        return t.symbol

    def const(self, name: str, value: Any, unit: str, doc: str) -> sp.Symbol:
        """A number with a unit: shown and compiled as its value, checked as its unit."""
        t = self._term(name, unit, doc, sp.latex(sp.sympify(value)))
        self.constants[name] = (t, sp.sympify(value))
        return t.symbol

    def define(
        self, name: str, unit: str, doc: str, expr: sp.Expr, tex: str | None = None
    ) -> sp.Symbol:
        expr = sp.sympify(expr)
        known = {t.symbol for t in self.inputs.values()}
        known |= {t.symbol for t, _ in self.defs.values()}
        known |= {t.symbol for t, _ in self.constants.values()}
        if unknown := expr.free_symbols - known:
            raise ValueError(f"chain {self.name}: {name} uses undeclared symbols {unknown}")
        t = self._term(name, unit, doc, tex)
        self.defs[name] = (t, expr)
        return t.symbol

    def term(self, name: str) -> Term:
        if name in self.inputs:
            return self.inputs[name]
        if name in self.constants:
            return self.constants[name][0]
        return self.defs[name][0]

    # ---- symbolic side

    def expr(self, name: str, keep: Iterable[str] = ()) -> sp.Expr:
        """The definition of `name` in inputs only (and the definitions named in `keep`)."""
        if not keep:
            if name not in self._expanded:
                self._expanded[name] = self._expand(name, ())
            return self._expanded[name]
        return self._expand(name, keep)

    def _expand(self, name: str, keep: Iterable[str]) -> sp.Expr:
        e = self.defs[name][1]
        for n, (t, d) in reversed(self.defs.items()):
            if n != name and n not in keep:
                e = e.xreplace({t.symbol: d})
        return e.xreplace({t.symbol: v for t, v in self.constants.values()})

    def bind(self, name: str, bindings: Mapping[str, Any]) -> sp.Expr:
        """`name` with its inputs replaced by numbers or by another chain's expressions."""
        missing = {s.name for s in self.expr(name).free_symbols if s.name not in bindings}
        if missing:
            raise ValueError(f"chain {self.name}: {name} lacks bindings for {sorted(missing)}")
        table = {t.symbol: sp.sympify(bindings[n]) for n, t in self.inputs.items() if n in bindings}
        return self.expr(name).xreplace(table)

    def latex(self, name: str) -> str:
        t, e = self.defs[name]
        e = e.xreplace({c.symbol: v for c, v in self.constants.values()})
        return sp.latex(sp.Eq(t.symbol, e, evaluate=False), symbol_names=self.tex, mul_symbol=r"\,")

    def derivative(self, name: str, wrt: str) -> sp.Expr:
        """d name / d wrt in inputs only; the derivative of Max is a Heaviside."""
        return sp.diff(self.expr(name), self.inputs[wrt].symbol)

    def elasticity(self, name: str, wrt: str) -> sp.Expr:
        """d ln(name) / d ln(wrt), dimensionless."""
        e, v = self.expr(name), self.inputs[wrt].symbol
        return sp.diff(e, v) * v / e

    # ---- numeric side

    def needed(self, outputs: Iterable[str]) -> list[str]:
        """The definitions that `outputs` rest on, in order."""
        need, todo = set(), list(outputs)
        while todo:
            n = todo.pop()
            if n not in need:
                need.add(n)
                todo += [s.name for s in self.defs[n][1].free_symbols if s.name in self.defs]
        return [n for n in self.defs if n in need]

    def compile(self, *outputs: str, constants_as_arguments: bool = False) -> Compiled:
        """`f(**inputs) -> {output: array}`, vectorised; inputs broadcast against each other.

        With `constants_as_arguments` the chain's constants become arguments too, which lets a
        test run the same code on pint quantities.
        """
        outputs = outputs or tuple(self.defs)
        key = (*outputs, str(constants_as_arguments))
        if key not in self._compiled:
            self._compiled[key] = self._compile(outputs, constants_as_arguments)
        return self._compiled[key]

    def compile_columns(self, outputs: Iterable[str], columns: tuple[str, ...]) -> Compiled:
        """As `compile`, several times as fast, where only the inputs `columns` are arrays."""
        from perfmodel.columns import compile_columns  # here: it builds on this module

        key = (*outputs, "columns", *columns)
        if key not in self._compiled:
            self._compiled[key] = compile_columns(self, outputs, columns)
        return self._compiled[key]

    def _compile(self, outputs: tuple[str, ...], constants_as_arguments: bool) -> Compiled:
        for n in outputs:
            if n not in self.defs:
                raise KeyError(f"chain {self.name} defines no {n!r}")
        values = {t.symbol: v for t, v in self.constants.values()}
        if constants_as_arguments:
            values = {}
        chain = [
            (self.defs[n][0].symbol, self.defs[n][1].xreplace(values)) for n in self.needed(outputs)
        ]
        used = set().union(*(e.free_symbols for _, e in chain))
        args = [t.symbol for t in self.inputs.values() if t.symbol in used]
        args += [t.symbol for t, _ in self.constants.values() if t.symbol in used]
        results = [self.defs[n][0].symbol for n in outputs]
        return to_numpy(args, chain, results, outputs)


@dataclass(frozen=True)
class Compiled:
    """A compiled chain: call it with keyword inputs (extra ones are ignored)."""

    function: Callable[..., list[Any]]
    args: tuple[str, ...]
    outputs: tuple[str, ...]

    def __call__(self, **inputs: Any) -> dict[str, Any]:
        return dict(zip(self.outputs, self.function(*(inputs[n] for n in self.args)), strict=True))

    @property
    def source(self) -> str:
        return inspect.getsource(self.function)


def to_numpy(
    args: list[sp.Symbol],
    lines: list[tuple[sp.Symbol, sp.Expr]],
    results: list[sp.Symbol],
    outputs: tuple[str, ...],
) -> Compiled:
    """NumPy code that runs `lines` (local variable, expression) in order."""
    settings = {
        "fully_qualified_modules": False,
        "inline": True,
        "allow_unknown_functions": True,
    }
    f = sp.lambdify(
        args,
        results,
        modules="numpy",
        printer=_Printer(settings),
        cse=lambda exprs: (lines, list(exprs)),
    )
    return Compiled(f, tuple(a.name for a in args), outputs)


def evaluate(expr: Any, known: Mapping[str, float]) -> float:
    """A number or expression as a float; most are numbers or single symbols, and `subs` is slow."""
    if isinstance(expr, int | float):
        return float(expr)
    if isinstance(expr, sp.Symbol):
        return known[expr.name]
    expr = sp.sympify(expr)
    return float(expr.subs({s: known[s.name] for s in expr.free_symbols}))


def symbol(name: str) -> sp.Symbol:
    """The one way symbols are made here: a symbol is its name *and* its assumptions."""
    return sp.Symbol(name, positive=True)
