"""The step: a model, a precision and a phase become one chain of definitions.

`step_chain` collects the operators of every layer kind, turns each into compute, memory, link and
floor time (see `perfmodel.roofline`), and sums them over layers. The same chain also counts what
stays resident on a GPU. It is compiled once and runs over whole columns of configurations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy as sp

from perfmodel.model import Model
from perfmodel.operators.builder import (
    DP,
    GROUP_SEQS,
    PP,
    SEQS,
    TOKENS,
    TP,
    B,
    Builder,
    Op,
    Q,
    T,
)
from perfmodel.operators.collect import collect
from perfmodel.plan import staged_kinds
from perfmodel.precision import RATES
from perfmodel.roofline import COMPUTE_CLASSES, FLOORS, LINKS, MEMORY_CLASSES, ROOFLINE, SIZES
from perfmodel.symbolic import Chain, either, larger, smaller, symbol


@dataclass(frozen=True)
class StepChain:
    """A compiled-on-demand step: its chain and its operators, in order."""

    chain: Chain
    ops: tuple[Op, ...]


INPUTS = (
    ("B", "1", "sequences in the instance (batch)", None),
    ("T", "token", "tokens in the cache of each sequence", None),
    ("q", "token", "new tokens of a sequence in this step", None),
    ("tp", "1", "attention tensor parallel", None),
    ("dp", "1", "attention data parallel", None),
    ("pp", "1", "pipeline stages", None),
    ("ep", "1", "expert parallel", None),
    ("etp", "1", "tensor parallel inside an expert", None),
    ("dcp", "1", "decode context parallel", None),
    ("D", "1", "GPUs of one NVLink domain", None),
    ("phi", "1", "load of the busiest expert rank over the mean", r"\varphi"),
    ("nu", "1", "variance of the experts' popularity, whose mean is 1", r"\nu"),
    ("xi", "1", "1: wait for the rank with most experts touched; 0: the mean", r"\xi"),
    ("phi_slope", "1", "growth of that load with each rank, where nothing balances it", None),
    ("n_redundant", "1", "replicas of busy experts in a layer", r"R"),
    ("ov_two", "1", "1: two-batch overlap of the expert exchange", r"o_2"),
    ("ov_fused", "1", "1: dispatch and combine inside the expert kernel", r"o_f"),
    ("n_quantise_fp8", "1", "kernels that quantise activations, block-scaled FP8 products", None),
    ("n_quantise_fp4", "1", "kernels that quantise activations, NVFP4 products", None),
    (
        "tau_sequence",
        "s",
        "host time a step spends on each sequence of a rank",
        r"\tau_\mathrm{seq}",
    ),
    ("W_hbm", "B/s", "HBM bandwidth", r"W_\mathrm{hbm}"),
    ("W_nvl", "B/s", "NVLink bandwidth, one direction", r"W_\mathrm{nvl}"),
    ("W_out", "B/s", "scale-out bandwidth, one direction", r"W_\mathrm{out}"),
    ("A", "token", "tokens a step yields per sequence (acceptance length)", None),
    ("P_gpu", "W", "power per GPU on the named basis", r"P_\mathrm{gpu}"),
    ("c_gpu", "USD/s", "cost per GPU and second on the named basis", r"c_\mathrm{gpu}"),
    ("n_live", "1", "activation vectors alive per token, in hidden sizes (BF16)", None),
    ("workspace", "B", "communication buffers, graphs and scratch per GPU", r"X_\mathrm{ws}"),
)


def declare(c: Chain) -> None:
    for name, unit, doc, tex in INPUTS:
        c.input(name, unit, doc, tex)
    for r in RATES:
        c.input(f"P_{r}", "FLOP/s", f"dense peak at {r}")
        for cls in COMPUTE_CLASSES:
            c.input(f"e_{cls}_{r}", "1", f"compute efficiency, {cls} at {r}")
    for cls in MEMORY_CLASSES:
        c.input(f"e_hbm_{cls}", "1", f"HBM efficiency, {cls}")
    for k in LINKS:
        c.input(f"e_link_{k}", "1", f"link efficiency, {k}")
    for k in FLOORS:
        c.input(f"tau_{k}", SIZES.get(k, "s"), f"floor: {k}")
    c.input("e_moe_fused", "1", "compute efficiency of the fused expert kernel")
    c.input("e_hbm_moe_fused", "1", "HBM efficiency of the fused expert kernel")
    c.input("e_unhidden", "1", "share of the smaller time that does not overlap", r"\sigma")
    c.input("e_unhidden_attention", "1", "the same, in decode attention", r"\sigma_a")


def step_chain(model: Model, precision: str, phase: str, draft: str | None = None) -> StepChain:
    """The chain for one model, precision, phase and draft (callers keep it).

    Raises InputError when the precision or the draft is not on the card.
    """
    b = collect(model, precision, phase, draft)
    c = Chain(f"{model.id} {phase}")
    declare(c)
    for kind in staged_kinds(model):
        c.input(f"L_{kind}", "1", f"{kind} layers on the stage that has most of them")
    # The busiest rank sets the time, so sequences are rounded up to whole ones per rank. A rank's
    # microbatches differ by one sequence at most; the mean one stands for all of them, which is
    # exact for the sum of their times where those grow linearly.
    c.define("n_rank", "1", "sequences of a rank", sp.ceiling(B / DP))
    c.define("n_mb", "1", "microbatches in flight", smaller(PP, symbol("n_rank")))
    c.define(
        "b", "1", "sequences on a GPU: of a microbatch, mean", symbol("n_rank") / symbol("n_mb")
    )
    c.define("m", "token", "tokens on a GPU", SEQS * Q)
    # The fullest microbatch: a mean over uneven ones would fall when a sequence is added.
    c.define(
        "b_g", "1", "sequences of the expert group: of the fullest microbatch",
        smaller(B, DP * SEQS),
    )  # fmt: skip
    c.define("M", "token", "tokens routed in the expert group", GROUP_SEQS * Q)
    c.define("g", "1", "GPUs of the instance", TP * DP * PP)
    time: dict[str, list[sp.Expr]] = {"layers": [], "ends": [], "sends": []}
    exchange: list[sp.Expr] = []
    launches: list[sp.Expr] = []
    kernels: list[sp.Expr] = []
    parts: dict[str, list[sp.Expr]] = {k: [] for k in ("compute", "memory", "link", "floor")}
    for i, op in enumerate(b.ops):
        op_time(c, f"o{i}", op)
        n = op.count
        where = "sends" if op.link == "send" else "ends" if is_end(op) else "layers"
        time[where].append(n * symbol(f"o{i}_t"))
        if where == "layers":
            if op.formulas.name == "exchange":
                exchange.append(n * symbol(f"o{i}_t"))
            elif op.link is None:
                launches.append(n * symbol(f"o{i}_floor"))
        if op.link is None:
            kernels.append(n * op.kernels)
        for k in parts:
            if f"o{i}_{k}" in c.defs:
                parts[k].append(n * symbol(f"o{i}_{k}"))
    layers = b.model.layers
    c.define(
        "stretch",
        "1",
        "the largest pipeline stage over the mean stage",
        sp.ceiling(sp.Integer(layers) / PP) * PP / layers,
    )
    for name, doc in (("layers", "all layers"), ("ends", "embedding, head and draft"),
                      ("sends", "sends between pipeline stages")):  # fmt: skip
        c.define(f"t_{name}", "s", f"time of {doc}", sp.Add(*time[name], evaluate=False))
    c.define("n_kernels", "1", "kernels of a step, collectives apart", sp.Add(*kernels))
    _overlap(c, exchange, launches)
    c.define("t_through", "s", "a microbatch through all stages, alone",
             symbol("t_shown") + symbol("t_ends") + symbol("t_sends"))  # fmt: skip
    c.define("t_stage", "s", "the slowest stage: most layers and the ends",
             symbol("t_shown") * symbol("stretch") / PP + symbol("t_ends"))  # fmt: skip
    c.define("t_host", "s", "host time of a step",
             symbol("tau_step") + symbol("n_rank") * symbol("tau_sequence"))  # fmt: skip
    # A microbatch comes back when it has passed all stages and the others have passed the slowest.
    c.define(
        "step_time",
        "s",
        "time of a step: the longer of one way through and all turns of the slowest stage",
        larger(symbol("t_through"), symbol("n_mb") * symbol("t_stage")) + symbol("t_host"),
        r"t_\mathrm{step}",
    )
    for k, terms in parts.items():
        c.define(f"sum_{k}", "s", f"{k} time of all operators", sp.Add(*terms, evaluate=False))
    _resident(c, b)
    _metrics(c, phase)
    return StepChain(c, tuple(b.ops))


def _overlap(c: Chain, exchange: list[Any], launches: list[Any]) -> None:
    """What of the expert exchange is hidden: `t_shown` is the layers' time that is left.

    two-batch: two half batches take turns, one exchanging while the other computes, and every
    kernel is launched twice (their weights are counted once: half batches that touch the same
    experts). fused: dispatch and combine run inside the expert kernel (MegaMoE), which has its own
    efficiencies and floor (`op_time`).
    """
    hidden = sp.Add(*exchange, evaluate=False)
    c.define("t_exchange", "s", "dispatch and combine of all layers", hidden)
    c.define("t_launches", "s", "kernel floors of all layers", sp.Add(*launches, evaluate=False))
    t_x, t_l = symbol("t_exchange"), symbol("t_layers")
    two = smaller(t_x, t_l - t_x) - symbol("t_launches")
    c.define(
        "t_shown", "s", "time of all layers after overlap",
        t_l - symbol("ov_two") * two - symbol("ov_fused") * t_x,
    )  # fmt: skip


def op_time(c: Chain, key: str, op: Op) -> None:
    """Definitions of one operator's times; quantities that are zero are left out."""
    if op.link is not None:
        link, floor = op.cost("link_s"), op.cost("latency_s")
        c.define(f"{key}_link", "s", f"{op.layer_kind}.{op.name} link time", link)
        c.define(f"{key}_floor", "s", f"{op.layer_kind}.{op.name} latency", floor)
        total: sp.Expr = symbol(f"{key}_link") + symbol(f"{key}_floor")
    else:
        peak, ec = symbol(f"P_{op.rate}"), symbol(f"e_{op.compute_class}_{op.rate}")
        bw, em = symbol("W_hbm"), symbol(f"e_hbm_{op.memory_class}")
        launched: sp.Expr = op.kernels * symbol("tau_kernel")
        if op.formulas.name == "experts":
            fused = symbol("ov_fused")
            ec = either(fused, symbol("e_moe_fused"), ec)
            em = either(fused, symbol("e_hbm_moe_fused"), em)
            launched = either(fused, symbol("tau_fused"), launched)
        flops = op.cost("flops")
        moved = op.cost("weight_bytes") + op.cost("kv_bytes") + op.cost("act_bytes")
        bind = dict(F=flops, X=moved, P=peak, e_c=ec, W=bw, e_m=em, n_k=op.kernels)
        bind["tau"] = symbol("tau_kernel")
        bind["s"] = unhidden(op)
        parts: dict[sp.Symbol, sp.Expr] = {symbol("t_c"): sp.Integer(0)}
        for name, part in (("t_c", "compute"), ("t_m", "memory"), ("t_f", "floor")):
            if name != "t_c" or flops != 0:
                bound = ROOFLINE.bind(name, bind)
                if name == "t_f":
                    bound = launched + op.cost("serial_s")
                parts[symbol(name)] = c.define(
                    f"{key}_{part}", "s", f"{op.name} {part} time", bound
                )
        parts[symbol("s")] = unhidden(op)
        total = ROOFLINE.defs["t_op"][1].xreplace(parts)
    c.define(f"{key}_t", "s", f"{op.layer_kind}.{op.name}: time in one layer", total)


def unhidden(op: Op) -> sp.Expr:
    """The share of the smaller of compute and memory time that an operator does not overlap."""
    # prefill cores work on what stays on chip; all others do not overlap fully
    left = {
        "attention_prefill": sp.Integer(0),
        "attention_decode": symbol("e_unhidden_attention"),
    }
    return left.get(op.compute_class, symbol("e_unhidden"))


def _resident(c: Chain, b: Builder) -> None:
    """Bytes on the fullest GPU: weights by class, caches, activations, workspace.

    With several stages the sum is taken over the worst of each part, which no stage exceeds: the
    weights of the most layers, of each attention kind the most layers that a stage has (`L_...`,
    for its cache; of all kinds where layers lack a part), and the heavier end: the first with the
    embedding and a vision tower, or the last with the head. A draft embeds its tokens, so its
    stage holds both.
    """
    layers_share = symbol("stretch") / PP
    one_stage = either(PP - 1, 0, 1)
    drafted = any(is_draft(op.layer_kind) for op in b.ops)
    ends = {op.name: op for op in b.ops if op.layer_kind == "ends" and op.params}
    tower = 2.0 * b.model.vision.parameters if b.model.vision else 0.0  # BF16, on every rank
    head_stays = _whole_bytes(ends["head"]) >= _whole_bytes(ends["embedding"]) + tower
    light_end = "embedding" if head_stays else "head"
    by_class: dict[str, list[sp.Expr]] = {}
    for op in b.ops:
        if not op.params * op.copies:
            continue
        share: sp.Expr = op.copies * op.params * op.bytes_per_param / op.resident
        if not is_end(op):
            by_kind = b.model.has_partial_layers and op.layer_kind in staged_kinds(b.model)
            share *= symbol(f"L_{op.layer_kind}") / op.count if by_kind else layers_share
        elif op.layer_kind == "ends" and op.name == light_end and not drafted:
            share *= one_stage
        by_class.setdefault(op.tensor_class or "other", []).append(share)
    lines = []
    for cls, terms in by_class.items():
        lines.append(c.define(f"mem_{cls}", "B", f"weights: {cls}", sp.Add(*terms)))
    if b.model.vision:
        # The tower stays resident though text requests never read it.
        lines.append(c.define("mem_vision", "B", "weights: vision tower", sp.Float(tower)))
    local = symbol("n_rank")
    kv: sp.Expr = b.precision.cache.tail_bytes_per_sequence * layers_share
    for x in b.caches:
        own = is_draft(x.layer_kind)  # the draft's stage holds all of its layers
        layers = sp.Integer(x.count) if own else symbol(f"L_{x.layer_kind}")
        kv += layers * x.per_sequence / x.shards
    if b.phase == "prefill":
        kv = kv.xreplace({T: T + Q})
    lines.append(c.define("mem_kv", "B", "KV cache and state", local * kv))
    width = 2 * b.model.shape.hidden_size
    activations = TOKENS * width * symbol("n_live")
    lines.append(c.define("mem_activations", "B", "activations in flight", activations))
    lines.append(c.define("mem_workspace", "B", "workspace", symbol("workspace")))
    c.define("memory", "B", "resident bytes on the fullest GPU", sp.Add(*lines))


def is_end(op: Op) -> bool:
    """Operators of the first or last pipeline stage only: embedding, head and draft."""
    return op.layer_kind == "ends" or is_draft(op.layer_kind)


def is_draft(layer_kind: str) -> bool:
    return layer_kind.startswith("draft ")


def _whole_bytes(op: Op) -> float:
    return op.params * op.bytes_per_param


def _metric_chain(phase: str) -> Chain:
    """From step time to what is reported; each metric is defined here and nowhere else."""
    c = Chain(f"metrics {phase}", "from step time to what is reported")
    step = c.input("step_time", "s", "time of a step", r"t_\mathrm{step}")
    batch = c.input("B", "1", "sequences in the instance")
    g = c.input("g", "1", "GPUs of the instance")
    power = c.input("P_gpu", "W", "power per GPU on the named basis", r"P_\mathrm{gpu}")
    cost = c.input(
        "c_gpu", "USD/s", "cost per GPU and second on the named basis", r"c_\mathrm{gpu}"
    )
    per_mw = c.const("watts", 1_000_000, "W/MW", "watts in a megawatt")
    per_mtok = c.const("mega", 1_000_000, "token/Mtoken", "tokens in a million")
    if phase == "decode":
        a = c.input("A", "token", "tokens a step yields per sequence (acceptance length)")
        tpot = c.define(
            "tpot", "s/token", "time per output token (TPOT)", step / a, r"\mathrm{TPOT}"
        )
        c.define("interactivity", "token/s", "output tokens per second and user", 1 / tpot, "I")
        tokens = batch * a
    else:
        tokens = batch * c.input("q", "token", "new tokens of a sequence in this step")
    # With pp microbatches in flight every stage works all the time, so the instance yields a
    # whole batch per traverse.
    thr = c.define(
        "throughput", "token/s", "tokens per second of the instance", tokens / step, r"\Theta"
    )
    gpu = c.define(
        "throughput_gpu", "token/s", "tokens per second and GPU", thr / g, r"\Theta_\mathrm{gpu}"
    )
    c.define(
        "throughput_mw",
        "token/s/MW",
        "tokens per second and megawatt on the named power basis",
        per_mw * gpu / power,
        r"\Theta_\mathrm{MW}",
    )
    c.define(
        "usd_per_mtok",
        "USD/Mtoken",
        "dollars per million tokens on the named cost basis",
        per_mtok * cost / gpu,
        r"c_\mathrm{Mtok}",
    )
    return c


METRICS = {phase: _metric_chain(phase) for phase in ("decode", "prefill")}


def _metrics(c: Chain, phase: str) -> None:
    source = METRICS[phase]
    values = {t.symbol: v for t, v in source.constants.values()}
    for name, (term, expr) in source.defs.items():
        c.define(name, term.unit, term.doc, expr.xreplace(values), source.tex.get(term.symbol))
