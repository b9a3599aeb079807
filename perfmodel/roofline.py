"""Cost + machine -> seconds, with the bound named."""

from __future__ import annotations

from perfmodel.hardware import System
from perfmodel.precision import RATES
from perfmodel.symbolic import Chain, larger

MODES = {
    "calibrated": "calibrated: measured efficiencies and latency floors",
    "speed-of-light": "speed of light: datasheet peaks, no floors, no overheads",
}


def _roofline() -> Chain:
    c = Chain("roofline", "time of one operator")
    f = c.input("F", "FLOP", "FLOPs of the operator")
    x = c.input("X", "B", "HBM bytes of the operator")
    peak = c.input("P", "FLOP/s", "peak at the operator's precision")
    ec = c.input("e_c", "1", "compute efficiency", r"\eta_c")
    bw = c.input("W", "B/s", "HBM bandwidth")
    em = c.input("e_m", "1", "memory efficiency", r"\eta_m")
    n = c.input("n_k", "1", "kernels launched", r"n_k")
    floor = c.input("tau", "s", "latency floor of a kernel", r"\tau")
    left = c.input("s", "1", "share of the smaller time that does not overlap", r"\sigma")
    t_c = c.define("t_c", "s", "compute time", f / (peak * ec))
    t_m = c.define("t_m", "s", "memory time", x / (bw * em))
    t_f = c.define("t_f", "s", "latency floor", n * floor)
    # the larger time, and the share `s` of the smaller: larger + s (sum - larger)
    c.define(
        "t_op", "s", "operator time", (1 - left) * larger(t_c, t_m) + left * (t_c + t_m) + t_f,
        r"t_\mathrm{op}",
    )  # fmt: skip
    return c


ROOFLINE = _roofline()

COMPUTE_CLASSES = ("gemm", "moe", "attention_prefill", "attention_decode")
MEMORY_CLASSES = ("gemm", "moe", "moe_4bit", "attention", "stream", "sparse", "scan")
LINKS = ("all_reduce", "all_reduce_one", "all_to_all", "scale_out")
TIMES = (
    "kernel", "all_reduce", "all_reduce_two", "all_reduce_rank", "all_to_all", "scale_out", "send",
    "step", "scan_token", "fused",
)  # fmt: skip
SIZES = {"tile_rows": "token", "context_decode": "token", "context_prefill": "token",
         "sparse_heads": "1"}  # fmt: skip
FLOORS = (*TIMES, *SIZES)


def machine_numbers(system: System, mode: str) -> dict[str, tuple[float, str]]:
    """Every machine number of the step: name -> (SI value, source).

    In speed-of-light mode efficiencies are 1 and floors 0. A chip without FP8 or FP4 runs those
    operands at the next wider peak, with that rate's efficiency.
    """
    light = mode == "speed-of-light"
    ideal = "speed of light: not applied"
    out: dict[str, tuple[float, str]] = {}

    def put(name: str, path: str, label: str = "") -> None:
        q = system.field(path)
        note = f" ({label})" if label else ""
        out[name] = (q.value, f"{q.source} [{q.kind}]{note}")

    def correct(name: str, path: str, none: float, label: str = "") -> None:
        """An efficiency or floor of the card; at the speed of light `none`, as if it were absent."""
        if light:
            out[name] = (none, ideal)
        else:
            put(name, path, label)

    rate = "bf16"
    for r in RATES:
        if getattr(system.chip, f"peak_{r}", None) is not None:
            rate = r
        fallback = "" if rate == r else f"no {r} on this chip: runs at {rate}"
        put(f"P_{r}", f"chip.peak_{rate}", fallback)
        for cls in COMPUTE_CLASSES:
            # Attention has no FP4 form: its operands are FP8 at the narrowest.
            has = "fp8" if cls.startswith("attention") and rate == "fp4" else rate
            correct(f"e_{cls}_{r}", f"efficiency.{cls}_{has}", 1.0, fallback)
    put("W_hbm", "memory.bandwidth")
    for cls in MEMORY_CLASSES:
        correct(f"e_hbm_{cls}", f"efficiency.hbm_{cls}", 1.0)
    for name in ("moe_fused", "hbm_moe_fused"):
        if getattr(system.efficiency, name) is None:  # no such kernel: a request for it is refused
            out[f"e_{name}"] = (1.0, "not on the card")
        else:
            correct(f"e_{name}", f"efficiency.{name}", 1.0)
    correct("e_unhidden", "efficiency.unhidden", 0.0)
    correct("e_unhidden_attention", "efficiency.unhidden_attention", 0.0)
    put("D", "scale_up.gpus")
    put("W_nvl", "scale_up.bandwidth")
    put("W_out", "scale_out.bandwidth")
    for kind in LINKS:
        correct(f"e_link_{kind}", f"efficiency.link_{kind}", 1.0)
    for name in FLOORS:
        if getattr(system.floors, name) is None:
            out[f"tau_{name}"] = (0.0, "not on the card")
            continue
        correct(f"tau_{name}", f"floors.{name}", 0.0)
    return out
