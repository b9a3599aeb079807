"""Serving in a closed loop: from step times to TPOT, TTFT and throughput at a concurrency.

`concurrency` requests are always in the system. Those that fit in the KV cache are resident; a
resident one is decoding for the share `f` of its time, and waits for prefills otherwise. What a
request waits depends on the batch, and the batch on what it waits: `solve` iterates that to a fixed
point. The formulas are written once, in `SERVING`, and run over whole columns of configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from perfmodel.engine import Engine, Protocol
from perfmodel.model import Model
from perfmodel.request import serving_numbers, step_chain_for
from perfmodel.symbolic import Chain, larger, smaller

ITERATIONS = 12
Columns = dict[str, Any]


def _serving() -> Chain:
    c = Chain("serving", "one instance in a closed loop of `C` requests")
    con = c.input("C", "1", "requests in the system (concurrency)")
    cap = c.input("C_kv", "1", "sequences that fit in the KV cache", r"C_\mathrm{kv}")
    dp = c.input("dp", "1", "attention ranks of the decode instance")
    pool = c.input("n_pre", "1", "ranks that prefill, over all prefill workers", r"n_\mathrm{pre}")
    share = c.input("f", "1", "share of its time a resident request decodes")
    out = c.input("O", "token", "output tokens of a request")
    per = c.input("A", "token", "tokens a step yields per sequence (acceptance length)")
    t_step = c.input("t_step", "s", "decode step", r"t_\mathrm{step}")
    t_pre = c.input("t_work", "s", "prefill of a request: kernels", r"t_\mathrm{work}")
    n_k = c.input("n_k", "1", "kernels of a prefill")
    own = c.input("agg", "1", "1: prefill on the same GPUs; 0: in its own pool", r"a")
    scale = c.input(
        "s_pre", "1", "time of a prefill in the engine over its kernels'", r"s_\mathrm{pre}"
    )
    wave = c.input("w", "1", "share of requests that arrive together", "w")
    late = c.input("delta", "1", "share of others' prefills met before the first token", r"\delta")
    launch = c.input("tau_pre", "s", "launch of a prefill kernel", r"\tau_\mathrm{pre}")
    fixed = c.input("tau_req", "s", "fixed time of a request", r"\tau_\mathrm{req}")
    resident = c.define("resident", "1", "requests that hold KV cache", smaller(con, cap))
    c.define(
        "batch", "1", "sequences that decode", larger(resident * share, smaller(1, resident)), "B"
    )
    work = c.define("t_prefill", "s", "prefill of a request in the engine", scale * t_pre)
    others = c.define(
        "others", "1", "other requests a rank prefills for a resident one",
        larger(resident - 1, 0) / dp,
    )  # fmt: skip
    # Each of the others brings one prefill in the time that this request takes for its output.
    stall = c.define(
        "stall", "s/token", "prefills of others between two tokens",
        own * (1 - late) * share * others * work / out,
    )  # fmt: skip
    tpot = c.define("tpot", "s/token", "mean time per output token", t_step / per + stall)
    life = c.define("t_decode", "s", "time from the first to the last token", out * tpot)
    # Before the first token: the first wave (half of those that arrive together come earlier), and
    # what a full prefill pool holds back so that decode gets no more than the pool yields.
    queue = c.define(
        "queue", "1", "requests ahead at a rank that prefills, if all came together",
        larger(con / pool - 1, 0) * (1 - own) + own * larger(resident / dp - 1, 0),
    )  # fmt: skip
    held = c.define(
        "t_held", "s", "time that a pool slower than decode holds requests back",
        (1 - own) * larger(0, con / pool * work - life),
    )  # fmt: skip
    wait = c.define(
        "t_wait", "s", "wait for prefills of others",
        larger((wave + own * late / 2) * queue / 2 * work, held),
    )  # fmt: skip
    admitted = c.define(
        "t_admitted", "s", "time to first token once there is room in the KV cache",
        work + n_k * launch + fixed + t_step + wait,
    )  # fmt: skip
    c.define("f_next", "1", "share of its time a resident request decodes",
             life / (life + admitted))  # fmt: skip
    full = c.define(
        "t_full", "s", "wait for room in the KV cache: whole lives of those before",
        larger(con / cap - 1, 0) * (admitted + life),
    )  # fmt: skip
    ttft = c.define("ttft", "s", "mean time to first token", admitted + full)
    e2e = c.define("e2e", "s", "end-to-end latency of a request", ttft + life)
    c.define("output_rate", "token/s", "output tokens per second of the instance", con * out / e2e)
    return c


SERVING = _serving()
OUTPUTS = (
    "tpot", "ttft", "e2e", "output_rate", "batch", "resident", "stall", "t_prefill", "t_wait",
    "t_full", "f_next",
)  # fmt: skip
STEP = ("step_time", "sum_compute", "sum_memory", "sum_link", "sum_floor")


def _phase_inputs(machine: Columns, engines: list[Engine], phase: str, mode: str) -> Columns:
    numbers = [{k: v for k, (v, _) in serving_numbers(e, phase, mode).items()} for e in engines]
    extra = {k: np.array([n[k] for n in numbers]) for k in numbers[0]}
    out = {**machine, **extra}
    out["tau_kernel"] = machine["tau_kernel"] * out.pop("kernel_scale")
    return out


def _engine(engines: list[Engine], name: str) -> np.ndarray:
    return np.array([getattr(e.values, name).value for e in engines])


def _unused(chain: Chain) -> dict[str, float]:
    """Inputs that step time and memory do not use but the chain declares."""
    return {n: 1.0 for n in ("P_gpu", "c_gpu", "A") if n in chain.inputs}  # see STEP


def solve(
    model: Model,
    precision: str,
    machine: Columns,
    engines: list[Engine],
    protocols: list[Protocol],
    decode_plan: Columns,
    prefill_plan: Columns,
    rows: Mapping[str, np.ndarray],
    mode: str = "calibrated",
    draft: str | None = None,
    overrides: Mapping[str, float] | None = None,
) -> dict[str, np.ndarray]:
    """The closed loop of n rows of one model and precision, all columns of length n.

    machine: numbers of `roofline.machine_numbers` as columns, and `capacity`, bytes of HBM.
    decode_plan, prefill_plan: columns of `request.layout`.
    rows: `isl`, `osl` (nominal tokens), `concurrency` and `decode_workers` (requests of one decode
    instance, and how many there are), `prefill_workers` (nan: enough), `aggregated` (1 or 0), and
    with `draft` (a name on the model card) `draft_tokens` and `acceptance_length`.
    overrides: step inputs (names of the chain) to set, for fits and what-ifs.
    Returns columns in SI units: those of OUTPUTS, the parts of the decode step (STEP), `kv_batch`
    (sequences that fit) and `spare_bytes` of one GPU with one sequence a rank (negative: too big).
    """
    dec = step_chain_for(model, precision, "decode", draft).chain
    pre = step_chain_for(model, precision, "prefill", None).chain
    f_dec, f_pre = dec.compile(*STEP, "memory"), pre.compile("step_time", "n_kernels", "t_host")
    lengths = np.array([p.values.lengths.value for p in protocols])
    s_in, s_out = rows["isl"] * lengths, rows["osl"] * lengths
    dp = decode_plan["dp"]
    agg = rows["aggregated"]
    now = {**_unused(dec), **_phase_inputs(machine, engines, "decode", mode), **decode_plan}
    now |= overrides or {}
    now["q"] = np.ones_like(s_in) if draft is None else 1 + rows["draft_tokens"]
    if mode != "speed-of-light":
        now["tau_kernel"] = now["tau_kernel"] * np.where(
            agg > 0, 1, _engine(engines, "decode_only")
        )
    base = {**_unused(pre), **_phase_inputs(machine, engines, "prefill", mode), **prefill_plan}
    base |= overrides or {}
    before = {**base, "B": prefill_plan["dp"], "T": np.zeros_like(s_in), "q": s_in}
    p = f_pre(**before)
    launches = p["n_kernels"] * base["tau_kernel"]
    work = np.maximum(p["step_time"] - launches - p["t_host"], 1e-12)
    light = mode == "speed-of-light"
    n_k = np.zeros_like(work) if light else p["n_kernels"] * np.ones_like(work)

    room = f_dec(**{**now, "B": dp, "T": s_in + s_out})["memory"]
    more = f_dec(**{**now, "B": 2 * dp, "T": s_in + s_out})["memory"] - now["workspace"]
    # what the fraction leaves over is for graphs and communication buffers: the workspace
    room = room - now["workspace"]
    spare = _engine(engines, "memory_fraction") * machine["capacity"] - room
    kv = dp * (1 + np.floor(np.maximum(spare, 0) / (more - room)))

    in_step = np.array([x.values.in_step.value for x in protocols])
    per_rank = np.where(agg > 0, 1, rows["prefill_workers"] / rows["decode_workers"])
    ranks = np.where(np.isnan(per_rank), np.inf, per_rank) * prefill_plan["dp"]
    fixed = dict(
        C=rows["concurrency"], C_kv=kv, A=1.0 if draft is None else rows["acceptance_length"],
        dp=dp, n_pre=ranks, O=s_out, t_work=work, n_k=n_k, agg=agg,
        s_pre=np.where((agg > 0) & (not light), _engine(engines, "prefill_scale"), 1.0),
        w=np.array([x.values.wave.value for x in protocols]),
        delta=_engine(engines, "deferred") * in_step,
        tau_pre=0.0 if light else _engine(engines, "prefill_kernel"),
        tau_req=0.0 if light else _engine(engines, "request"),
    )  # fmt: skip
    loop = SERVING.compile(*OUTPUTS)
    share = np.ones_like(s_in)
    for _ in range(ITERATIONS):
        resident = np.minimum(fixed["C"], kv)
        batch = np.maximum(resident * share, np.minimum(1, resident))
        t = f_dec(**{**now, "B": batch, "T": s_in + s_out / 2})
        out = loop(**fixed, f=share, t_step=t["step_time"])
        share = out["f_next"]
    out |= {k: t[k] for k in STEP}
    out |= {"kv_batch": kv, "spare_bytes": spare, "prefill_work": work}
    n = s_in.size
    return {k: np.broadcast_to(np.asarray(x, float), n) for k, x in out.items()}
