"""Fast code for sweeps: a chain compiled for inputs of which only some are columns.

The plain compiler (`Chain.compile`) keeps every definition by name and runs one array pass for
each operation. Here every definition is kept as a sum of columns with scalar coefficients, so
that all arithmetic between scalars runs once and not per row, and terms of one column merge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import sympy as sp

from perfmodel.symbolic import Chain, Compiled, larger, smaller, to_numpy

TINY = sp.Float("1e-250")
Form = tuple[sp.Expr, dict[sp.Symbol, sp.Expr]]  # scalar + sum of coefficient x column


class _Hoist:
    """Turns definitions into `lines` (symbol, expression): scalars, then passes over columns."""

    def __init__(self, columns: set[sp.Symbol]) -> None:
        self.forms: dict[sp.Symbol, Form] = {s: (sp.S.Zero, {s: sp.S.One}) for s in columns}
        self.lines: list[tuple[sp.Symbol, sp.Expr]] = []
        self.seen: dict[sp.Expr, sp.Symbol] = {}
        self.positive = set(columns)  # columns known to be at least 0

    def named(self, prefix: str, e: sp.Expr) -> sp.Symbol:
        """A local variable for `e`, the same one for the same expression."""
        if e not in self.seen:
            s = sp.Symbol(f"{prefix}{len(self.lines)}_", positive=True)
            self.seen[e] = s
            self.lines.append((s, e))
        return self.seen[e]

    def scalar(self, e: sp.Expr) -> sp.Expr:
        return e if e.is_number or e.is_Symbol else self.named("k", e)

    def whole(self, f: Form) -> sp.Expr:
        """The form as one expression with its coefficients hoisted."""
        const, terms = f
        parts = [self.scalar(c) * a for a, c in terms.items()]
        return sp.Add(self.scalar(const), *parts)

    def column(self, e: sp.Expr) -> Form:
        a = self.named("z", e)
        self.forms[a] = (sp.S.Zero, {a: sp.S.One})
        return self.forms[a]

    def form(self, e: sp.Expr) -> Form:
        if e.is_Symbol and e in self.forms:
            return self.forms[e]
        if not any(s in self.forms for s in e.free_symbols):
            return e, {}
        if e.is_Add:
            const, terms = sp.S.Zero, dict[sp.Symbol, sp.Expr]()
            for x in e.args:
                c, t = self.form(x)
                const += c
                for a, k in t.items():
                    terms[a] = terms.get(a, sp.S.Zero) + k
            return const, terms
        if e.is_Mul:
            return self.product([self.form(x) for x in e.args])
        if isinstance(e, larger) and (hinge := self.hinge(*(self.form(x) for x in e.args))):
            return hinge
        if e.is_Pow or isinstance(e, larger | smaller):
            forms = [self.form(x) for x in e.args]
            out = self.column(e.func(*(self.whole(f) for f in forms)))
            if all(self.counts(f) if f[1] else f[0].is_nonnegative or e.is_Pow for f in forms):
                self.positive |= set(out[1])  # of columns and scalars that are at least 0
            return out
        # Conditions and roundings stay as written: a rounding must not see B (1/n) for B / n.
        swap = {s: self.whole(self.forms[s]) for s in e.free_symbols if s in self.forms}
        out = self.column(e.xreplace(swap))
        if isinstance(e, sp.ceiling | sp.floor) and self.counts(self.form(e.args[0])):
            self.positive |= set(out[1])
        return out

    def counts(self, f: Form) -> bool:
        """Whether the form is one column, at least 0, times a positive scalar."""
        const, terms = f
        return const == 0 and all(a in self.positive and k.is_positive for a, k in terms.items())

    def hinge(self, f: Form, g: Form) -> Form | None:
        """The larger of a x and b x + c, for x and c at least 0, in one pass instead of four.

        It is b x + s larger(x, c/s) with s = a - b; where that is not positive, a tiny s leaves c.
        """
        if f[0] != 0:
            f, g = g, f
        (zero, at), (c, bt) = f, g
        if zero != 0 or len({*at, *bt}) != 1 or not (c == 0 or c.is_positive):
            return None
        (x,) = {*at, *bt}
        if x not in self.positive:
            return None
        a, b = at.get(x, sp.S.Zero), bt.get(x, sp.S.Zero)
        if c == 0:
            return c, {x: self.scalar(larger(self.scalar(a), self.scalar(b)))}
        s = self.scalar(larger(self.scalar(a) - self.scalar(b), TINY))
        _, bent = self.column(larger(x, self.scalar(c / s)))
        return sp.S.Zero, {x: b, **{z: s for z in bent}}

    def product(self, forms: list[Form]) -> Form:
        factor = sp.Mul(*(c for c, t in forms if not t))
        moving = [f for f in forms if f[1]]
        if len(moving) == 1:
            const, terms = moving[0]
            return const * factor, {a: k * factor for a, k in terms.items()}
        atoms = []
        for const, terms in moving:
            if len(terms) == 1 and const == 0:
                ((a, k),) = terms.items()
                factor *= k
                atoms.append(a)
            else:
                atoms.append(self.named("z", self.whole((const, terms))))
        _, terms = self.column(sp.Mul(*atoms))
        if self.positive.issuperset(atoms):
            self.positive |= set(terms)
        return sp.S.Zero, {a: k * factor for a, k in terms.items()}


def compile_columns(chain: Chain, outputs: Iterable[str], columns: Iterable[str]) -> Compiled:
    """`outputs` as a function of all inputs, fast where only `columns` are arrays.

    Equal to `chain.compile(*outputs)` up to rounding.
    """
    outputs = tuple(outputs)
    values = {t.symbol: v for t, v in chain.constants.values()}
    hoist = _Hoist({chain.inputs[n].symbol for n in columns})
    used: set[sp.Symbol] = set()
    needed = chain.needed(outputs)
    uses = Counter(s for n in needed for s in chain.defs[n][1].free_symbols)
    for n in needed:
        term, expr = chain.defs[n]
        expr = expr.xreplace(values)
        used |= expr.free_symbols
        const, terms = hoist.form(expr)
        if not terms:
            hoist.lines.append((term.symbol, const))
        elif n in outputs or (len(terms) > 2 and uses[term.symbol] > 1):
            # wanted as a whole, or a long sum that would be added up again at each use
            hoist.lines.append((term.symbol, hoist.whole((const, terms))))
            hoist.forms[term.symbol] = (sp.S.Zero, {term.symbol: sp.S.One})
        else:
            hoist.forms[term.symbol] = (const, terms)
    args = [t.symbol for t in chain.inputs.values() if t.symbol in used]
    return to_numpy(args, hoist.lines, [chain.defs[n][0].symbol for n in outputs], outputs)
