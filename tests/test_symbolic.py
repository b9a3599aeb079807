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

from perfmodel.factory import LOOP
from perfmodel.factory import METRICS as FACTORY
from perfmodel.operators.families import FAMILIES
from perfmodel.roofline import ROOFLINE
from perfmodel.symbolic import Chain, either, evaluate, larger, smaller
from perfmodel.units import registry

CHAINS = {**FAMILIES, "roofline": ROOFLINE, "factory": LOOP, "factory metrics": FACTORY}
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
    if isinstance(expr, either):
        shown = [a for a, e in zip(args[1:], expr.args[1:], strict=True) if e != 0]
        assert len({str(a.dimensionality) for a in shown}) == 1, f"{expr} chooses unlike units"
        return shown[0]
    if isinstance(expr, sp.log):
        assert args[0].dimensionless, f"{expr} is the logarithm of a quantity with a unit"
        return quantity(1, "1")
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
    c.define("chosen", "B", "one of unlike things", either(x, x, w))
    c.define("choice", "B", "the wrong one of like things", either(x, w, 2 * w))
    c.define("logarithm", "1", "a logarithm of bytes", sp.log(x))
    for name in c.defs:
        with pytest.raises(Exception):  # noqa: B017 (pint's errors or ours: any will do)
            check_units(c, name)
    c.define("right", "s", "bytes over bandwidth", x / w)
    c.define("either", "s", "a literal zero fits any unit", either(x - 2 * x, 0, x / w))
    check_units(c, "right")
    check_units(c, "either")


@pytest.mark.parametrize(("chain", "name"), DEFINITIONS)
def test_latex_of_every_definition(chain: str, name: str) -> None:
    text = CHAINS[chain].latex(name)
    left, equals, right = text.partition(" = ")
    assert equals and left.strip() and right.strip()
    assert text.count("{") == text.count("}")
    assert text.count(r"\left") == text.count(r"\right")
    assert text.count(r"\begin{cases}") == text.count(r"\end{cases}")
    for raw in ("larger", "smaller", "either", "c_mac", "operatorname", "Max", "**", "None"):
        assert raw not in text


def numbers(chain: Chain, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    return {n: float(rng.uniform(1.0, 40.0)) for n in chain.inputs}


def settled(chain: Chain, seed: int) -> dict[str, float]:
    """Random inputs inside the formulas' domain (k experts of E, not more; shares up to 1)."""
    v = numbers(chain, seed)
    if "k" in v and "E" in v:
        v["E"] = v["k"] * (1.5 + v["E"])
    if chain.name in ("experts", "roofline"):
        for share in {"xi", "s"} & set(v) - ({"s"} if chain.name == "experts" else set()):
            v[share] /= 40
    if "D" in v and seed % 2:  # every other group stays inside one domain
        v["D"] = v["g"] * (1 + v["D"])
    return v


def by_hand(expr: sp.Expr, known: dict[str, float]) -> float:
    """`expr` in plain Python, one rule for each kind of node: no SymPy, no NumPy."""
    if expr.is_Symbol:
        return known[expr.name]
    if not expr.args:
        return float(expr)
    args = [by_hand(a, known) for a in expr.args]
    if isinstance(expr, either):
        return args[1] if args[0] > 0 else args[2]
    rules: list[tuple[Any, Any]] = [
        (sp.Add, lambda *x: math.fsum(x)), (sp.Pow, lambda a, b: a**b),
        (sp.Mul, lambda *x: 0 if 0 in x else math.prod(x)),  # 0 log 0 is 0
        (sp.log, lambda x: math.log(x) if x else -math.inf), (sp.ceiling, math.ceil),
        (sp.floor, math.floor), (larger, max), (smaller, min),
    ]  # fmt: skip
    (rule,) = [f for kind, f in rules if isinstance(expr, kind)]
    return float(rule(*args))


@pytest.mark.parametrize("chain", CHAINS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_generated_numpy_is_what_the_formulas_say(chain: str, seed: int) -> None:
    """Each definition from those before it, node by node; and expanded to inputs only."""
    c = CHAINS[chain]
    v = settled(c, seed)
    got = c.compile()(**{n: np.array([x, x]) for n, x in v.items()})
    known = v | {n: float(x) for n, (_, x) in c.constants.items()}
    for name, (_, expr) in c.defs.items():
        known[name] = by_hand(expr, known)
        wide = np.broadcast_to(got[name], 2)
        # differences of near numbers: what is left of their digits
        assert wide == pytest.approx(known[name], rel=1e-9, abs=1e-12)
        assert by_hand(c.expr(name), v) == pytest.approx(known[name], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("chain", CHAINS)
def test_evaluate_takes_every_definition(chain: str) -> None:
    """`explain` and the breakdown evaluate formulas by substitution, inputs and all."""
    c = CHAINS[chain]
    for seed in (7, 8):
        v = settled(c, seed)
        for numbers_ in (v, {n: float(round(x)) for n, x in v.items()}):
            if chain == "roofline":
                numbers_ = numbers_ | {"s": 0.25}
            for name in c.defs:
                assert evaluate(c.expr(name), numbers_) == pytest.approx(
                    by_hand(c.expr(name), numbers_), rel=1e-9, abs=1e-12
                ), name


@pytest.mark.parametrize("seed", [7, 8])
@pytest.mark.parametrize("chain", CHAINS)
def test_derivatives_against_finite_differences(chain: str, seed: int) -> None:
    c = CHAINS[chain]
    v = settled(c, seed)
    checked = 0
    for name in c.defs:
        expr = c.expr(name)
        value = by_hand(expr, v)
        for wrt in c.inputs:
            x = v[wrt]
            h = 1e-6 * x
            ends = [{**v, wrt: x + d} for d in (h, -h)]
            # ceilings are steps: a derivative is compared where none of them moves
            steps = [s for s in expr.atoms(sp.ceiling) if c.inputs[wrt].symbol in s.free_symbols]
            if any(s.args[0].diff(c.inputs[wrt].symbol) != 0 for s in steps):
                continue
            up, down = (by_hand(expr, at) for at in ends)
            slope = (up - down) / (2 * h)
            scale = abs(value / x) + 1e-12
            assert derived(c.derivative(name, wrt), v) == pytest.approx(
                slope, rel=1e-4, abs=1e-6 * scale
            ), (name, wrt)
            checked += 1
            if value:
                assert derived(c.elasticity(name, wrt), v) == pytest.approx(
                    slope * x / value, rel=1e-4, abs=1e-6
                ), (name, wrt)
    assert checked >= len(c.inputs)


def derived(expr: sp.Expr, known: dict[str, float]) -> float:
    """A derivative's value: steps of its `larger`, `smaller` and `either` put in first."""
    steps = expr.atoms(sp.Heaviside)
    while steps:
        inner = min(steps, key=lambda s: s.count_ops())
        x = by_hand(inner.args[0], known)
        expr = expr.xreplace({inner: inner.args[1] if x == 0 else sp.Integer(x > 0)})
        steps = expr.atoms(sp.Heaviside)
    return by_hand(sp.sympify(expr), known)


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


def test_either() -> None:
    """either(x, a, b): a where x > 0, else b; it follows the branch, never the test."""
    c = Chain("choice")
    x, a, b = (c.input(n, "1", n) for n in "xab")
    c.define("y", "1", "", either(x - 2, 3 * a, a * b))
    got = c.compile()(x=np.array([1.0, 2.0, 3.0]), a=5.0, b=np.array([7.0, 8.0, 9.0]))["y"]
    assert got.tolist() == [35.0, 40.0, 15.0]  # at x = 2 the test is 0: not above it
    both = c.compile()(x=1.0, a=np.array([5.0, 6.0]), b=7.0)["y"]
    assert both.tolist() == [35.0, 42.0]  # broadcasts, which SymPy's own Piecewise does not
    for at, slopes in ((3.0, (0.0, 3.0, 0.0)), (1.0, (0.0, 7.0, 5.0)), (2.0, (0.0, 7.0, 5.0))):
        known = dict(x=at, a=5.0, b=7.0)
        for wrt, slope in zip("xab", slopes, strict=True):
            assert float(c.derivative("y", wrt).subs({x: at, a: 5, b: 7})) == slope, (at, wrt)
        assert evaluate(c.expr("y"), known) == (15.0 if at > 2 else 35.0)
    assert either(sp.Integer(1), a, b) == a and either(sp.Integer(0), a, b) == b
    assert either(sp.Float(-0.5), a, b) == b and either(x, a, a) == a
    assert c.latex("y") == (r"y = \begin{cases} 3\,a & x - 2 > 0 \\ a\,b & \text{else} \end{cases}")
    assert str(c.defs["y"][1]) == "(3*a if x - 2 > 0 else a*b)"


@pytest.mark.parametrize(("pick", "plain"), [(larger, max), (smaller, min)])
def test_numbers_that_are_not_literals_are_compared(pick: Any, plain: Any) -> None:
    """sqrt(2) and log(2) are numbers too, though SymPy keeps them as written."""
    a, b = sp.sqrt(2) * sp.Float(0.9), sp.log(2) + 1
    assert evaluate(pick(a, b), {}) == pytest.approx(plain(1.2727922, 1.6931472))
    assert evaluate(pick(a, sp.Integer(3)), {}) == pytest.approx(plain(1.2727922, 3))
    assert evaluate(either(a - b, 1, 2), {}) == 2 and evaluate(either(b - a, 1, 2), {}) == 1
