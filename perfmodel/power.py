"""Board power that a GPU draws in a step, and its mean over decode, prefill and idle time.

A board draws its idle power, and the rest of its limit in proportion to what it is doing. Time of
the tensor cores and time of the memory count with one weight (`working`; where they overlap, both
count), time in which a step has neither (links, latency floors, the host) with a smaller one
(`waiting`). The three constants are in `power.toml`, the same for all models, chips and engines;
four separate weights did not predict the held-out rows clearly better.

This is power of the board alone, not of the server, and not the provisioned power of a machine
card (`power_basis`). It is calibrated for B200 only, and too high on MI355X by about a quarter:
see tests/test_power.py for the error by chip and model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from perfmodel import catalog
from perfmodel.api import Estimate
from perfmodel.errors import InputError
from perfmodel.hardware import System
from perfmodel.paths import data_dir
from perfmodel.request import as_system
from perfmodel.symbolic import Chain, smaller

_ROUNDING = 1e-9


def _step_power() -> Chain:
    c = Chain("power", "board power of one GPU in a step")
    cap = c.input("P_cap", "W", "power limit of the board", r"P_\mathrm{cap}")
    idle = c.input("p_idle", "1", "idle power over the limit", r"p_\mathrm{idle}")
    works = c.input("w_work", "1", "weight of compute and memory time", r"w_\mathrm{work}")
    waits = c.input("w_wait", "1", "weight of link, floor and host time", r"w_\mathrm{wait}")
    compute = c.input("sum_compute", "s", "compute time of all operators", r"\Sigma t_c")
    memory = c.input("sum_memory", "s", "memory time of all operators", r"\Sigma t_m")
    link = c.input("sum_link", "s", "link time of all operators", r"\Sigma t_\ell")
    floor = c.input("sum_floor", "s", "latency floors of all operators", r"\Sigma t_f")
    host = c.input("t_host", "s", "host time of a step", r"t_\mathrm{host}")
    step = c.input("step_time", "s", "time of a step", r"t_\mathrm{step}")
    mb = c.input("n_mb", "1", "microbatches in flight", r"n_\mathrm{mb}")
    pp = c.input("pp", "1", "pipeline stages", "pp")
    # The sums are of one microbatch over all layers; a GPU has the layers of one stage.
    turns = c.define("turns", "1", "sums that a GPU runs in a step", mb / pp)
    work = c.define("u_work", "1", "share of a step in compute and in memory, added",
                    turns * (compute + memory) / step, r"u_\mathrm{work}")  # fmt: skip
    wait = c.define("u_wait", "1", "share of a step in links, floors and the host",
                    (turns * (link + floor) + host) / step, r"u_\mathrm{wait}")  # fmt: skip
    u = c.define("u", "1", "activity of the board", smaller(1, works * work + waits * wait))
    c.define("P_idle", "W", "idle power", idle * cap, r"P_\mathrm{idle}")
    c.define("P_drawn", "W", "board power in the step", cap * (idle + (1 - idle) * u),
             r"P_\mathrm{drawn}")  # fmt: skip
    return c


def _mean_power() -> Chain:
    c = Chain("mean power", "board power over the time of decode, prefill and nothing")
    dec = c.input("P_dec", "W", "board power in a decode step", r"P_\mathrm{dec}")
    pre = c.input("P_pre", "W", "board power in a prefill", r"P_\mathrm{pre}")
    idle = c.input("P_idle", "W", "idle power", r"P_\mathrm{idle}")
    x = c.input("x_dec", "1", "share of the time in decode", r"x_\mathrm{dec}")
    y = c.input("x_pre", "1", "share of the time in prefill", r"x_\mathrm{pre}")
    n = c.input("g_dec", "1", "GPUs of the decode pool", r"g_\mathrm{dec}")
    m = c.input("g_pre", "1", "GPUs of the prefill pool", r"g_\mathrm{pre}")
    c.define("P_mean", "W", "mean board power: the same GPUs decode and prefill",
             idle + x * (dec - idle) + y * (pre - idle), r"P_\mathrm{mean}")  # fmt: skip
    c.define("P_pools", "W", "mean board power of a GPU: a decode and a prefill pool",
             idle + (n * x * (dec - idle) + m * y * (pre - idle)) / (n + m),
             r"P_\mathrm{pools}")  # fmt: skip
    return c


def _time_shares() -> Chain:
    c = Chain("time shares", "what the GPUs of a closed loop do with their time")
    rate = c.input("output_rate", "token/s", "output tokens per second of a decode instance",
                   r"\Theta")  # fmt: skip
    out = c.input("O", "token", "output tokens of a request")
    work = c.input("t_prefill", "s", "prefill of a request in the engine", r"t_\mathrm{prefill}")
    ranks = c.input("n_pre", "1", "ranks that prefill for a decode instance", r"n_\mathrm{pre}")
    resident = c.input("resident", "1", "requests that hold KV cache")
    share = c.input("f", "1", "share of its time a resident request decodes")
    own = c.input("agg", "1", "1: prefill on the same GPUs; 0: in its own pool", r"a")
    y = c.define("x_pre", "1", "share of the time in prefill",
                 smaller(1, rate / out * work / ranks), r"x_\mathrm{pre}")  # fmt: skip
    c.define("x_dec", "1", "share of the time in decode", smaller(1 - own * y, resident * share),
             r"x_\mathrm{dec}")  # fmt: skip
    return c


POWER, MEAN, SHARES = _step_power(), _mean_power(), _time_shares()


@dataclass(frozen=True)
class TimeShares:
    """Shares of the time of a GPU, 0 .. 1: in decode steps and in prefills (the rest is idle)."""

    decode: float
    prefill: float


@lru_cache(maxsize=1)
def constants() -> dict[str, catalog.Quantity]:
    """The constants of `power.toml`: idle, working, waiting (shares of the power limit)."""
    return catalog.read_quantities(data_dir("models").parent / "power.toml", "values")


def inputs_of(e: Estimate, system: str | System | None = None) -> dict[str, float]:
    """Every input of the chain POWER for a step, in W and s.

    system: where the power limit (`power.chip` of the card) is from; by default the card of
    `e.system_id`. Raises InputError when `e` is no Estimate, or the card is of another machine or
    has no `power.chip`.
    """
    if not isinstance(e, Estimate):
        raise InputError(f"estimate: {type(e).__name__} is no Estimate; expected api.estimate(...)")
    card = as_system(e.system_id if system is None else system)
    if card.id != e.system_id:
        raise InputError(f"system: {card.id!r} is not the {e.system_id!r} of the estimate")
    cap = _limit(card)
    k = constants()
    parts = {
        f"sum_{part}": sum(getattr(x, f"{part}_s") for x in e.operators)
        for part in ("compute", "memory", "link", "floor")
    }
    return parts | {
        "P_cap": cap,
        "p_idle": k["idle"].value,
        "w_work": k["working"].value,
        "w_wait": k["waiting"].value,
        "t_host": e.values["t_host"],
        "step_time": e.step_time_s,
        "n_mb": e.values["n_mb"],
        "pp": float(e.plan.pp),
    }


def drawn_w(e: Estimate, system: str | System | None = None) -> float:
    """Board power of one GPU in this step, W: at least idle, at most the limit of the board.

    Sources: the step's breakdown (`operators`), `power.chip` of the machine card, `power.toml`.
    Raises InputError as `inputs_of`.
    """
    return float(POWER.compile("P_drawn")(**inputs_of(e, system))["P_drawn"])


def idle_w(system: str | System) -> float:
    """Board power of one GPU with a model loaded and nothing to do, W (`power.toml`, idle).

    Raises InputError where the card has no `power.chip`.
    """
    return constants()["idle"].value * _limit(as_system(system))


def _limit(card: System) -> float:
    """Power limit of the board, W."""
    if card.power.chip is None:
        raise InputError(
            f"system: power.chip is not on the card of {card.id}; expected a power limit"
        )
    return card.power.chip.value


def mean_w(
    decode: Estimate,
    prefill: Estimate,
    shares: TimeShares,
    *,
    pools: tuple[int, int] | None = None,
    system: str | System | None = None,
) -> float:
    """Mean board power of one GPU of a closed loop, W.

    shares: of the time, as `time_shares` gives them. pools: GPUs of (decode, prefill) where each
    has its own; each pool is idle for the rest of its time. None: the same GPUs do both.
    Raises InputError for estimates of other phases or of different machines, and for shares that
    are not in 0 .. 1 or add up to more than 1 on the same GPUs.
    """
    for name, e in (("decode", decode), ("prefill", prefill)):
        if isinstance(e, Estimate) and e.phase != name:
            raise InputError(f"{name}: an estimate of phase {e.phase!r}; expected {name!r}")
    a, b = inputs_of(decode, system), inputs_of(prefill, system)
    if decode.system_id != prefill.system_id:
        raise InputError(
            f"prefill: on {prefill.system_id!r}, but decode on {decode.system_id!r}; expected one"
        )
    if not isinstance(shares, TimeShares):
        raise InputError(f"shares: {type(shares).__name__}; expected TimeShares(decode, prefill)")
    x = _number("decode share", shares.decode, 1)
    y = _number("prefill share", shares.prefill, 1)
    if pools is None and x + y > 1 + _ROUNDING:
        raise InputError(f"shares: {x:g} + {y:g} are more than 1 on the same GPUs")
    g = _pools(pools)
    step = POWER.compile("P_drawn", "P_idle")
    dec, pre = step(**a), step(**b)
    out = MEAN.compile("P_mean", "P_pools")(
        P_dec=dec["P_drawn"], P_pre=pre["P_drawn"], P_idle=dec["P_idle"], x_dec=x, x_pre=y,
        g_dec=g[0], g_pre=g[1],
    )  # fmt: skip
    return float(out["P_mean" if pools is None else "P_pools"])


def time_shares(
    loop: Mapping[str, Any], *, output_tokens: float, prefill_ranks: float, aggregated: bool
) -> TimeShares:
    """What the GPUs of a solved closed loop do with their time.

    loop: numbers of one row of `serving.solve`: output_rate (token/s), t_prefill (s), resident,
    f_next. output_tokens: of a request, as sent. prefill_ranks: attention ranks that prefill for
    one decode instance (its own where aggregated). Raises InputError for missing or bad numbers.
    """
    names = ("output_rate", "t_prefill", "resident", "f_next")
    if missing := [n for n in names if n not in loop]:
        raise InputError(f"loop: {missing[0]!r} is missing; expected {', '.join(names)}")
    rate, work, resident, share = (_number(f"loop {n}", loop[n]) for n in names)
    v = SHARES.compile()(
        output_rate=rate, t_prefill=work, resident=resident, f=share, agg=float(bool(aggregated)),
        O=_positive("output_tokens", output_tokens), n_pre=_positive("prefill_ranks", prefill_ranks),
    )  # fmt: skip
    return TimeShares(decode=float(v["x_dec"]), prefill=float(v["x_pre"]))


def _number(name: str, value: Any, high: float = math.inf) -> float:
    """`value` as a finite number in 0 .. high; raises InputError naming the field."""
    try:
        x = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        x = math.nan
    if not (math.isfinite(x) and 0 <= x <= high + _ROUNDING):
        limit = f"from 0 to {high:g}" if math.isfinite(high) else "of at least 0"
        raise InputError(f"{name}: {value!r} is not a number {limit}")
    return min(x, high)


def _positive(name: str, value: Any) -> float:
    x = _number(name, value)
    if x == 0:
        raise InputError(f"{name}: {value!r} is not above 0")
    return x


def _pools(pools: Any) -> tuple[float, float]:
    if pools is None:
        return 1.0, 1.0
    if not isinstance(pools, tuple) or len(pools) != 2:
        raise InputError(f"pools: {pools!r}; expected the GPUs of (decode, prefill)")
    return _positive("pools decode", pools[0]), _positive("pools prefill", pools[1])
