"""Formulas: units of every definition, LaTeX, generated NumPy against SymPy, derivatives."""

from __future__ import annotations

import math
from functools import reduce
from operator import add, mul
from typing import Any

import numpy as np
import pytest
import sympy as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.operators.families import FAMILIES
from perfmodel.roofline import ROOFLINE
from perfmodel.symbolic import Chain, larger, smaller
from perfmodel.units import registry

CHAINS = {**FAMILIES, "roofline": ROOFLINE}
DEFINITIONS = [(c, d) for c in CHAINS for d in CHAINS[c].defs]


def quantity(value: float, unit: str) -> Any:
    units = registry()
    return units.Quantity(value, "" if unit == "1" else unit)


def dimensional(expr: sp.Expr, values: dict[str, Any]) -> Any:
    """`expr` over pint quantities; raises when it adds, compares or exponentiates wrongly."""
    if expr.is_Symbol:
        return values[expr.name]
    if expr.is_number:
        return quantity(float(expr), "1")
    args = [dimensional(a, values) for a in expr.args]
    if expr.is_Add:
        return reduce(add, args)
    if expr.is_Mul:
        return reduce(mul, args)
    if expr.is_Pow:
        return args[0] ** args[1].to("").magnitude
    if isinstance(expr, larger | smaller):
        # A literal zero fits any unit.
        shown = [a for a, e in zip(args, expr.args, strict=True) if e != 0]
        assert len({str(a.dimensionality) for a in shown}) == 1, f"{expr} compares unlike units"
        return shown[0]
    if isinstance(expr, sp.ceiling | sp.floor):
        return args[0]
    raise AssertionError(f"no unit rule for {type(expr).__name__}")


def check_units(chain: Chain, name: str) -> None:
    """The definition's expression has the unit it declares."""
    values = {n: quantity(1.5, t.unit) for n, t in chain.inputs.items()}
    values |= {n: quantity(float(v), t.unit) for n, (t, v) in chain.constants.items()}
    values |= {n: quantity(1.5, t.unit) for n, (t, _) in chain.defs.items()}
    term, expr = chain.defs[name]
    got = dimensional(expr, values)
    assert got.check(quantity(1, term.unit).dimensionality), f"{got.units} is not {term.unit}"


@pytest.mark.parametrize(("chain", "name"), DEFINITIONS)
def test_unit_of_every_definition(chain: str, name: str) -> None:
    check_units(CHAINS[chain], name)


def test_wrong_definitions_fail_the_unit_check() -> None:
    c = Chain("wrong")
    x, w = c.input("x", "B", "bytes"), c.input("w", "B/s", "bandwidth")
    c.define("inverted", "s", "bandwidth over bytes", w / x)
    c.define("added", "s", "bytes plus bandwidth", x + w)
    c.define("compared", "B", "the larger of unlike things", larger(x, w))
    c.define("power", "B", "an exponent with a unit", 2**x)
    for name in c.defs:
        with pytest.raises(Exception):  # noqa: B017 (pint's errors or ours: any will do)
            check_units(c, name)
    c.define("right", "s", "bytes over bandwidth", x / w)
    check_units(c, "right")


@pytest.mark.parametrize(("chain", "name"), DEFINITIONS)
def test_latex_of_every_definition(chain: str, name: str) -> None:
    text = CHAINS[chain].latex(name)
    left, equals, right = text.partition(" = ")
    assert equals and left.strip() and right.strip()
    assert text.count("{") == text.count("}")
    assert text.count(r"\left") == text.count(r"\right")
    for raw in ("larger", "smaller", "c_mac", "c_rw", "operatorname", "Max", "**", "None"):
        assert raw not in text


def numbers(chain: Chain, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    return {n: float(rng.uniform(1.0, 40.0)) for n in chain.inputs}


def settled(chain: Chain, seed: int) -> dict[str, float]:
    """Random inputs inside the formulas' domain (k experts of E, not more)."""
    v = numbers(chain, seed)
    if "k" in v and "E" in v:
        v["E"] = v["k"] * (1.5 + v["E"])
    return v


@pytest.mark.parametrize("chain", CHAINS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_generated_numpy_is_what_sympy_says(chain: str, seed: int) -> None:
    c = CHAINS[chain]
    v = settled(c, seed)
    got = c.compile()(**{n: np.array([x, x]) for n, x in v.items()})
    for name in c.defs:
        direct = c.expr(name).subs({t.symbol: v[n] for n, t in c.inputs.items()})
        wide = np.broadcast_to(got[name], 2)
        assert wide == pytest.approx(float(direct), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("chain", CHAINS)
def test_derivatives_against_finite_differences(chain: str) -> None:
    c = CHAINS[chain]
    v = settled(c, 7)
    at = {t.symbol: v[n] for n, t in c.inputs.items()}
    for name in c.defs:
        if c.expr(name).has(sp.ceiling):  # steps: no derivative to compare
            continue
        for wrt in c.inputs:
            x = v[wrt]
            h = 1e-6 * x
            up, down = (
                float(c.expr(name).subs({**at, c.inputs[wrt].symbol: x + d})) for d in (h, -h)
            )
            slope = (up - down) / (2 * h)
            value = float(c.expr(name).subs(at))
            scale = abs(value / x) + 1e-12
            assert float(c.derivative(name, wrt).subs(at)) == pytest.approx(
                slope, rel=1e-4, abs=1e-6 * scale
            ), (name, wrt)
            if value:
                assert float(c.elasticity(name, wrt).subs(at)) == pytest.approx(
                    slope * x / value, rel=1e-4, abs=1e-6
                ), (name, wrt)


def test_names_are_declared_once_and_symbols_known() -> None:
    c = Chain("c")
    x = c.input("x", "1", "x")
    with pytest.raises(ValueError, match="'x' is declared twice"):
        c.input("x", "1", "again")
    with pytest.raises(ValueError, match="undeclared"):
        c.define("y", "1", "y", x + sp.Symbol("x"))  # same name, other assumptions
    with pytest.raises(KeyError, match="no 'z'"):
        c.compile("z")
    c.define("y", "1", "y", 2 * x)
    with pytest.raises(ValueError, match="lacks bindings for \\['x'\\]"):
        c.bind("y", {})


def test_source_keeps_every_definition_by_name() -> None:
    source = FAMILIES["experts"].compile().source
    for name in FAMILIES["experts"].defs:
        assert f"{name} = " in source


@given(a=st.floats(-1e6, 1e6), b=st.floats(-1e6, 1e6))
def test_larger_and_smaller(a: float, b: float) -> None:
    c = Chain("choice")
    x, y = c.input("x", "1", ""), c.input("y", "1", "")
    c.define("hi", "1", "", larger(x, y))
    c.define("lo", "1", "", smaller(x, y))
    got = c.compile()(x=a, y=b)
    assert got["hi"] == max(a, b) and got["lo"] == min(a, b)
    assert math.isclose(got["hi"] + got["lo"], a + b)
