"""A plan: how a model is laid out over GPUs, and which plans make sense."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, fields

from perfmodel.errors import InputError
from perfmodel.hardware import System
from perfmodel.layers import GQA, MLA, BlockSparse, CompressedAttention, MoE, part_counts
from perfmodel.model import Model


@dataclass(frozen=True)
class Plan:
    """Parallel layout of one instance.

    tp attention tensor parallel, dp attention data parallel, pp pipeline stages, ep expert
    parallel (None: all GPUs of a stage), etp tensor parallel inside an expert (None: what is
    left, tp*dp/ep), dcp decode context parallel (at most tp).
    """

    tp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int | None = None
    etp: int | None = None
    dcp: int = 1

    def __post_init__(self) -> None:
        for f in fields(self):
            v = getattr(self, f.name)
            if v is None and f.name in ("ep", "etp"):
                continue
            if isinstance(v, bool) or not isinstance(v, int) or not 1 <= v <= 4096:
                raise InputError(f"plan {f.name}: {v!r} is not a whole number from 1 to 4096")

    @property
    def gpus(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def experts(self) -> tuple[int, int]:
        """(ep, etp) with what was left open filled in."""
        stage = self.tp * self.dp
        if self.ep is None:
            return stage // (self.etp or 1), self.etp or 1
        return self.ep, self.etp if self.etp is not None else max(stage // self.ep, 1)

    @property
    def label(self) -> str:
        ep, etp = self.experts
        parts = [f"TP{self.tp}"]
        parts += [f"DP{self.dp}"] if self.dp > 1 else []
        parts += [f"EP{ep}"] if ep > 1 else []
        parts += [f"ETP{etp}"] if etp > 1 else []
        parts += [f"PP{self.pp}"] if self.pp > 1 else []
        parts += [f"DCP{self.dcp}"] if self.dcp > 1 else []
        return " ".join(parts)

    @staticmethod
    def parse(text: str) -> Plan:
        """`tp=8,ep=8` or `TP8 EP8` -> Plan; raises InputError naming the bad part."""
        known = [f.name for f in fields(Plan)]
        out: dict[str, int] = {}
        for part in re.split(r"[,\s]+", text.strip()):
            m = re.fullmatch(r"([a-zA-Z]+)\s*=?\s*([0-9]+)", part)
            if not m or m[1].lower() not in known:
                raise InputError(
                    f"plan: {part!r} is not understood; write for example tp=8,dp=9,ep=72 "
                    f"(known: {', '.join(known)})"
                )
            if m[1].lower() in out:
                raise InputError(f"plan: {m[1].lower()} is given twice in {text!r}")
            out[m[1].lower()] = int(m[2])
        return Plan(**out)

    def check(self, model: Model, system: System, draft: str | None = None) -> None:
        """Raise InputError when the layout is not possible for this model (and its draft)."""
        ep, etp = self.experts
        stage = self.tp * self.dp
        if ep * etp != stage:
            raise InputError(
                f"plan {self.label}: ep x etp = {ep} x {etp} = {ep * etp} must equal "
                f"tp x dp = {self.tp} x {self.dp} = {stage}"
            )
        if etp > 1 and self.dp > 1:
            raise InputError(
                f"plan {self.label}: etp={etp} with attention data parallel dp={self.dp} is not "
                "modelled; use etp=1 and ep=tp*dp"
            )
        if self.dcp > self.tp or self.tp % self.dcp:
            raise InputError(f"plan dcp: {self.dcp} must divide tp={self.tp}")
        if self.pp > model.layers:
            raise InputError(f"plan pp: {self.pp} is more than the {model.layers} layers")
        shares = any(getattr(a, "kv_shared", False) for a in model.attention.values())
        if self.pp > 1 and (shares or model.shape.prefill_layers is not None):
            raise InputError(
                f"plan pp: {self.pp} for {model.id}, whose layers share caches or are left out of "
                "prefills; expected 1 (stages are not modelled for them)"
            )
        attentions, feed_forwards = part_counts(
            [*model.shape.order, *(model.draft[draft].layers if draft else [])]
        )
        for name in attentions:
            heads = model.attention[name].heads
            if heads % self.tp:
                raise InputError(
                    f"plan tp: {self.tp} does not divide the {heads} heads of {model.id} {name}"
                )
            if self.dcp > 1 and isinstance(model.attention[name], GQA | BlockSparse):
                raise InputError(
                    f"plan dcp: {self.dcp} for {model.id}, whose {name} layers keep one cache per "
                    "KV head; expected 1 (decode context parallel is modelled for latent caches)"
                )
        for name in feed_forwards:
            f = model.ffn[name]
            if isinstance(f, MoE):
                if ep > f.experts:
                    raise InputError(f"plan ep: {ep} is more than the {f.experts} experts")
                if f.intermediate % etp:
                    raise InputError(
                        f"plan etp: {etp} does not divide the expert width {f.intermediate}"
                    )
        limit = system.scale_out.gpus_max
        if limit is not None and self.gpus > limit.value:
            raise InputError(
                f"plan {self.label}: {self.gpus} GPUs are more than the {limit.value:.0f} of "
                f"{system.id}"
            )


def staged_kinds(model: Model) -> list[str]:
    """The kinds of layers that are counted stage by stage: they decide what a stage must hold.

    Feed-forward kinds are among them only where layers lack a part, so that stages of as many
    layers may hold more or fewer of them; else every layer has one.
    """
    return [*model.attention_counts(), *(model.ffn_counts() if model.has_partial_layers else ())]


def stage_layers(model: Model, pp: int) -> dict[str, int]:
    """Of each staged kind, the most layers on one stage: contiguous stages, sizes within one."""
    order = [x.split("/") for x in model.shape.order]
    small, larger_stages = divmod(len(order), pp)
    most = dict.fromkeys(staged_kinds(model), 0)
    start = 0
    for i in range(pp):
        stage = order[start : (start := start + small + (i < larger_stages))]
        for kind, n in Counter(kind for layer in stage for kind in layer).items():
            if kind in most:
                most[kind] = max(most[kind], n)
    return most


def plans(
    model: Model, system: System, max_gpus: int | None = None, draft: str | None = None
) -> list[Plan]:
    """Every plan that makes sense on one system: TP, TP with EP, attention DP with wide EP.

    Sizes are powers of two up to the NVLink domain, and the whole domain; a domain smaller than
    16 GPUs is also joined by twos and fours over the scale-out network, by EP and by pipeline.
    """
    domain = int(system.scale_up.gpus.value)
    top = max_gpus or (domain if domain >= 16 else 4 * domain)
    sizes = sorted({2**i for i in range(12) if 2**i <= min(top, domain)} | {min(domain, top)})
    heads = [model.attention[n].heads for n in model.attention_counts()]
    latent = any(
        isinstance(model.attention[n], MLA | CompressedAttention) for n in model.attention_counts()
    )
    out: list[Plan] = []

    def put(p: Plan) -> None:
        try:
            p.check(model, system, draft)
        except InputError:
            return
        if p.gpus <= top and p not in out:
            out.append(p)

    for n in sizes:
        if all(h % n == 0 for h in heads):
            put(Plan(tp=n, ep=1, etp=n))
            put(Plan(tp=n, ep=n))
            if latent and n > 1:
                put(Plan(tp=n, ep=n, dcp=n))
        for tp in (1, 2, 4, 8):
            if n % tp == 0 and n > tp:
                put(Plan(tp=tp, dp=n // tp, ep=n))
    boxes = [k for k in (2, 4, 8) if k * domain <= top]
    for k in boxes:
        put(Plan(tp=domain, pp=k, ep=domain))
        put(Plan(dp=domain, pp=k, ep=domain))
        put(Plan(dp=k * domain, ep=k * domain))
        put(Plan(tp=domain, dp=k, ep=k * domain))
    return out
