"""The cheapest way to carry a load within limits: one deployment, replicated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perfmodel.errors import DoesNotFit, InputError
from perfmodel.frontier import (
    FINE,
    POOLS,
    Found,
    Front,
    allowed,
    candidates,
    check_limits,
    front_of,
    make_runs,
    nearest,
    nowhere,
    points,
    together,
    variants,
)
from perfmodel.hardware import System
from perfmodel.model import Model
from perfmodel.pools import Tier, as_workload
from perfmodel.request import PRICE_BASES, as_model, choice
from perfmodel.workload import Workload


@dataclass(frozen=True)
class Choice:
    """The cheapest way found: `replicas` of one deployment; columns as of a Front, one point each.

    usd_s: cost of all replicas on the named basis.
    """

    replicas: int
    usd_s: float
    front: Front


def cheapest(
    model: str | Model,
    systems: Sequence[str | System],
    workload: str | Workload,
    *,
    sessions: float,
    limits: Mapping[str, float],
    **options: Any,
) -> list[Choice]:
    """What serves so many live sessions within the limits for the least money, best system first.

    Of every system the cheapest deployment, replicated; each replica takes an equal share of the
    sessions. options: as in `frontier`. Raises InputError for bad input or a system without a price
    of the set; DoesNotFit when no system keeps the limits.
    """
    if isinstance(sessions, bool) or not 1 <= sessions <= 1e9:
        raise InputError(f"sessions: {sessions!r} is not a number from 1 to 10^9")
    w, m, bounds = as_workload(workload), as_model(model), check_limits(limits)
    out, why = [], []
    for s in [v.system for v in variants(m, systems, ("auto",), None, (0,))]:
        basis = options.get("price_basis", "owned")
        choice("price_basis", basis, tuple(PRICE_BASES))
        if getattr(s.price, basis) is None:
            raise InputError(f"price_basis: {basis!r} is not on the card of {s.id}")
        try:
            out.append(_cheapest(m, s, w, sessions, bounds, **options))
        except DoesNotFit as error:
            why.append(f"{s.id}: {error}")
    if not out:
        raise DoesNotFit("; ".join(why))
    return sorted(out, key=lambda c: c.usd_s)


def _cheapest(
    m: Model,
    system: System,
    w: Workload,
    sessions: float,
    bounds: Mapping[str, float],
    *,
    pools: Sequence[str] = POOLS,
    max_gpus: int | None = None,
    precisions: Sequence[str] = ("auto",),
    draft_tokens: Sequence[int] = (0,),
    draft: str | None = None,
    routing: str = "cache-aware",
    tiers: Sequence[str | Tier] = (),
    **options: Any,
) -> Choice:
    """The cheapest of every deployment at every load: rounding up replicas favours no front."""
    found: list[Found] = []
    tried = {"deployments": 0, "points": 0}
    for v in variants(m, [system], precisions, draft, draft_tokens):
        runs = make_runs(m, v, w, options)
        ds = candidates(runs, w, pools, max_gpus, routing, tuple(tiers))
        if not ds:
            continue
        columns, which = points(runs, w, ds, FINE)
        tried["deployments"] += len(ds)
        tried["points"] += which.size
        found.append((v, runs[0], ds, columns, which))
    if not found:
        raise DoesNotFit(nowhere(m, [system], w))
    table, part, local = together(found)
    ok = np.flatnonzero(allowed(table, bounds))
    if not ok.size:
        raise DoesNotFit(nearest(table, bounds))
    replicas = np.ceil(sessions / table["sessions"][ok])
    usd = replicas * table["cost"][ok]
    i = int(np.lexsort((-table["interactivity"][ok], replicas * table["gpus"][ok], usd))[0])
    one = front_of(found, table, part, local, ok[i : i + 1], "sessions_gpu", "usd_session", tried)
    return Choice(int(replicas[i]), float(usd[i]), one)
