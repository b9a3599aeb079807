"""Pools of instances that serve sessions: a factory in steady state.

`sessions` are always live. Each thread of a session calls, gets its output, waits (for a tool, for
a human) and comes back with its history. While it waits its cache is held as long as memory lets
it: in HBM, then in the tiers below. What is found on its return sets what must be prefilled, that
how long calls take, and that how much can be held: `solve` iterates this to a fixed point, over
whole columns of configurations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perfmodel.catalog import load_card
from perfmodel.errors import DoesNotFit, InputError
from perfmodel.factory import LOOP, METRICS
from perfmodel.hardware import System
from perfmodel.model import Model
from perfmodel.paths import data_dir
from perfmodel.plan import Plan
from perfmodel.request import Run, check_plan, choice, layout, prepare, whole
from perfmodel.workload import Workload

HIT_ROUNDS, ROUNDS = 16, 14
DAMPING = 0.6  # share of a round's result that is taken first
SETTLED = 1e-2  # change of calls per second (relative) and of the hit rate in the last round
ROUTING = ("cache-aware", "random")
PARTS = ("sum_compute", "sum_memory", "sum_link", "sum_floor")


@dataclass(frozen=True)
class Tier:
    """Memory below HBM that holds caches: bytes, and bytes per second to one GPU; both per GPU."""

    name: str
    bytes: float
    bandwidth: float

    def __post_init__(self) -> None:
        for field in ("bytes", "bandwidth"):
            v = getattr(self, field)
            if isinstance(v, bool) or not isinstance(v, int | float) or not 0 < v < 1e18:
                raise InputError(f"tier {field}: {v!r} is not a positive number")


@dataclass(frozen=True)
class Deployment:
    """Instances of one plan that decode, and (disaggregated) instances of another that prefill.

    Without `prefill` the decode instances do both (aggregated). Caches of threads that wait are
    where prefill runs: in HBM first, then in `tiers` in order ("host": the machine card's CPU memory
    and its link, or a `Tier`). routing: "cache-aware" brings a thread back to the instance that holds
    its cache; with "random" it finds it there by chance. Raises InputError for what makes no sense.
    """

    decode: Plan
    prefill: Plan | None = None
    decode_instances: int = 1
    prefill_instances: int = 0
    routing: str = "cache-aware"
    tiers: tuple[str | Tier, ...] = ()

    def __post_init__(self) -> None:
        for name, p in (("decode", self.decode), ("prefill", self.prefill)):
            if not isinstance(p, Plan) and (p is not None or name == "decode"):
                raise InputError(f"{name}: {p!r} is not a Plan; write for example Plan(tp=8)")
        whole("decode_instances", self.decode_instances, 1, 100_000)
        if self.prefill is None and self.prefill_instances:
            raise InputError(
                f"prefill_instances: {self.prefill_instances} without a prefill plan; expected 0"
            )
        if self.prefill is not None:
            whole("prefill_instances", self.prefill_instances, 1, 100_000)
        choice("routing", self.routing, ROUTING)
        for t in self.tiers:
            if not isinstance(t, Tier):
                choice("tiers", t, ("host",))

    @property
    def aggregated(self) -> bool:
        return self.prefill is None

    @property
    def gpus(self) -> int:
        pool = self.prefill.gpus * self.prefill_instances if self.prefill else 0
        return self.decode.gpus * self.decode_instances + pool

    @property
    def label(self) -> str:
        decode = f"{self.decode_instances} x {self.decode.label}"
        if self.prefill is None:
            return decode
        return f"prefill {self.prefill_instances} x {self.prefill.label}, decode {decode}"


def solve(
    decode: Run,
    prefill: Run,
    workload: Workload,
    deployments: Sequence[Deployment],
    which: np.ndarray,
    sessions: np.ndarray,
    *,
    cold: bool = False,
) -> dict[str, np.ndarray]:
    """The closed loop of n points: `deployments[which[i]]` with `sessions[i]` live sessions.

    decode, prefill: checked requests of both phases (`request.prepare`) of one model and system.
    cold: start with empty caches. Where memory or prefill runs out two solutions can exist, and the
    start decides which one is found.
    Returns columns of length n: those of LOOP and METRICS, `hit` and `hit_hbm` (shares of input
    tokens), `kept_s` (how long a cache lasts, all tiers), `step_time` and its parts, `sequences`
    (that fit where decode runs), `gpus`, `fits`, `settled` (the iteration has converged).
    """
    w, e = workload, decode.engine.values
    col = {k: v[..., which] for k, v in _tables(decode, prefill, w, deployments).items()}
    sessions = np.asarray(sessions, float)
    agg, inp, out = col["agg"], w.call.input_tokens.value, w.call.output_tokens.value
    threads = sessions * w.session.threads.value
    real = decode.inputs["tau_kernel"] > 0  # not the speed of light, where an engine adds nothing
    f_dec = decode.step.chain.compile("step_time", *PARTS)
    f_pre = prefill.step.chain.compile("step_time", "n_kernels", "t_host")
    loop = LOOP.compile(*LOOP.defs)
    d_in = _inputs(decode, [d.decode for d in deployments], which)
    p_in = _inputs(prefill, [d.prefill or d.decode for d in deployments], which)
    d_in["tau_kernel"] = d_in["tau_kernel"] * np.where(agg > 0, 1, e.decode_only.value)
    given = dict(
        N_t=threads, agg=agg, n_dec=col["n_dec"], dp=d_in["dp"], n_srv=col["servers"], O=out,
        A=decode.acceptance, CV2=w.call.prefill_cv2.value, g=w.gap_mean_s,
        s_pre=np.where((agg > 0) & real, e.prefill_scale.value, 1.0),
        n_layers=float(decode.model.layers), tau_req=e.request.value if real else 0.0,
        t_send=col["send_s"], C_kv=np.maximum(col["room"], 1e-9), C_pool=col["pool"],
    )  # fmt: skip
    hits = np.full(
        (1 + len(col["below"]), sessions.size), 0.0 if cold else float(w.hit(np.array(np.inf)))
    )
    life = np.full(sessions.size, out * 0.02)  # a first guess, at 50 tokens per second
    rate = threads / (life + w.gap_mean_s + 1)
    v: dict[str, Any] = {}
    before = rate
    for _ in range(HIT_ROUNDS):
        # More found in caches makes calls shorter, and that leaves more room for caches: from above
        # (or, cold, from below) the hit rate moves one way only, to the nearest solution.
        hit = hits[-1] * col["luck"]
        fresh = np.maximum(inp * (1 - hit), 1.0)
        p = f_pre(**{**p_in, "B": p_in["dp"], "T": inp - fresh, "q": fresh})
        work = p["step_time"] - p["n_kernels"] * prefill.inputs["tau_kernel"] - p["t_host"]
        known = dict(
            t_work=np.maximum(work, 1e-12),
            t_fetch=(np.diff(hits, axis=0) * col["luck"] * col["fetch_s"]).sum(axis=0),
            t_launch=p["n_kernels"] * (e.prefill_kernel.value if real else 0.0),
        )
        most = col["servers"] / np.maximum(given["s_pre"] * known["t_work"], known["t_fetch"])
        rate = np.minimum(rate, most)
        last, damping = np.zeros_like(rate), np.full_like(rate, DAMPING)
        for _ in range(ROUNDS):
            batch = rate * life / col["n_dec"]
            batch = np.minimum(
                np.maximum(batch, np.minimum(1, threads)), np.maximum(col["each"], 1)
            )
            t = f_dec(**{**d_in, "B": batch, "T": inp + out / 2})
            v = loop(**given, **known, X=rate, t_life=life, t_step=t["step_time"])
            change = np.log(v["X_next"] / rate)
            # a change of sign is an overshoot: smaller steps there, slowly larger ones elsewhere
            damping = np.where(change * last < 0, damping * 0.5, np.minimum(damping * 1.2, 1.0))
            last = change
            rate = np.minimum(rate * np.exp(damping * change), most)
            life = life * (v["t_decode"] / life) ** damping
            if np.abs(change).max() < SETTLED / 100:
                break
        below = np.cumsum(np.vstack([v["held"], col["below"] / v["X_next"]]), axis=0)
        kept = w.kept_s(below)
        moved = np.maximum(
            np.abs(w.hit(kept) - hits).max(axis=0), np.abs(np.log(v["X_next"] / before))
        )
        before = v["X_next"]
        hits = w.hit(kept)
        if moved.max() < SETTLED / 100:
            break
    hit = hits[-1] * col["luck"]
    v |= {k: t[k] for k in ("step_time", *PARTS)}
    v |= METRICS.compile(*METRICS.defs)(
        X=v["X_next"], N=sessions, G=col["gpus"], P_gpu=decode.inputs["P_gpu"],
        c_gpu=decode.inputs["c_gpu"], I=inp, h=hit, O=out, n_calls=w.session.calls.value,
        m=w.session.threads.value, tpot=v["tpot"], ttft=v["ttft"], e2e=v["e2e"], g=w.gap_mean_s,
    )  # fmt: skip
    v |= {
        "sessions": sessions, "hit": hit, "hit_hbm": hits[0] * col["luck"], "kept_s": kept[-1],
        "batch": batch, "sequences": col["room"], "gpus": col["gpus"], "fits": col["room"] >= 1,
        "settled": moved < SETTLED, "context": np.array(inp + out),
    }  # fmt: skip
    return {k: np.broadcast_to(np.asarray(x), sessions.shape) for k, x in v.items()}


def _inputs(run: Run, plans: Sequence[Plan], which: np.ndarray) -> dict[str, Any]:
    sizes = [layout(p, run.model) for p in plans]
    # step time alone is asked for: what only metrics use is not passed on
    inputs = {k: x for k, x in run.inputs.items() if k not in ("B", "T")}
    return inputs | {k: np.array([s[k] for s in sizes])[which] for k in sizes[0]}


def _tables(
    decode: Run, prefill: Run, w: Workload, deployments: Sequence[Deployment]
) -> dict[str, np.ndarray]:
    """What a deployment fixes, as columns over deployments (`below`, `fetch_s`: tiers first).

    agg; n_dec; gpus; servers: ranks that prefill; room: sequences that fit where decode runs, of
    all instances, and `each` of one; pool: those that fit where caches wait; below: those a tier
    holds; fetch_s: a whole context from a tier; send_s: a whole context from prefill to decode;
    luck: chance that routing finds the instance of a cache.
    """
    system = decode.system
    tiers = max((d.tiers for d in deployments), key=len)
    for d in deployments:
        if d.tiers != tiers[: len(d.tiers)]:
            raise InputError(
                "deployments of one sweep must have the same tiers, or their first ones"
            )
    out: dict[str, list[Any]] = {}
    length = w.call.input_tokens.value + w.call.output_tokens.value
    for d in deployments:
        size, each = _room(decode, d.decode, length)
        own_size, own_each = _room(prefill, d.prefill, length) if d.prefill else (size, each)
        wait_instances = d.prefill_instances or d.decode_instances
        plan = d.prefill or d.decode
        rank_gpus = plan.gpus / plan.dp
        held, fetch = [], []
        for i, tier in enumerate(tiers):
            t = _tier(system, tier)
            on = i < len(d.tiers)
            held.append(
                on * t.bytes * rank_gpus * plan.dp / (own_size * rank_gpus) * wait_instances
            )
            fetch.append(own_size / t.bandwidth)
        near = d.gpus <= system.scale_up.gpus.value
        link = (
            decode.inputs["W_nvl"] * decode.inputs["e_link_all_to_all"]
            if near
            else (decode.inputs["W_out"] * decode.inputs["e_link_scale_out"])
        )
        row = dict(
            agg=float(d.aggregated), n_dec=d.decode_instances, gpus=d.gpus,
            servers=wait_instances * plan.dp, each=each, room=each * d.decode_instances,
            pool=own_each * wait_instances, send_s=size / link,
            luck=1.0 if d.routing == "cache-aware" else 1.0 / wait_instances,
            below=held, fetch_s=fetch,
        )  # fmt: skip
        for k, x in row.items():
            out.setdefault(k, []).append(x)
    columns = {k: np.array(v, float) for k, v in out.items()}
    for k in ("below", "fetch_s"):
        columns[k] = columns[k].reshape(len(deployments), len(tiers)).T
    return columns


def _tier(system: System, tier: str | Tier) -> Tier:
    if isinstance(tier, Tier):
        return tier
    return Tier("host", system.host.memory.value, system.host.bandwidth.value)


def _room(run: Run, plan: Plan, length: float) -> tuple[float, float]:
    """(bytes on a GPU of one sequence of this length, sequences that fit on an instance)."""
    check_plan(plan, run)
    one, two = (_memory(run, plan, length, k) for k in (1, 2))
    capacity = run.system.memory.capacity
    share = run.engine.values.memory_fraction.value
    # what the fraction leaves over is for graphs and communication buffers: the workspace
    spare = share * (capacity.high or capacity.value) - (one - run.inputs["workspace"])
    size = two - one
    return size, plan.dp * (1 + float(np.floor(spare / size))) if spare >= 0 else 0.0


def rooms(run: Run, plans: Sequence[Plan], length: float) -> np.ndarray:
    """Sequences of this length that fit on an instance of each plan."""
    return np.array([_room(run, p, length)[1] for p in plans])


def unit_prefill(prefill: Run, w: Workload, plans: Sequence[Plan]) -> np.ndarray:
    """Seconds of the kernels that prefill one call on a rank of each plan, its cache found."""
    inputs = _inputs(prefill, plans, np.arange(len(plans)))
    inp = w.call.input_tokens.value
    fresh = max(inp * (1 - float(w.hit(np.array(np.inf)))), 1.0)
    f = prefill.step.chain.compile("step_time")
    return np.asarray(f(**{**inputs, "B": inputs["dp"], "T": inp - fresh, "q": fresh})["step_time"])


def _memory(run: Run, plan: Plan, length: float, each: int) -> float:
    """Bytes on the fullest GPU with `each` sequences of this length on a rank, one token in work."""
    inputs = {**run.inputs, **layout(plan, run.model), "T": length, "B": float(each * plan.dp)}
    return float(run.step.chain.compile("memory")(**inputs)["memory"])


def serve(
    model: str | Model,
    system: str | System,
    deployment: Deployment,
    workload: str | Workload,
    *,
    sessions: Any,
    cold: bool = False,
    draft: str | None = None,
    draft_tokens: int = 0,
    acceptance_length: float | None = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """The steady state of a deployment, for each number of live sessions.

    options: precision, mode, engine, overlap, balance, redundant_experts, power_basis and
    price_basis, as in `api.estimate`. Returns the columns of `solve`. Raises InputError for bad input
    and DoesNotFit, with the arithmetic, where not even one sequence fits.
    """
    w = as_workload(workload)
    runs = requests(model, system, w, draft, draft_tokens, acceptance_length, options)
    n = np.atleast_1d(np.asarray(sessions, float)).ravel()
    if not n.size or not np.isfinite(n).all() or (n < 1).any() or (n > 1e7).any():
        raise InputError(f"sessions: {sessions!r:.80}: expected numbers from 1 to 10,000,000")
    out = solve(*runs, w, [deployment], np.zeros(n.size, int), n, cold=cold)
    if not out["fits"].all():
        raise DoesNotFit(_too_big(runs, deployment, w))
    return out


def requests(
    model: str | Model,
    system: str | System,
    w: Workload,
    draft: str | None,
    draft_tokens: int,
    acceptance_length: float | None,
    options: dict[str, Any],
) -> tuple[Run, Run]:
    """The checked requests of both phases; raises InputError, also for contexts that are too long."""
    known = {
        "precision": "auto", "mode": "calibrated", "engine": "typical", "overlap": "none",
        "balance": "balanced", "redundant_experts": 0, "power_basis": "all_in",
        "price_basis": "owned",
    }  # fmt: skip
    for name in options:
        choice("option", name, tuple(known))
    both: dict[str, Any] = known | options
    decode = prepare(
        model, system, phase="decode", new_tokens=1, draft=draft, draft_tokens=draft_tokens,
        acceptance_length=acceptance_length, **both,
    )  # fmt: skip
    longest = w.call.input_tokens.value + w.call.output_tokens.value
    if longest > decode.model.shape.context_tokens:
        raise InputError(
            f"workload {w.id}: a call of {longest:,.0f} tokens is longer than the "
            f"{decode.model.shape.context_tokens:,} tokens of {decode.model.id}"
        )
    prefill = prepare(
        decode.model, decode.system, phase="prefill", new_tokens=1, draft=None, draft_tokens=0,
        acceptance_length=None, **both,
    )  # fmt: skip
    return decode, prefill


def _too_big(runs: tuple[Run, Run], d: Deployment, w: Workload) -> str:
    length = w.call.input_tokens.value + w.call.output_tokens.value
    for run, plan in zip(runs, (d.decode, d.prefill or d.decode), strict=True):
        if _room(run, plan, length)[1] < 1:
            capacity = run.system.memory.capacity
            share = run.engine.values.memory_fraction.value
            room = share * (capacity.high or capacity.value)
            need = _memory(run, plan, length, 1) - run.inputs["workspace"]
            return (
                f"does not fit: {run.model.id} ({run.precision}) with {plan.label} and one sequence "
                f"of {length:,.0f} tokens a rank needs {need / 1e9:.1f} GB per GPU of "
                f"{room / 1e9:.1f} GB ({share:g} of {(capacity.high or capacity.value) / 1e9:.0f} GB)"
            )
    return "does not fit"


def list_workloads() -> list[str]:
    return sorted(p.stem for p in data_dir("workloads").glob("*.toml"))


def as_workload(w: str | Workload) -> Workload:
    """The workload card with this id, or of this path. Raises InputError, CardError."""
    return (
        w if isinstance(w, Workload) else load_card(Workload, w, data_dir("workloads"), "workload")
    )
