"""Fits the machine numbers of the cards to measured kernel times, chip by chip and class by class.

    python calibration/fit_kernels.py FOLDER [--toml] [--pieces] [--class NAME]

FOLDER holds the kernel tables that `perfmodel.validation.kernels` reads. For every class it prints
the fitted constants with their errors: before (the cards as they are), on the half of the sizes
that was fitted and on the other half; with --toml, lines for the cards; with --pieces, what each
piece of a form is worth.

The form is the roofline with a share that is not hidden, and floors by class:

    t = max(t_c, t_m) + s * min(t_c, t_m) + n_kernels * tau

The fit minimises the mean absolute log error with Nelder and Mead's simplex in the logarithms of
the constants. `low` and `high` of a constant are the 10th and 90th percentile of the value that
each row alone would need, over the rows whose time depends mainly on that constant.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from perfmodel.validation import kernels

# Peaks (FLOP/s by rate), HBM, NVLink and scale-out bandwidth (B/s) come from the cards.
Params = dict[str, tuple[float, float, float]]  # start, lowest, highest
US = 1e-6


# ---- data: rows of a class with the counts that its form needs


@dataclass
class Data:
    """Rows of one class: the tidy frame, and arrays by row (or by row and operator)."""

    frame: pd.DataFrame
    a: dict[str, np.ndarray]

    def take(self, mask: np.ndarray) -> Data:
        return Data(self.frame[mask], {k: v[mask] for k, v in self.a.items()})

    @property
    def measured(self) -> np.ndarray:
        return self.frame["measured_s"].to_numpy()


def collect(folder: str) -> list[tuple[pd.DataFrame, list[dict], dict[str, float]]]:
    """Every group of the tables with its counts, its current prediction and datasheet peaks."""
    out = []
    light = {s: kernels.machine_of(s, "speed-of-light") for s in kernels.CARDS}
    now = {s: kernels.machine_of(s, "calibrated") for s in kernels.CARDS}
    for g in kernels.groups(kernels.read(folder)):
        system = g.frame["system"].iloc[0]
        if light.get(system) is None:
            continue
        frame = g.frame.assign(predicted_s=kernels.seconds(g, now[system]))
        out.append((frame, kernels.parts(g), light[system]))
    return out


COUNTS = ("F", "Xw", "Xk", "Xa", "touched", "pairs", "m", "n", "on")


def stack(groups: list[tuple], keep: Callable[[dict], bool] = lambda p: True) -> Data:
    """Groups joined; counts are [row, operator] arrays, padded with operators that cost nothing.

    F is compute time at the datasheet peak, X times at the datasheet bandwidth, in seconds.
    """
    frames, blocks = [], []
    width = max(sum(keep(p) for p in ps) for _, ps, _ in groups)
    for frame, ps, machine in groups:
        ps = [p for p in ps if keep(p)]
        n = len(frame)
        b = {k: np.zeros((n, width)) for k in COUNTS}
        kind = np.full((n, width), "", dtype=object)
        for i, p in enumerate(ps):
            b["F"][:, i] = p["flops"] / machine[f"P_{p['rate']}"]
            b["Xw"][:, i] = p["weight_bytes"] / machine["W_hbm"]
            b["Xk"][:, i] = p["kv_bytes"] / machine["W_hbm"]
            b["Xa"][:, i] = p["act_bytes"] / machine["W_hbm"]
            for k in ("touched", "pairs", "m"):
                b[k][:, i] = p[k]
            b["n"][:, i] = p["kernels"]
            b["on"][:, i] = 1
            kind[:, i] = kind_of(p)
        b["kind"] = kind
        for k in ("W_hbm", "W_nvl", "W_out"):
            b[k] = np.full(n, machine[k])
        for c in ("batch", "context", "tp", "ep", "payload", "group", "topk", "sms", "nodes",
                  "experts", "hidden"):  # fmt: skip
            given = frame[c] if c in frame else pd.Series(np.nan, frame.index)
            b["c_" + c] = given.to_numpy(float)
        b["c_m"] = frame["m"].to_numpy(float) if "m" in frame else np.full(n, np.nan)
        frames.append(frame)
        blocks.append(b)
    arrays = {k: np.concatenate([b[k] for b in blocks]) for k in blocks[0]}
    return Data(pd.concat(frames, ignore_index=True), arrays)


def kind_of(p: dict) -> str:
    """The floor class of an operator inside a module."""
    if p["memory_class"] == "attention":
        return "index" if p["compute_class"] == "gemm" else "core"
    if p["memory_class"] == "stream":
        return "stream"
    return "gemm" if p["rate"] == "bf16" else "gemm_quantised"


# ---- forms


def _col(x):
    """A constant, or one value a row, as a column over operators."""
    return x[:, None] if isinstance(x, np.ndarray) and x.ndim == 1 else x


def roofline(d: Data, p: dict, compute=None, memory=None) -> np.ndarray:
    a = d.a
    t_c = (a["F"] if compute is None else compute) / _col(p["e_c"])
    t_m = (a["Xw"] + a["Xk"] + a["Xa"] if memory is None else memory) / _col(p["e_m"])
    t = np.maximum(t_c, t_m) + _col(p.get("s", 0.0)) * np.minimum(t_c, t_m)
    return t.sum(axis=1) + p["tau"]


def attention(d: Data, p: dict) -> np.ndarray:
    """`l`: entries that a sequence costs beside those it attends (tiles, splits, merges)."""
    pad = 1 + p.get("l", 0.0) / d.a["c_context"]
    return roofline(d, p, compute=d.a["F"] * _col(pad))


def experts(d: Data, p: dict) -> np.ndarray:
    """`r`: rows of padding a touched expert costs; `c`: seconds a routed pair costs wherever its
    expert is (permute, quantise, finalise run over all tokens)."""
    a = d.a
    rows = 1 + _col(p.get("r", 0.0)) * a["touched"] / np.maximum(a["pairs"], 1e-9)
    t = roofline(d, p, compute=a["F"] * rows)
    away = a["pairs"].sum(axis=1) * (a["c_ep"] - 1)
    return t + p.get("c", 0.0) * away


def module(d: Data, p: dict) -> np.ndarray:
    """A whole attention module: efficiencies of most parts are given, floors are fitted.

    `heads_min`: the sparse prefill core computes at least so many heads, however few there are.
    """
    a = d.a
    t = np.zeros(len(d.frame))
    if "heads_min" in p:
        heads = 128 / a["c_tp"]
        padding = np.maximum(heads, p["heads_min"]) / heads
        a = {**a, "F": np.where(a["kind"] == "core", a["F"] * padding[:, None], a["F"])}
    quantised = np.array([x == "gemm_quantised" for x in a["kind"].ravel()]).reshape(
        a["kind"].shape
    )
    for kind in ("gemm", "gemm_quantised", "core", "index", "stream"):
        on = a["kind"] == kind
        t_c = np.where(on, a["F"], 0) / _col(p[f"e_{kind}"])
        t_m = np.where(on, a["Xw"] + a["Xk"] + a["Xa"], 0) / _col(p[f"m_{kind}"])
        own = "tau_gemm" if kind == "gemm_quantised" else f"tau_{kind}"
        tau = p["tau"] if "tau" in p else p[own]
        each = np.maximum(t_c, t_m) + p[f"s_{kind}"] * np.minimum(t_c, t_m)
        t = t + each.sum(axis=1) + np.where(on, a["n"], 0).sum(axis=1) * tau
    return t + quantised.sum(axis=1) * p["tau_quantise"]


def kda_prefill(d: Data, p: dict) -> np.ndarray:
    """State and activations have their own efficiency (chunked kernels write intermediates), and
    the chunks of a sequence follow each other: `tau_t` seconds a token of the longest sequence."""
    a = d.a
    passes = a["Xk"].sum(axis=1) / p["e_state"] + a["Xa"].sum(axis=1) / p["e_act"]
    return p["tau"] + passes + p["tau_t"] * a["c_context"]


def kda_verify(d: Data, p: dict) -> np.ndarray:
    """The state is read once and written after every token: (1 + q) states instead of two."""
    a = d.a
    memory = a["Xk"] * _col((1 + a["c_context"]) / 2) + a["Xw"] + a["Xa"]
    return roofline(d, {**p, "e_c": 1.0}, memory=memory)


def stream(d: Data, p: dict) -> np.ndarray:
    return roofline(d, {**p, "e_c": 1.0})


def all_reduce(d: Data, p: dict) -> np.ndarray:
    """The faster of one shot (x (g-1) bytes, one hop) and two (2 x (g-1)/g bytes, two hops)."""
    x, g, w = d.a["c_payload"], d.a["c_group"], d.a["W_nvl"]
    hop = p["per_rank"] * (g - 2)
    one = p["a_one"] + hop + x * (g - 1) / (w * p["e_one"])
    two = p["a_two"] + hop + 2 * x * (g - 1) / g / (w * p["e_two"])
    return np.minimum(one, two)


def ring_collective(d: Data, p: dict) -> np.ndarray:
    """Latency with a term per rank; `half`: bytes at which a message has half its extra cost."""
    x, g, w = d.a["c_payload"], d.a["c_group"], d.a["W_nvl"]
    v = np.where(d.frame["op"] == "nccl_all_reduce", 2.0, 1.0)
    sent = v * x * (g - 1) / g
    return (
        p["a"]
        + p["per_rank"] * (g - 2)
        + (sent + sent * p["half"] / (sent + p["half"])) / (w * p["e"])
    )


def _tiers(d: Data, dedup: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes that a GPU sends inside its node and outside, and whether there is an outside."""
    a = d.a
    g, k, m = a["c_group"], a["c_topk"], a["c_m"]
    local = np.minimum(np.where(d.frame["system"].isin(["gb200", "gb300"]), 4, 8), g)
    copy = a["c_payload"] / (m * k)
    nodes = g / local
    if not dedup:  # one copy for every token and expert
        return m * k * copy * (local - 1) / g, m * k * copy * (1 - local / g), nodes > 1
    ranks = g * (1 - (1 - 1 / g) ** k)  # one copy for every token and rank, then node
    away = nodes * (1 - (1 - 1 / nodes) ** k)
    return m * copy * ranks * (1 - 1 / g), m * copy * away * (1 - 1 / nodes), nodes > 1


def all_to_all(dedup: bool) -> Callable[[Data, dict], np.ndarray]:
    def form(d: Data, p: dict) -> np.ndarray:
        inside, outside, far = _tiers(d, dedup)
        sms = np.where(np.isfinite(d.a["c_sms"]), (d.a["c_sms"] / 24) ** p.get("sm", 0.0), 1.0)
        t = np.maximum(
            inside / (d.a["W_nvl"] * p["e"] * sms),
            outside / (d.a["W_out"] * p.get("e_out", 1.0) * sms),
        )
        extra = p.get("a_out", 0.0) + p.get("per_rank", 0.0) * (d.a["c_group"] - 8)
        return p["a"] + t + np.where(far, extra, 0.0)

    return form


# ---- fitting


def simplex(f: Callable[[np.ndarray], float], x: np.ndarray, *, step: float = 0.5,
            steps: int = 400, restarts: int = 3) -> np.ndarray:  # fmt: skip
    """Nelder and Mead's simplex, restarted at its own best with other edges."""
    n = len(x)
    for r in range(restarts):
        edge = step * 0.6**r * (1 if r % 2 == 0 else -1)
        points = [x, *(x + edge * (np.arange(n) == i) for i in range(n))]
        values = [f(q) for q in points]
        for _ in range(steps):
            order = np.argsort(values)
            points, values = [points[i] for i in order], [values[i] for i in order]
            if values[-1] - values[0] < 1e-6:
                break
            centre = np.mean(points[:-1], axis=0)
            q = 2 * centre - points[-1]
            v = f(q)
            if v < values[0]:
                far = 3 * centre - 2 * points[-1]
                w = f(far)
                points[-1], values[-1] = (far, w) if w < v else (q, v)
            elif v < values[-2]:
                points[-1], values[-1] = q, v
            else:
                near = (centre + (q if v < values[-1] else points[-1])) / 2
                w = f(near)
                if w < min(v, values[-1]):
                    points[-1], values[-1] = near, w
                else:
                    points = [points[0], *((points[0] + q) / 2 for q in points[1:])]
                    values = [values[0], *(f(q) for q in points[1:])]
        x = points[int(np.argmin(values))]
    return x


def fit(d: Data, params: Params, fixed: dict[str, float],
        form: Callable[[Data, dict], np.ndarray]) -> dict[str, float]:  # fmt: skip
    names = list(params)
    start, low, high = (np.log([params[n][i] for n in names]) for i in range(3))
    y = np.log(d.measured)

    def unpack(x: np.ndarray) -> dict[str, float]:
        return {**fixed, **dict(zip(names, np.exp(np.clip(x, low, high)), strict=True))}

    def loss(x: np.ndarray) -> float:
        outside = np.maximum(0, low - x) + np.maximum(0, x - high)
        return float(np.mean(np.abs(np.log(form(d, unpack(x))) - y)) + 1e-3 * outside.sum())

    return unpack(simplex(loss, start))


def errors(predicted: np.ndarray, measured: np.ndarray) -> tuple[float, float, float]:
    """MdAPE, P90 of the absolute error and bias, in %."""
    if not len(measured):
        return (np.nan,) * 3
    e = 100 * (predicted / measured - 1)
    return float(np.median(abs(e))), float(np.quantile(abs(e), 0.9)), float(np.median(e))


def half(frame: pd.DataFrame, keys: Sequence[str]) -> np.ndarray:
    """True for the sizes to fit: by a hash, so all engines at one size are on one side."""
    columns = [frame[k] for k in keys if k in frame]
    text = ["|".join(map(str, row)) for row in zip(*columns, strict=True)]
    return np.array([zlib.crc32(t.encode()) % 2 == 0 for t in text])


def spread(d: Data, p: dict, name: str, bounds: tuple[float, float],
           form: Callable[[Data, dict], np.ndarray]) -> tuple[float, float]:  # fmt: skip
    """P10 and P90 of the constant that each row alone would need (rows that depend on it)."""
    base = form(d, p)
    slope = np.log(form(d, {**p, name: p[name] * 1.02}) / base) / np.log(1.02)
    depends = np.abs(slope) > 0.4
    if depends.sum() < 5:
        depends = np.abs(slope) > 0.1
    if depends.sum() < 5:
        return bounds
    sub = d.take(depends)
    lo = np.full(len(sub.frame), bounds[0] / 3)
    hi = np.full(len(sub.frame), bounds[1] * 3)
    rising = np.median(slope[depends]) > 0
    for _ in range(60):
        mid = np.sqrt(lo * hi)
        over = form(sub, {**p, name: mid}) > sub.measured
        down = over if rising else ~over
        hi, lo = np.where(down, mid, hi), np.where(down, lo, mid)
    v = np.clip(np.sqrt(lo * hi), *bounds)
    return float(np.quantile(v, 0.1)), float(np.quantile(v, 0.9))


# ---- what is fitted

E = (0.6, 0.02, 1.0)
EM = (0.8, 0.1, 1.0)
S = (0.2, 1e-3, 1.0)


def T(start_us: float, high_us: float = 500.0) -> tuple[float, float, float]:
    return (start_us * US, 0.1 * US, high_us * US)


@dataclass(frozen=True)
class Spec:
    """One class: which operators of the ring, by what columns, with which form and constants."""

    name: str
    ops: tuple[str, ...]
    form: Callable[[Data, dict], np.ndarray]
    params: Params
    keys: tuple[str, ...]
    by: tuple[str, ...] = ("system", "precision")
    fixed: dict[str, float] = field(default_factory=dict)
    where: str = ""  # pandas query: the rows to fit; the errors on the others are given too
    fastest: tuple[str, ...] = ()  # fit to the fastest engine at each of these sizes


# The kernels that set the constants, by precision; the others are reported with all rows.
REFERENCE = (
    "(precision == 'fp8_block' and engine.str.contains('deepgemm|moe_torch_flow_cutlass'))"
    " or (precision == 'nvfp4' and engine.str.endswith('moe_torch_flow_cutlass'))"
    " or (precision == 'w4a8_mxfp4_mxfp8' and engine.str.contains('mxfp4_flashinfer_trtllm_moe'))"
    " or (precision == 'w4a16_mxfp4' and (engine.str.endswith('sglang_flashinfer_trtllm_moe')"
    " or system == 'h200_sxm'))"
)

SPECS: tuple[Spec, ...] = (
    Spec("gemm", ("gemm",), roofline, dict(e_c=E, e_m=EM, s=S, tau=T(5)), ("m", "n", "k")),
    Spec("gqa_decode", ("gqa_decode",), roofline, dict(e_m=EM, tau=T(8)), ("batch", "context"),
         fixed=dict(e_c=0.6)),
    Spec("mla_decode", ("mla_decode",), attention,
         dict(e_c=(0.6, 0.02, 0.75), e_m=EM, s=S, l=(500, 1, 20000), tau=T(10)),
         ("batch", "context", "heads")),
    Spec("prefill", ("gqa_prefill", "mla_prefill"), attention,
         dict(e_c=E, l=(500, 1, 20000), tau=T(10)), ("op", "context", "heads"),
         fixed=dict(e_m=0.8)),
    Spec("v4_one_floor", ("v4_csa_decode", "v4_hca_decode"), module,
         dict(tau=T(4, 40), tau_quantise=T(3, 40), m_core=(0.3, 0.05, 1.0)),
         ("batch", "context", "tp"), by=("system",)),
    Spec("v4_decode", ("v4_csa_decode", "v4_hca_decode"), module,
         dict(tau_gemm=T(4, 40), tau_quantise=T(3, 40), tau_core=T(4, 40), tau_index=T(4, 40),
              tau_stream=T(4, 40), m_core=(0.3, 0.05, 1.0)),
         ("batch", "context", "tp"), by=("system",)),
    *(
        Spec(name, ops, module,
             dict(tau=T(5, 40), e_core=(0.4, 0.05, 1.0), e_index=(0.2, 0.02, 1.0),
                  m_stream=(0.4, 0.05, 1.0)),
             ("op", "context", "tp"), by=("system",),
             fixed=dict(tau_quantise=4 * US, m_core=0.8, heads_min=0.0))
        for name, ops in (("v4_prefill", ("v4_csa_prefill", "v4_hca_prefill")),
                          ("dsa_prefill", ("dsa_prefill",)))
    ),
    Spec("kda_decode", ("kda_core_decode",), stream, dict(e_m=EM, tau=T(6)), ("batch", "tp")),
    Spec("kda_conv_decode", ("kda_conv_decode",), stream, dict(e_m=(0.2, 0.01, 1), tau=T(5)),
         ("batch", "tp")),
    Spec("kda_verify", ("kda_core_verify",), kda_verify, dict(e_m=EM, tau=T(6)),
         ("batch", "context", "tp")),
    Spec("kda_prefill_flash", ("kda_core_prefill",), kda_prefill,
         dict(e_state=(0.3, 0.02, 1), e_act=(0.2, 0.01, 1), tau=T(15),
              tau_t=(0.05 * US, 1e-10, 1e-5)),
         ("batch", "context", "tp"), where="kernel == 'flashkda_fwd'"),
    Spec("kda_prefill_chunk", ("kda_core_prefill",), kda_prefill,
         dict(e_state=(0.3, 0.02, 1), e_act=(0.2, 0.01, 1), tau=T(15),
              tau_t=(0.05 * US, 1e-10, 1e-5)),
         ("batch", "context", "tp"), where="kernel == 'chunk_kda'"),
    Spec("kda_conv_prefill", ("kda_conv_prefill",), stream, dict(e_m=(0.4, 0.02, 1), tau=T(10)),
         ("batch", "context", "tp"), where="engine == 'sglang'"),
    Spec("mhc_pre", ("mhc_pre",), roofline, dict(e_m=EM, tau=T(15)), ("m",), by=("system",),
         fixed=dict(e_c=0.7)),
    Spec("mhc_post", ("mhc_post",), stream, dict(e_m=EM, tau=T(10)), ("m",), by=("system",)),
    Spec("moe", ("moe",), experts,
         dict(e_c=E, e_m=EM, s=S, tau=T(30), c=(1e-9, 1e-12, 1e-6)),
         ("m", "ep", "model"), fixed=dict(r=76), where=f"distribution == 'balanced' and ({REFERENCE})"),
    Spec("moe_masked", ("deepep_moe_generation",), experts,
         dict(e_c=E, e_m=EM, tau=T(20)), ("m", "ep"), fixed=dict(r=76),
         where="distribution == 'uniform'"),
    Spec("moe_contiguous", ("deepep_moe_context",), experts,
         dict(e_c=E, tau=T(500, 3000)), ("m", "ep"),
         where="distribution == 'uniform'", fixed=dict(e_m=0.75, r=0)),
    Spec("wideep_moe", ("wideep_moe_eplb",), experts,
         dict(e_c=E, e_m=EM, r=(60, 0.1, 500), tau=T(40)), ("m", "ep")),
    Spec("megamoe", ("megamoe",), experts, dict(e_c=E, e_m=EM, s=S, tau=T(60)),
         ("m", "ep", "phase"), where="distribution == 'balanced'"),
    Spec("all_reduce", ("all_reduce",), all_reduce,
         dict(a_one=T(5), e_one=(0.5, 0.02, 1.3), a_two=T(12), e_two=(0.7, 0.02, 1.3),
              per_rank=(0.1 * US, 1e-9, 1e-5)),
         ("payload", "group"), fastest=("payload", "group")),
    *(
        Spec(op, (op,), ring_collective,
             dict(a=T(10), per_rank=(1 * US, 1e-9, 1e-4), e=(0.7, 0.02, 1.3),
                  half=(1e7, 1e3, 1e9)),
             ("payload", "group"))
        for op in ("nccl_all_reduce", "nccl_all_gather", "nccl_reduce_scatter", "nccl_alltoall")
    ),
    *(
        Spec(f"deepep_ll_{p}", (f"deepep_ll_{p}",), all_to_all(False),
             dict(a=T(15), e=(0.6, 0.02, 1.3), e_out=(0.9, 0.1, 1.3), a_out=T(10),
                  per_rank=(0.1 * US, 1e-9, 1e-4)),
             ("m", "group", "topk", "experts"))
        for p in ("dispatch", "combine")
    ),
    *(
        Spec(f"deepep_normal_{p}", (f"deepep_normal_{p}",), all_to_all(True),
             dict(a=T(40), e=(0.4, 0.02, 1.3), sm=(0.9, 0.01, 1.5), e_out=(0.8, 0.1, 1.3),
                  a_out=T(40), per_rank=(1 * US, 1e-9, 1e-4)),
             ("m", "group", "topk", "experts", "sms"))
        for p in ("dispatch", "combine")
    ),
    *(
        Spec(f"a2a_{b}_{p}", (f"a2a_{b}_{p}",), all_to_all(b.endswith("ht")),
             dict(a=T(60), e=(0.4, 0.02, 1.3)), ("m", "topk", "experts"))
        for b in ("deepep_ll", "deepep_ht", "trtllm_deepep_ll", "trtllm_deepep_ht")
        for p in ("dispatch", "combine")
    ),
)  # fmt: skip


@dataclass
class Fitted:
    spec: Spec
    key: tuple
    n: int
    constants: dict[str, float]
    spread: dict[str, tuple[float, float]]
    before: tuple[float, float, float]  # the cards as they are, all rows of the class
    fitted: tuple[float, float, float]  # the half that was fitted
    other: tuple[float, float, float]  # the other half
    whole: tuple[float, float, float]  # constants of the fit on every row of the class


def run(groups: list[tuple], specs: Sequence[Spec] = SPECS) -> Iterator[Fitted]:
    """Fits each class in order; modules take the efficiencies of the classes before them."""
    done: dict[tuple[str, str, str], dict[str, float]] = {}
    for spec in specs:
        chosen = [g for g in groups if g[0]["op"].iloc[0] in spec.ops]
        if not chosen:
            continue
        d = stack(chosen)
        index = d.frame.groupby(list(spec.by), sort=True).indices
        for key, rows in index.items():
            key = key if isinstance(key, tuple) else (key,)
            everything = d.take(np.isin(np.arange(len(d.frame)), rows))
            part = everything
            if spec.where:
                ok = everything.frame.eval(spec.where, engine="python").to_numpy(bool)
                if not ok.any():
                    continue
                part = everything.take(ok)
            if spec.fastest:
                best = part.frame.groupby(list(spec.fastest))["measured_s"].transform("min")
                part = part.take((part.frame["measured_s"] <= best).to_numpy())
            mine = half(part.frame, spec.keys)
            if len(part.frame) < 24:  # too few to halve
                mine = np.ones(len(part.frame), bool)
            fixed = dict(spec.fixed)
            if spec.form is module:
                fixed = {**_given(done, str(key[0])), **fixed}
                if "heads_min" in fixed:
                    fixed["heads_min"] = 64.0 if key[0] == "h200_sxm" else 128.0
            params = dict(spec.params)
            if not np.any(part.a["c_group"] > 8) and "e_out" in params:
                params = {k: v for k, v in params.items() if k in ("a", "e", "sm")}
            p = fit(part.take(mine), params, fixed, spec.form)
            done[spec.name, str(key[0]), str(key[-1])] = p
            yield Fitted(
                spec, key, len(part.frame), {k: p[k] for k in params},
                {k: spread(part, p, k, v[1:], spec.form) for k, v in params.items()},
                errors(part.frame["predicted_s"].to_numpy(), part.measured),
                errors(spec.form(part.take(mine), p), part.measured[mine]),
                errors(spec.form(part.take(~mine), p), part.measured[~mine]),
                errors(spec.form(everything, p), everything.measured),
            )  # fmt: skip


def _given(done: dict, system: str) -> dict[str, float]:
    """Efficiencies of a module's parts: those of the GEMM and MLA decode classes of the chip."""
    bf16 = done["gemm", system, "bfloat16"]
    fp8 = done["gemm", system, "fp8_block"]
    mla = done["mla_decode", system, "bf16"]
    return dict(
        e_gemm=bf16["e_c"], m_gemm=bf16["e_m"], s_gemm=bf16["s"],
        e_gemm_quantised=fp8["e_c"], m_gemm_quantised=fp8["e_m"], s_gemm_quantised=fp8["s"],
        e_core=mla["e_c"], s_core=mla["s"],
        e_index=fp8["e_c"], m_index=mla["e_m"], s_index=mla["s"],
        e_stream=1.0, m_stream=0.8, s_stream=0.0,
    )  # fmt: skip


# ---- imbalance


def imbalance(groups: list[tuple]) -> dict[str, pd.DataFrame]:
    """Medians of measured time against balanced routing, and of EPLB against none."""
    frames = [f for f, _, _ in groups]
    out = {}
    fused = _joined(frames, ("megamoe",))
    out["MegaMoE: power law / balanced"] = _ratio(
        fused, ["system", "ep", "m"], "distribution", "balanced"
    )
    deep = _joined(frames, ("deepep_moe_context", "deepep_moe_generation"))
    for op, f in deep.groupby("op"):
        out[f"{op}: power law / uniform"] = _ratio(
            f, ["system", "ep", "m"], "distribution", "uniform"
        )
    wide = _joined(frames, ("wideep_moe", "wideep_moe_eplb"))
    wide = wide.assign(
        law=wide["distribution"].str.replace("_eplb", ""),
        eplb=np.where(wide["distribution"].str.endswith("_eplb"), "EPLB", "none"),
    )
    wide = wide[wide["slots"].isin([256, 288])]
    index = ["system", "model", "ep", "m", "law"]
    out["wide EP: EPLB / none"] = _ratio(wide, index, "eplb", "none")
    return out


def _joined(frames: list[pd.DataFrame], ops: tuple[str, ...]) -> pd.DataFrame:
    return pd.concat([f for f in frames if f["op"].iloc[0] in ops], ignore_index=True)


def _ratio(df: pd.DataFrame, index: list[str], column: str, base: str) -> pd.DataFrame:
    t = df.pivot_table(index=index, columns=column, values="measured_s")
    t = t.div(t[base], axis=0).drop(columns=base)
    tokens = t.index.get_level_values("m").to_numpy(float)
    size = np.asarray(["<=16", "<=128", "<=1024", ">1024"], dtype=object)[
        np.searchsorted((16, 128, 1024), tokens)
    ]
    long = t.assign(tokens=size).reset_index().melt(
        ["tokens", "ep"], list(t.columns), var_name="routing", value_name="x"
    )  # fmt: skip
    return long.groupby(["routing", "tokens", "ep"])["x"].median().unstack("ep").round(2)


# ---- output


def line(f: Fitted) -> str:
    c = ", ".join(f"{k} {_shown(k, v)}" for k, v in f.constants.items())
    b, a, o, w = f.before, f.fitted, f.other, f.whole
    return (
        f"{f.spec.name:22s} {'/'.join(map(str, f.key)):30s} n {f.n:5d}  "
        f"before {b[0]:5.1f}/{b[1]:6.1f}/{b[2]:+6.1f}  fitted {a[0]:5.1f}/{a[1]:5.1f}  "
        f"other half {o[0]:5.1f}/{o[1]:5.1f}/{o[2]:+5.1f}  all rows {w[0]:5.1f}/{w[1]:6.1f}  {c}"
    )


SECONDS = ("tau", "a", "a_one", "a_two", "a_out", "per_rank")


def _is_time(name: str) -> bool:
    return name in SECONDS or name.startswith("tau_")


def _shown(name: str, v: float) -> str:
    if _is_time(name) or name == "c":
        return f"{v / US:.3g} us"
    return f"{v:.3g}"


# Fields that cards have already; the other constants get the name of their class.
FIELDS = {
    ("gemm", "e_c"): "efficiency.gemm_{rate}",
    ("gemm", "e_m"): "efficiency.hbm_gemm",
    ("gqa_decode", "e_m"): "efficiency.hbm_attention",
    ("mla_decode", "e_c"): "efficiency.attention_decode_{rate}",
    ("mla_decode", "e_m"): "efficiency.hbm_attention",
    ("prefill", "e_c"): "efficiency.attention_prefill_{rate}",
    ("moe", "e_c"): "efficiency.moe_{rate}",
    ("moe", "e_m"): "efficiency.hbm_moe",
    ("wideep_moe", "r"): "floors.tile_rows",
    ("mhc_post", "e_m"): "efficiency.hbm_stream",
    ("v4_one_floor", "tau"): "floors.kernel",
    ("all_reduce", "a_one"): "floors.all_reduce",
    ("all_reduce", "e_two"): "efficiency.link_all_reduce",
    ("deepep_ll_combine", "a"): "floors.all_to_all",
    ("deepep_ll_combine", "e"): "efficiency.link_all_to_all",
    ("deepep_ll_combine", "e_out"): "efficiency.link_scale_out",
    ("deepep_ll_combine", "a_out"): "floors.scale_out",
}
RATE = {"bfloat16": "bf16", "fp8_block": "fp8", "nvfp4": "fp4"}


def toml(f: Fitted) -> str:
    """Lines for a card: one source, then each constant under its field or a name of its class."""
    rate = "" if len(f.key) == 1 else RATE.get(str(f.key[1]), str(f.key[1]))
    name = "_".join(x for x in (f.spec.name, rate) if x)
    card = kernels.CARDS[str(f.key[0])]
    source = f"K_{name.upper()}"
    other = "" if np.isnan(f.other[0]) else f", {f.other[0]:.0f} % on the half not fitted"
    out = [
        f'# {card} [sources]: {source} = "kernel tables of aiconfigurator-core 0.12.0 (Apache-2.0),'
        f" {', '.join(f.spec.ops)}: {f.n} rows, median error {f.fitted[0]:.0f} %{other}; "
        'calibration/fit_kernels.py"'
    ]
    for k, v in f.constants.items():
        low, high = f.spread[k]
        low, high = min(low, v), max(high, v)
        shown = [f"{x:.3g}" for x in (v, low, high)]
        if _is_time(k) or k == "c":
            shown = [f'"{x / US:.4g} us"' for x in (v, low, high)]
        field_name = FIELDS.get((f.spec.name, k), f"kernels.{name}_{k}").format(rate=rate)
        out.append(
            f'{field_name} = {{ value = {shown[0]}, kind = "measured", source = "{source}", '
            f"low = {shown[1]}, high = {shown[2]} }}"
        )
    return "\n".join(out)


# What a constant is where its piece of the form is left out.
NEUTRAL = dict(s=0.0, l=0.0, r=0.0, c=0.0, per_rank=0.0, half=0.0, sm=0.0, tau_t=0.0,
               tau_quantise=0.0, heads_min=0.0, m_core=0.8)  # fmt: skip


def pieces(groups: list[tuple], specs: Sequence[Spec]) -> pd.DataFrame:
    """MdAPE on the half not fitted, with the whole form and without each piece in turn."""
    out = []
    needed = [s for s in SPECS if s.name in ("gemm", "mla_decode")]
    for spec in specs:
        forms = {"whole": spec}
        for k, v in NEUTRAL.items():
            if k in spec.params:
                left = {n: x for n, x in spec.params.items() if n != k}
                forms[f"without {k}"] = replace(spec, params=left, fixed={**spec.fixed, k: v})
        if len(forms) == 1:
            continue
        before = needed if spec.form is module else []
        for name, form in forms.items():
            for f in run(groups, [*before, form]):
                if f.spec is form and not np.isnan(f.other[0]):
                    out.append(("/".join(map(str, (spec.name, *f.key))), name, f.other[0]))
    t = pd.DataFrame(out, columns=["class", "form", "MdAPE"])
    return t.pivot(index="class", columns="form", values="MdAPE").round(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="folder with the kernel tables")
    parser.add_argument("--toml", action="store_true", help="print lines for the cards as well")
    parser.add_argument("--class", dest="name", help="only classes whose name starts so")
    parser.add_argument("--pieces", action="store_true", help="what each piece of a form is worth")
    args = parser.parse_args()
    groups = collect(args.folder)
    specs = [s for s in SPECS if not args.name or s.name.startswith(args.name)]
    if any(s.form is module for s in specs):  # their parts come first
        specs = [s for s in SPECS if s in specs or s.name in ("gemm", "mla_decode")]
    if args.pieces:
        print(pieces(groups, specs).to_string(na_rep=""))
        return
    for f in run(groups, specs):
        print(line(f))
        if args.toml:
            print(toml(f))
    if not args.name:
        for title, table in imbalance(groups).items():
            print(f"\n{title}\n{table.to_string()}")


if __name__ == "__main__":
    main()
