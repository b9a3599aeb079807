"""Search: the deployments and loads that serve a workload best, on any two metrics.

Candidates are every plan that makes sense, aggregated and as pools of prefill and decode. A coarse
pass over loads finds the deployments near the front, a fine one their points.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perfmodel.bands import band as find_band
from perfmodel.errors import DoesNotFit, InputError
from perfmodel.factory import METRICS
from perfmodel.hardware import System
from perfmodel.model import Model
from perfmodel.plan import Plan, plans
from perfmodel.pools import (
    PARTS,
    Deployment,
    Tier,
    as_workload,
    requests,
    rooms,
    solve,
    unit_prefill,
)
from perfmodel.request import Run, as_model, as_system, check_power, choice
from perfmodel.workload import Workload

POOLS = ("aggregated", "disaggregated")
SHARES = (0.06, 0.12, 0.25, 0.4, 0.55, 0.7, 0.85)  # of the GPUs that prefill, where pools are two
COARSE, FINE = 10, 40  # loads tried for each deployment
BETWEEN = 6  # more of them around each load on the front
NEAR = 0.85  # of the front: what a deployment reaches in the coarse pass to be looked at closely
PREFILL_PLANS = 4  # the best of those that no other beats in both speed and throughput per GPU
LESS_IS_BETTER = {"ttft", "tpot", "e2e", "task"} | {
    n for n in METRICS.defs if n.startswith(("joule_", "usd_"))
}
AXES = tuple(n for n in METRICS.defs if n not in ("fleet", "cost", "fresh")) + (
    "ttft",
    "tpot",
    "e2e",
)
LIMITS = {  # what a service level or a budget bounds: name -> (column, doc)
    "ttft_s": ("ttft", "mean time to first token, s"),
    "tpot_s": ("tpot", "mean time per output token, s"),
    "e2e_s": ("e2e", "mean end-to-end latency of a call, s"),
    "task_s": ("task", "mean end-to-end latency of a session, s"),
    "power_w": ("fleet", "power on the named basis, W"),
}


@dataclass(frozen=True)
class Variant:
    """One system with one precision and draft."""

    system: System
    precision: str
    draft: str | None
    draft_tokens: int


# a variant's request, deployments, columns of `solve` and which deployment each point is of
Found = tuple[Variant, Run, list[Deployment], dict[str, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Front:
    """Points that no other point beats on both metrics, sorted by the first one.

    columns: those of `pools.solve`, with `system`, `precision`, `draft_tokens`, `pools`, `plan`,
    `bound`, `band_low`, `band_high` (ratios of measured to predicted TPOT of 90 % of rows of the
    kind), `extrapolated`; deployments: one for each point. tried: deployments and points searched.
    """

    x: str
    y: str
    columns: dict[str, np.ndarray]
    deployments: list[Deployment]
    tried: dict[str, int]


def frontier(
    model: str | Model,
    systems: Sequence[str | System],
    workload: str | Workload,
    *,
    x: str = "interactivity",
    y: str = "total_mw",
    limits: Mapping[str, float] | None = None,
    pools: Sequence[str] = POOLS,
    max_gpus: int | None = None,
    precisions: Sequence[str] = ("auto",),
    draft_tokens: Sequence[int] = (0,),
    draft: str | None = None,
    routing: str = "cache-aware",
    tiers: Sequence[str | Tier] = (),
    **options: Any,
) -> Front:
    """The Pareto front of `x` against `y` (names of AXES) over all systems together.

    limits: upper bounds by name of LIMITS. max_gpus: of a deployment; default one NVLink domain, or
    eight where that is smaller than 16. options: mode, engine, overlap, balance, redundant_experts,
    power_basis, price_basis, as in `api.estimate`. Raises InputError for bad input and DoesNotFit
    when no deployment holds one sequence or none keeps the limits, with what came nearest.
    """
    w, m = as_workload(workload), as_model(model)
    for name, axis in (("x", x), ("y", y)):
        choice(name, axis, AXES)
    if x == y:
        raise InputError(f"y: {y!r} is x too; expected another metric")
    for p in pools:
        choice("pools", p, POOLS)
    bounds = check_limits(limits or {})
    per_watt = [n for n in (x, y) if n.endswith("_mw") or n.startswith("joule")]
    found: list[Found] = []
    tried = {"deployments": 0, "points": 0}
    for v in variants(m, systems, precisions, draft, draft_tokens):
        if per_watt:
            check_power(v.system, options.get("power_basis", "all_in"))
        runs = make_runs(m, v, w, options)
        ds = candidates(runs, w, pools, max_gpus, routing, tuple(tiers))
        tried["deployments"] += len(ds)
        if not ds:
            continue
        near, n = _near(runs, w, ds, x, y, bounds)
        columns, which = points(runs, w, near, FINE)
        columns, which = _refine(runs, w, near, columns, which, x, y, bounds)
        tried["points"] += n + which.size
        found.append((v, runs[0], near, columns, which))
    if not found:
        raise DoesNotFit(nowhere(m, systems, w))
    return _front(found, x, y, bounds, tried)


def make_runs(m: Model, v: Variant, w: Workload, options: dict[str, Any]) -> tuple[Run, Run]:
    named = dict(precision=v.precision, **options)
    draft = v.draft if v.draft_tokens else None
    return requests(m, v.system, w, draft, v.draft_tokens, None, named)


def nowhere(m: Model, systems: Sequence[str | System], w: Workload) -> str:
    length = w.call.input_tokens.value + w.call.output_tokens.value
    names = ", ".join(as_system(s).id for s in systems)
    return f"{m.id}: no plan on {names} holds one sequence of {length:,.0f} tokens"


def check_limits(limits: Mapping[str, float]) -> dict[str, float]:
    out = {}
    for name, value in limits.items():
        choice("limit", name, tuple(LIMITS))
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18:
            raise InputError(f"{name}: {value!r} is not a positive number")
        out[LIMITS[name][0]] = float(value)
    return out


def variants(
    m: Model,
    systems: Sequence[str | System],
    precisions: Sequence[str],
    draft: str | None,
    draft_tokens: Sequence[int],
) -> Iterator[Variant]:
    if isinstance(systems, str) or not systems:
        raise InputError(f"systems: {systems!r}: expected a list of at least one machine card")
    for s, p, k in itertools.product(systems, precisions, draft_tokens):
        yield Variant(as_system(s), p, draft, k)


def candidates(
    runs: tuple[Run, Run],
    w: Workload,
    pools: Sequence[str],
    max_gpus: int | None,
    routing: str,
    tiers: tuple[str | Tier, ...],
) -> list[Deployment]:
    """Deployments to try: every plan by itself, and pools in several shares of all GPUs.

    Only those in which a sequence fits; of prefill plans those that no other beats in both the time
    of a call and calls per GPU.
    """
    decode, prefill = runs
    domain = int(decode.system.scale_up.gpus.value)
    top = max_gpus or (domain if domain >= 16 else 8 * domain)
    length = w.call.input_tokens.value + w.call.output_tokens.value
    every = list(dict.fromkeys(plans(decode.model, decode.system, top, decode.draft)))
    fit = [p for p, n in zip(every, rooms(decode, every, length), strict=True) if n >= 1]
    rest = dict(routing=routing, tiers=tiers)
    out: list[Deployment] = []
    if "aggregated" in pools:
        counts = [(p, n) for p in fit for n in sorted({1, top // p.gpus})]
        out += [Deployment(decode=p, decode_instances=n, **rest) for p, n in counts]  # type: ignore[arg-type]
    if "disaggregated" in pools:
        can = [p for p, n in zip(every, rooms(prefill, every, length), strict=True) if n >= 1]
        for p, d in itertools.product(_quick(prefill, w, can), fit):
            seen = set()
            for share in SHARES:
                n_p = max(1, round(share * top / p.gpus))
                n_d = (top - n_p * p.gpus) // d.gpus
                if n_d >= 1 and (n_p, n_d) not in seen:
                    seen.add((n_p, n_d))
                    out.append(
                        Deployment(decode=d, prefill=p, decode_instances=n_d, prefill_instances=n_p,
                                   **rest)  # type: ignore[arg-type]
                    )  # fmt: skip
    return out


def _quick(prefill: Run, w: Workload, can: Sequence[Plan]) -> list[Plan]:
    """Plans to prefill with: none is both faster and of more calls per GPU than one of these."""
    if not can:
        return []
    time = unit_prefill(prefill, w, can)
    rate = np.array([p.dp / p.gpus for p in can]) / time
    order = np.lexsort((-rate, time))
    best, keep = 0.0, []
    for i in order:
        if rate[i] > best * 1.02:
            best = rate[i]
            keep.append(can[i])
    picks = np.unique(np.linspace(0, len(keep) - 1, PREFILL_PLANS).round().astype(int))
    return [keep[i] for i in picks]


def points(
    runs: tuple[Run, Run], w: Workload, ds: Sequence[Deployment], n: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Columns of `solve` for n loads of each deployment, from one session to more than it holds."""
    which = np.repeat(np.arange(len(ds)), n)
    size = 1.3 * np.array([_holds(runs, w, d) for d in ds])
    step = np.tile(np.linspace(0, 1, n), len(ds))
    sessions = np.maximum(size[which], 2.0) ** step
    return solve(*runs, w, ds, which, sessions), which


def _holds(runs: tuple[Run, Run], w: Workload, d: Deployment) -> float:
    """Sessions that a deployment holds in all its memory: an upper end of the loads to try."""
    length = w.call.input_tokens.value + w.call.output_tokens.value
    pool = rooms(runs[0], [d.decode], length)[0] * d.decode_instances
    if d.prefill:
        pool += rooms(runs[1], [d.prefill], length)[0] * d.prefill_instances
    return float(pool * (1 + 2 * len(d.tiers)) / w.session.threads.value)


def _near(
    runs: tuple[Run, Run],
    w: Workload,
    ds: list[Deployment],
    x: str,
    y: str,
    bounds: Mapping[str, float],
) -> tuple[list[Deployment], int]:
    """Deployments that come near the front in a coarse pass, and how many points that took."""
    v, which = points(runs, w, ds, COARSE)
    a, b = _axis(v, x), _axis(v, y)
    ok = allowed(v, bounds)
    if not ok.any():
        ok = v["fits"].astype(bool)
    order = np.flatnonzero(ok)[np.argsort(-a[ok])]
    top = np.maximum.accumulate(b[order])  # best y at this x or better
    # less is better: the axis is negative, and nearness a smaller ratio
    near = np.where(top > 0, b[order] >= NEAR * top, b[order] >= top / NEAR)
    keep = np.unique(which[order[near]])
    return [ds[i] for i in keep], which.size


def _axis(v: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    return -v[name] if name in LESS_IS_BETTER else v[name]


def allowed(v: Mapping[str, np.ndarray], bounds: Mapping[str, float]) -> np.ndarray:
    ok = v["fits"].astype(bool) & v["settled"].astype(bool)
    for name, most in bounds.items():
        ok &= v[name] <= most
    return ok


def _refine(
    runs: tuple[Run, Run],
    w: Workload,
    ds: list[Deployment],
    v: dict[str, np.ndarray],
    which: np.ndarray,
    x: str,
    y: str,
    bounds: Mapping[str, float],
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The points, and more of them between the loads on the front and their neighbours."""
    ok = allowed(v, bounds)
    if not ok.any():
        return v, which
    rows = _best(_axis(v, x), _axis(v, y), ok)
    step = np.ones(which.size)
    step[1:] = v["sessions"][1:] / v["sessions"][:-1]  # of a deployment; its first has none
    step[::FINE] = step[1::FINE]
    between = np.linspace(-1, 1, BETWEEN + 2)[1:-1]
    sessions = np.maximum(v["sessions"][rows, None] * step[rows, None] ** between, 1).ravel()
    near = np.repeat(which[rows], BETWEEN)
    more = solve(*runs, w, ds, near, sessions)
    return {k: np.concatenate([v[k], more[k]]) for k in v}, np.concatenate([which, near])


def _best(a: np.ndarray, b: np.ndarray, ok: np.ndarray) -> np.ndarray:
    """Rows that no other allowed row beats in both (more is better), by growing a."""
    rows = np.flatnonzero(ok)
    rows = rows[np.lexsort((-b[rows], -a[rows]))]
    so_far = np.maximum.accumulate(b[rows])
    return rows[np.concatenate(([True], b[rows][1:] > so_far[:-1]))][::-1]


def together(found: list[Found]) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """All points as one table; of each the entry of `found` and the deployment in it."""
    v = {k: np.concatenate([f[3][k] for f in found]) for k in found[0][3]}
    part = np.repeat(np.arange(len(found)), [f[4].size for f in found])
    return v, part, np.concatenate([f[4] for f in found])


def _front(
    found: list[Found], x: str, y: str, bounds: Mapping[str, float], tried: dict[str, int]
) -> Front:
    v, part, local = together(found)
    ok = allowed(v, bounds)
    if not ok.any():
        raise DoesNotFit(nearest(v, bounds))
    rows = _best(_axis(v, x), _axis(v, y), ok)
    return front_of(found, v, part, local, rows, x, y, tried)


def front_of(
    found: list[Found],
    v: dict[str, np.ndarray],
    part: np.ndarray,
    local: np.ndarray,
    rows: np.ndarray,
    x: str,
    y: str,
    tried: dict[str, int],
) -> Front:
    """These rows with what names and explains them."""
    out = {k: c[rows] for k, c in v.items()}
    picked = [found[part[i]] for i in rows]
    deployments = [f[2][local[i]] for f, i in zip(picked, rows, strict=True)]
    out["system"] = np.array([f[0].system.id for f in picked])
    out["precision"] = np.array([f[1].precision for f in picked])
    out["draft_tokens"] = np.array([f[0].draft_tokens for f in picked])
    out["pools"] = np.array([POOLS[not d.aggregated] for d in deployments])
    out["plan"] = np.array([d.label for d in deployments])
    sums = np.stack([out[k] for k in PARTS])
    out["bound"] = np.array([k.removeprefix("sum_") for k in PARTS])[sums.argmax(axis=0)]
    bands = [
        find_band(
            "tpot", mode="agg" if d.aggregated else "disagg", concurrency=float(batch),
            model=f[1].model.id, chip=f[0].system.id, context_tokens=float(tokens), gpus=d.decode.gpus,
        )
        for f, d, batch, tokens in zip(picked, deployments, out["batch"], out["context"], strict=True)
    ]  # fmt: skip
    out["band_low"] = np.array([x.low for x in bands])
    out["band_high"] = np.array([x.high for x in bands])
    out["extrapolated"] = np.array([x.extrapolated for x in bands])
    return Front(x, y, out, deployments, tried)


def nearest(v: Mapping[str, np.ndarray], bounds: Mapping[str, float]) -> str:
    fits = v["fits"].astype(bool)
    lines = [
        f"{name} <= {most:g}: the least of all points is {v[name][fits].min():.3g}"
        for name, most in bounds.items()
    ]
    return "no deployment keeps all limits together: " + "; ".join(lines)
