"""Decode steps per second of the generated code, against the same formulas written by hand.

    python benchmarks/decode_sweep.py [rows]

DeepSeek V4 Pro on GB300 NVL72, DP72 EP72, calibrated; batch and context are random columns. The
hand-written version is what a person who knows the formulas would write for this one model and
plan: machine constants folded to scalars, one array pass for each step of arithmetic. Both
must agree to 1e-9.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from perfmodel import api
from perfmodel.api import Plan
from perfmodel.columns import compile_columns
from perfmodel.symbolic import evaluate

MODEL, SYSTEM, PLAN = "deepseek-v4-pro", "gb300-nvl72", Plan(dp=72)
CHUNK = api.CHUNK
Columns = dict[str, np.ndarray]


def by_hand(c: dict[str, float], batch: np.ndarray, context: np.ndarray) -> np.ndarray:
    """Step time (s) of V4 Pro decode, one token a sequence; `c` holds the step's scalars.

    Any plan with pp = 1 inside one NVLink domain and no context parallel.
    """
    tp, dp, ep, etp = c["tp"], c["dp"], c["ep"], c["etp"]
    bw_gemm, bw_moe = c["W_hbm"] * c["e_hbm_gemm"], c["W_hbm"] * c["e_hbm_moe_4bit"]
    bw_attn, bw_stream = c["W_hbm"] * c["e_hbm_attention"], c["W_hbm"] * c["e_hbm_stream"]
    bw_sparse = c["W_hbm"] * c["e_hbm_sparse"]
    bf16, fp8 = c["P_bf16"] * c["e_gemm_bf16"], c["P_fp8"] * c["e_gemm_fp8"]
    fp4, tau = c["P_fp4"] * c["e_gemm_fp4"], c["tau_kernel"]
    attn = c["P_bf16"] * c["e_attention_decode_bf16"]
    h, heads, dim, q_rank, hca, csa, layers = 7168, 128, 512, 1536, 31, 30, 61
    width, o_rank, groups, vocab, streams = heads * dim, 1024, 16, 129280, 4
    w8 = 1 + 4 / 128**2  # FP8 with an FP32 scale for each 128 x 128 block
    m = np.ceil(batch / dp)
    M = batch  # tokens that there are: ranks with fewer sequences route fewer

    def longer(a: Any, b: Any, left: float = c["e_unhidden"]) -> Any:
        """The longer time and the share of the shorter that it does not hide."""
        return (1 - left) * np.maximum(a, b) + left * (a + b)

    def gemm(n_in: float, n_out: float, byte: float, peak: float, g: int = 1) -> np.ndarray:
        """One projection: its compute and its memory time."""
        compute = m * (2 * g * n_in * n_out / peak)
        memory = m * (2 * g * (n_in + n_out) / bw_gemm) + g * n_in * n_out * byte / bw_gemm
        return longer(compute, memory)

    def split(n_in: int, n_out: int, byte: float, peak: float, s: float, g: int = 1) -> np.ndarray:
        """A projection whose weights and activations are split s ways."""
        return gemm(n_in, n_out, byte, peak, g) / s

    # what every attention layer does
    time = layers * gemm(h, q_rank + dim, w8, fp8)
    time += layers * split(q_rank, width, w8, fp8, tp)
    time += layers * split(width // groups, o_rank, w8, fp8, min(tp, groups), groups)
    time += layers * split(groups * o_rank, h, w8, fp8, tp)
    time += m * (layers * 2 * (2 * (q_rank + dim) + 2 * h + 2 * width / tp) / bw_stream)
    window = np.minimum(context, 128)
    queries, partly = m * (4 * width / tp / bw_sparse), c["e_unhidden_attention"]

    def core(pairs: np.ndarray) -> np.ndarray:
        """The gathering attention core."""
        compute = pairs * (4 * width / tp / attn)
        return longer(compute, pairs * (584 / bw_sparse) + queries, partly)

    # HCA: dense over a cache compressed 128 times
    time += hca * gemm(h, 2 * dim, 2, bf16)
    seen = np.floor(context / 128)
    seen += window
    time += hca * core(m * seen)

    # CSA: indexer over a cache compressed 4 times, then the best 1024
    time += csa * gemm(h, 4 * dim, 2, bf16)
    time += csa * gemm(q_rank, 64 * 128, w8, fp8)
    time += csa * gemm(h, 64, 2, bf16)
    time += csa * gemm(h, 512, 2, bf16)
    entries = np.floor(context / 4)
    pairs = m * entries
    time += pairs * (csa * longer(2 * 64 * 128 / fp4, (68 + 4) / bw_attn))
    seen = np.minimum(entries, 1024)
    seen += window
    time += csa * core(m * seen)

    # experts, shared expert and router
    time += layers * gemm(h, 384, 2, bf16)
    inner, slots = 3072, 384 + c["n_redundant"]
    held = np.ceil(slots / ep)  # on the fullest rank
    # experts are not equally popular, and the rank with most of them touched sets the time
    miss = 1 - 6 / 384  # the chance that one token misses an expert
    hit = 1 - miss * np.power(1 - c["nu"] * np.log(miss) * (M - 1), -1 / c["nu"])
    spread = np.sqrt(2 * np.log(ep) * held * hit * (1 - hit))
    touched = np.minimum(held, held * hit + c["xi"] * spread)
    pairs = M * (6 * (c["phi"] + c["phi_slope"] * (ep - 1)) * held / slots)
    weights = 3 * h * inner
    byte = 0.5 + 1 / 32  # FP4 with a scale byte for each 32 values
    padded = touched * c["tau_tile_rows"] + pairs
    time += layers * longer(
        padded * (2 * weights / etp / (c["P_fp8"] * c["e_moe_fp8"])),
        touched * (weights * byte / etp / bw_moe) + pairs * ((2 * h + 3 * inner / etp) / bw_moe),
    )
    time += layers * split(h, 2 * inner, w8, fp8, tp)
    time += layers * split(inner, h, w8, fp8, tp)

    # residual streams, norms, head
    mix = (2 + streams) * streams
    time += 2 * layers * gemm(streams * h, mix, 4, bf16)
    mhc = longer(
        (2 * streams**2 * h + 2 * streams * h) / bf16, 2 * h * (streams + 1 + 2 * streams + 1)
        / bw_stream,
    )  # fmt: skip
    time += m * (2 * layers * mhc + (layers + 1) * 4 * h / bw_stream)
    time += split(h, vocab, 2, bf16, tp)

    # links: all inside one domain; each collective the faster of two ways
    travels = ep if dp > 1 else 1
    link_1 = c["W_nvl"] * c["e_link_all_reduce_one"]
    link_2, link_x = c["W_nvl"] * c["e_link_all_reduce"], c["W_nvl"] * c["e_link_all_to_all"]
    if travels > 1:
        for value in (1, 2):  # dispatch in FP8, combine in BF16
            sent = m * (h * value)
            straight = sent * (6 / tp * (travels - 1) / travels / link_x) + c["tau_all_to_all"]
            gathered = sent * ((travels - 1) / tp / link_2) + c["tau_all_reduce_two"]
            time += layers * np.minimum(straight, gathered)
    if tp > 1:
        sent = m * (2 * h)
        one = sent * ((tp - 1) / link_1) + c["tau_all_reduce"]
        two = sent * (2 * (tp - 1) / tp / link_2) + c["tau_all_reduce_two"]
        rest = c["tau_all_reduce_rank"] * (tp - 2)
        time += 2 * layers * (np.minimum(one, two) + rest)
        time += m * (4 * vocab / tp * (tp - 1) / tp / link_2) + c["tau_all_reduce"]
    time += c["floors"] * tau + c["tau_step"] + m * c["tau_sequence"]
    return time


def hand_columns(c: dict[str, float], batch: np.ndarray, context: np.ndarray) -> Columns:
    """Step time and the metrics that follow from it, by hand."""
    t = by_hand(c, batch, context)
    tpot = t / c["A"]
    gpu = batch / t
    gpu *= c["A"] / (c["tp"] * c["dp"])
    return {
        "step_time": t,
        "tpot": tpot,
        "interactivity": 1 / tpot,
        "throughput_gpu": gpu,
        "throughput_mw": gpu * (1e6 / c["P_gpu"]),
        "usd_per_mtok": 1e6 * c["c_gpu"] / gpu,
    }


def chunks(f: Callable[..., Any], b: np.ndarray, t: np.ndarray, threads: int, keys: Any) -> Columns:
    """Evaluate f(b, t) over chunks, on one thread or several, into whole columns."""
    out = {k: np.empty(b.size) for k in keys}

    def part(i: int) -> None:
        for k, x in f(b[i : i + CHUNK], t[i : i + CHUNK]).items():
            out[k][i : i + CHUNK] = x

    starts = range(0, b.size, CHUNK)
    if threads == 1:
        for i in starts:
            part(i)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(part, starts))
    return out


def best_of(run: Callable[[], Any], times: int = 5) -> float:
    """Seconds of the fastest of some runs."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def main(rows: tuple[int, ...] = (100_000, 1_000_000)) -> None:
    point = api.estimate(MODEL, SYSTEM, PLAN, batch=72, context_tokens=4096)
    scalars = dict(point.values)
    floors = [o.kernels * o.count for o in point.step.ops if o.link is None]
    scalars["floors"] = sum(evaluate(x, scalars) for x in floors)
    keys = ("step_time", "tpot", "interactivity", "throughput_gpu", "throughput_mw", "usd_per_mtok")
    f = compile_columns(point.step.chain, keys, ("B", "T"))
    inputs = {k: scalars[k] for k in f.args}

    def generated(b: np.ndarray, t: np.ndarray) -> Columns:
        return f(**{**inputs, "B": b, "T": t})

    def hand(b: np.ndarray, t: np.ndarray) -> Columns:
        return hand_columns(scalars, b, t)

    rng = np.random.default_rng(20261130)
    print("rows       threads  generated M/s  by hand M/s  ratio  worst difference")
    for n in rows:
        b = rng.integers(1, 40_000, n).astype(float)
        t = rng.integers(1, 1_000_000, n).astype(float)
        ours, theirs = (chunks(g, b, t, 1, keys) for g in (generated, hand))
        worst = max(float(np.max(np.abs(ours[k] / theirs[k] - 1))) for k in keys)
        for threads in (1, 2):
            fast = best_of(partial(chunks, generated, b, t, threads, keys))
            slow = best_of(partial(chunks, hand, b, t, threads, keys))
            print(
                f"{n:<10,} {threads:<8} {n / fast / 1e6:<14.2f} {n / slow / 1e6:<12.2f} "
                f"{fast / slow:<6.2f} {worst:.1e}"
            )
        if worst > 1e-9:
            raise SystemExit(f"generated and hand-written steps differ by {worst:.1e}")


if __name__ == "__main__":
    main(tuple(int(x) for x in sys.argv[1:]) or (100_000, 1_000_000))
