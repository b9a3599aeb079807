"""The deployment report: which system gives the most output per megawatt at an interactivity.

`check` judges the report's parameters before anything runs; `Study` holds the numbers and shows
the parts of the report one after the other (`reports/deployment.ipynb` only calls them).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from perfmodel import api, bands, charts, show
from perfmodel.errors import DoesNotFit, InputError
from perfmodel.roofline import MODES

PREFILL_TOKENS = 8192  # uncached tokens of one turn in the prefill table
TIE = 1.25  # a ratio below this is inside the model's error
TOP = 12  # operators named in the breakdown; the rest is summed

ACCURACY = (
    "perfmodel, accuracy study of a roofline model of this kind against 1,370 held-out rows of "
    "the measured serving points in the Python package aiconfigurator-core 0.12.0"
)

_KIND = {"vendor": "V", "measured": "M", "estimate": "E"}
_ASSUMED = (  # path in the card, what it is
    ("chip.peak_bf16", "Peak, BF16 dense"),
    ("chip.peak_fp8", "Peak, FP8 dense"),
    ("chip.peak_fp4", "Peak, FP4 dense"),
    ("memory.capacity", "Usable HBM"),
    ("memory.bandwidth", "HBM bandwidth"),
    ("scale_up.gpus", "GPUs in a scale-up domain"),
    ("scale_up.bandwidth", "Scale-up link, one direction"),
    ("scale_out.bandwidth", "Scale-out link, one direction"),
    ("efficiency.gemm_bf16", "Efficiency, GEMM BF16"),
    ("efficiency.gemm_fp8", "Efficiency, GEMM FP8"),
    ("efficiency.moe_fp8", "Efficiency, expert GEMM FP8"),
    ("efficiency.moe_fp4", "Efficiency, expert GEMM FP4"),
    ("efficiency.attention_decode_fp8", "Efficiency, decode attention"),
    ("efficiency.hbm_gemm", "HBM efficiency, dense weights"),
    ("efficiency.hbm_moe", "HBM efficiency, experts"),
    ("efficiency.hbm_attention", "HBM efficiency, KV cache"),
    ("efficiency.link_all_to_all", "Link efficiency, all-to-all"),
    ("floors.kernel", "Floor of a kernel"),
    ("floors.all_reduce", "Floor of an all-reduce"),
    ("floors.all_to_all", "Floor of an all-to-all phase"),
    ("floors.step", "Host time of a step"),
    ("floors.tile_rows", "Extra rows a touched expert"),
)


def _one_of(name: str, value: object, allowed: Any) -> None:
    if value not in allowed:
        raise InputError(f"{name}: {value!r} is unknown, expected one of {', '.join(allowed)}")


def _at_least(name: str, value: float | None, least: float, what: str = "") -> None:
    if value is not None and not (math.isfinite(value) and value >= least):
        raise InputError(f"{name}: {value!r} is out of range, expected {what or f'>= {least:g}'}")


def _bases(system: str) -> list[str]:
    """Return the power bases on a system's card."""
    quantities = api.load_system(system).quantities()
    return [b for b in api.POWER_BASES if f"power.{b}" in quantities]


def check(params: Mapping[str, Any]) -> None:
    """Check the parameters' values (not their types); raises InputError naming what is allowed."""
    _one_of("model", params["model"], api.list_models())
    systems = params["systems"]
    if not systems:
        raise InputError(f"systems: empty, expected some of {', '.join(api.list_systems())}")
    for system in systems:
        _one_of("systems", system, api.list_systems())
    if len(set(systems)) < len(systems):
        raise InputError(f"systems: {systems!r} names one twice, expected each once")
    _one_of("precision", params["precision"], ["auto", *api.precisions(params["model"])])
    if params["draft"] is not None:
        _one_of("draft", params["draft"], api.drafts(params["model"]))
        if params["draft_tokens"] == 0:
            raise InputError(
                f"draft: {params['draft']!r} without draft_tokens; expected draft_tokens > 0"
            )
    _one_of("mode", params["mode"], list(MODES))
    _one_of("power_basis", params["power_basis"], list(api.POWER_BASES))
    _one_of("price_basis", params["price_basis"], list(api.PRICE_BASES))
    for system in systems:
        bases = _bases(system)
        if params["power_basis"] not in bases:
            raise InputError(
                f"power_basis: the card of {system} has no {params['power_basis']!r}, "
                f"expected one of {', '.join(bases) or 'none: the report ranks by throughput per MW'}"
            )
    limit = api.load_model(params["model"]).shape.context_tokens
    if not 1 <= params["context_tokens"] <= limit:
        raise InputError(
            f"context_tokens: {params['context_tokens']:,} is out of range, expected 1 to "
            f"{limit:,} tokens for {params['model']}"
        )
    target = params["interactivity_target_tok_s_user"]
    if not (math.isfinite(target) and target > 0):
        raise InputError(f"interactivity_target_tok_s_user: {target!r}, expected > 0 tok/s/user")
    _at_least("draft_tokens", params["draft_tokens"], 0)
    accepted, drafts = params["acceptance_length"], params["draft_tokens"]
    if accepted is not None and not 1 <= accepted <= drafts + 1:
        raise InputError(
            f"acceptance_length: {accepted!r} is out of range, expected 1 to {drafts + 1}"
            " (draft_tokens + 1)"
        )
    _at_least("max_gpus", params["max_gpus"], 1)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _top(frame: pd.DataFrame, column: str) -> dict[str, Any]:
    """Return the row with the largest value of a column."""
    return dict(frame.iloc[int(frame[column].to_numpy().argmax())])


def _thin(front: pd.DataFrame, step: float = 0.03) -> pd.DataFrame:
    """Drop points nearer than `step` of the axes to the last one kept: dots would hide the line."""
    x = (front["interactivity_tok_s_user"] / front["interactivity_tok_s_user"].max()).to_numpy()
    y = (front["throughput_tok_s_mw"] / front["throughput_tok_s_mw"].max()).to_numpy()
    keep = [0]
    for i in range(1, len(front)):
        if math.hypot(x[i] - x[keep[-1]], y[i] - y[keep[-1]]) >= step or i == len(front) - 1:
            keep.append(i)
    return front.iloc[keep]


def _annotated(spec: dict[str, Any], fronts: Mapping[str, pd.DataFrame], target: float) -> Any:
    """Name each curve at its upper end and mark the target: colours vanish in a greyscale print."""
    ends = [_top(f, "throughput_tok_s_mw") for f in fronts.values()]
    right = max(range(len(ends)), key=lambda i: ends[i]["interactivity_tok_s_user"])
    x = {"field": "x", "type": "quantitative"}
    names = [
        {"x": e["interactivity_tok_s_user"], "y": e["throughput_tok_s_mw"], "name": n}
        for n, e in zip(fronts, ends, strict=True)
    ]
    # Labels stand over the ends, but run to the right where there is room only there.
    reach = max(float(f["interactivity_tok_s_user"].max()) for f in fronts.values())
    aside = [
        v
        for i, v in enumerate(names)
        if i == right or v["x"] / reach < 0.007 * len(v["name"])  # 500 px wide, 7 px a letter
    ]
    names = [v for v in names if v not in aside]
    spec["layer"] += [
        {
            "data": {"values": [{"x": target}]},
            "mark": {"type": "rule", "color": "#808080", "strokeWidth": 1},
            "encoding": {"x": x},
        },
        *(
            {
                "data": {"values": values},
                "mark": {"type": "text", "align": align, "dy": -9, "fontSize": 11},
                "encoding": {
                    "x": x,
                    "y": {"field": "y", "type": "quantitative"},
                    "text": {"field": "name", "type": "nominal"},
                },
            }
            for align, values in (("center", names), ("left", aside))
        ),
    ]
    spec.setdefault("config", {}).setdefault("legend", {})["labelLimit"] = 0
    return spec


@dataclass
class Sources:
    """Numbers sources in the order they are cited."""

    texts: list[str] = field(default_factory=list)

    def cite(self, text: str) -> str:
        """Return the Markdown mark of a source, such as "[3]"; nothing for an empty source."""
        text = re.sub(r"\s*\[(vendor|measured|estimate)\]", "", text).strip()
        if not text or text.startswith("speed of light"):
            return ""
        if text not in self.texts:
            self.texts.append(text)
        return rf"\[{self.texts.index(text) + 1}\]"


@dataclass
class Point:
    """The best operating point of one system: values of one row of `api.best`, SI."""

    plan: Any
    batch: int
    row: dict[str, Any]
    estimate: Any


@dataclass
class Study:
    """The numbers of one report; every `show_...` method shows one part of it."""

    model: str
    systems: list[str]
    context_tokens: int
    precision: str
    mode: str
    power_basis: str
    price_basis: str
    interactivity_target_tok_s_user: float
    draft: str | None
    draft_tokens: int
    acceptance_length: float | None
    max_gpus: int | None
    sources: Sources = field(default_factory=Sources)

    def __post_init__(self) -> None:
        check({k: v for k, v in vars(self).items() if k != "sources"})

    # ---- numbers

    @property
    def _keywords(self) -> dict[str, Any]:
        return {
            "precision": self.precision,
            "mode": self.mode,
            "draft": self.draft,
            "draft_tokens": self.draft_tokens,
            "acceptance_length": self.acceptance_length,
            "power_basis": self.power_basis,
            "price_basis": self.price_basis,
        }

    @cached_property
    def labels(self) -> dict[str, str]:
        """System id -> name in tables and charts, distinct."""
        cards = {s: api.load_system(s) for s in self.systems}
        names = [c.name for c in cards.values()]
        return {
            s: c.name if names.count(c.name) == 1 else f"{c.name} ({c.profile})"
            for s, c in cards.items()
        }

    @cached_property
    def fronts(self) -> dict[str, pd.DataFrame]:
        """System id -> best points over plans and batches, by rising interactivity."""
        batch = np.unique(np.geomspace(1, 65536, 240).round())
        out = {}
        for s in self.systems:
            try:
                columns = api.best(
                    self.model, s, batch=batch, context_tokens=self.context_tokens,
                    max_gpus=self.max_gpus, **self._keywords,
                )  # fmt: skip
            except DoesNotFit:
                out[s] = pd.DataFrame()
            else:
                out[s] = pd.DataFrame(columns)
        if all(f.empty for f in out.values()):
            raise DoesNotFit(
                f"{self.model} with {self.context_tokens:,} tokens of context fits on none of "
                f"{', '.join(self.systems)}" + (f" with max_gpus {self.max_gpus}"
                if self.max_gpus else "")
            )  # fmt: skip
        return out

    @cached_property
    def points(self) -> dict[str, Point]:
        """System id -> most throughput per MW at the target; without those that miss it."""
        out = {}
        for s, front in self.fronts.items():
            if front.empty:
                continue
            ok = front[front["interactivity_tok_s_user"] >= self.interactivity_target_tok_s_user]
            if len(ok):
                row = _top(ok, "throughput_tok_s_mw")
                plan = api.Plan.parse(row["plan"])
                batch = int(row["batch"])
                estimate = api.estimate(
                    self.model, s, plan, batch=batch, context_tokens=self.context_tokens,
                    **self._keywords,
                )  # fmt: skip
                out[s] = Point(plan, batch, row, estimate)
        return out

    @cached_property
    def ranking(self) -> list[str]:
        """Systems that reach the target, most throughput per MW first."""
        return sorted(self.points, key=lambda s: -self.points[s].row["throughput_tok_s_mw"])

    # ---- words

    @property
    def _target(self) -> str:
        return f"{self.interactivity_target_tok_s_user:g} tok/s/user"

    def show_question(self) -> None:
        names = ", ".join(f"**{show.escape(n)}**" for n in self.labels.values())
        budget = f" No deployment uses more than {self.max_gpus} GPUs." if self.max_gpus else ""
        show.text(
            f"One instance of **{show.escape(self.model)}** decodes with {self.context_tokens:,} "
            f"tokens of context in each sequence. Which of {names} gives the most output tokens "
            f"per second and megawatt while every user gets at least {self._target}? "
            f"Each system runs its best parallel plan and batch.{budget}"
        )

    def answer(self) -> str:
        """Return the answer as one paragraph of Markdown."""
        parts = []
        if self.ranking:
            first = self.ranking[0]
            top = self.points[first].row
            parts.append(
                f"At {self._target}, **{show.escape(self.labels[first])}** gives the most: "
                f"**{show.number(top['throughput_tok_s_mw'])} output tok/s per MW** "
                f"({self._where(first)})."
            )
            ratios = []
            for s in self.ranking[1:]:
                ratio = top["throughput_tok_s_mw"] / self.points[s].row["throughput_tok_s_mw"]
                tie = ", a tie within the model's error" if ratio < TIE else ""
                ratios.append(
                    f"**{show.number(ratio)} times** {show.escape(self.labels[s])} "
                    f"({self._where(s)}{tie})"
                )
            if ratios:
                parts.append("That is " + " and ".join(ratios) + ".")
                parts.append(self._robustness())
        else:
            parts.append(f"**None of the systems reaches {self._target}.**")
        for s, front in self.fronts.items():
            name = show.escape(self.labels[s])
            if front.empty:
                parts.append(f"{name} can't hold the model at this context.")
            elif s not in self.points:
                best = front["interactivity_tok_s_user"].max()
                parts.append(f"{name} doesn't reach it: at most {show.number(best)} tok/s/user.")
        parts.append(self._ends())
        return " ".join(parts)

    def _at(self, system: str, target: float) -> float | None:
        """Return the most throughput per MW at a target (tok/s/user), None if out of reach."""
        front = self.fronts[system]
        ok = front[front["interactivity_tok_s_user"] >= target]
        return float(ok["throughput_tok_s_mw"].max()) if len(ok) else None

    def _robustness(self) -> str:
        """Say how the ratio to the runner-up moves with the target."""
        first, second = self.ranking[:2]
        words = []
        for factor in (0.8, 1.2):
            target = factor * self.interactivity_target_tok_s_user
            a, b = self._at(first, target), self._at(second, target)
            ratio = f"{show.number(a / b)} times" if a and b else "out of reach of one of them"
            words.append(f"at {target:g} tok/s/user {ratio}")
        return (
            f"Against {show.escape(self.labels[second])} the ratio depends on the target: "
            f"{' and '.join(words)}."
        )

    def _where(self, system: str) -> str:
        point = self.points[system]
        return f"{show.escape(point.plan.label)}, batch {point.batch:,}"

    def _ends(self) -> str:
        """Say who leads at either end of the curves."""
        full = {s: f for s, f in self.fronts.items() if len(f)}
        low = max(full, key=lambda s: full[s]["throughput_tok_s_mw"].max())
        fast = max(full, key=lambda s: full[s]["interactivity_tok_s_user"].max())
        row = _top(full[low], "throughput_tok_s_mw")
        speed = full[fast]["interactivity_tok_s_user"].max()
        return (
            f"At the throughput end of the curves {show.escape(self.labels[low])} leads with "
            f"{show.number(row['throughput_tok_s_mw'])} tok/s/MW, where a user gets "
            f"{show.number(row['interactivity_tok_s_user'])} tok/s; at the latency end "
            f"{show.escape(self.labels[fast])} is the fastest with {show.number(speed)} tok/s/user."
        )

    def show_answer(self) -> None:
        show.text(
            self.answer()
            + " These are computed, not measured, numbers; see “How far to trust this”."
        )

    # ---- frontier

    def show_frontier(self) -> None:
        fronts = {self.labels[s]: _thin(f) for s, f in self.fronts.items() if len(f)}
        chart = charts.frontier_chart(
            pd.concat([f.assign(system=name) for name, f in fronts.items()], ignore_index=True),
            width=500,
            height=280 if len(self.systems) < 4 else 245,
            power_basis=self.power_basis.replace("_", "-").replace("all-in", "all-in power"),
            systems=list(fronts),
            bands=self.mode == "calibrated",
        )
        show.figure(
            _annotated(chart.to_dict(), fronts, self.interactivity_target_tok_s_user),
            caption="Output tokens per second and megawatt against tokens per second for each "
            f"user, {self.context_tokens:,} tokens of context. Each point is the best plan and "
            "batch at its interactivity; up and to the right is better. The grey line is the "
            "target; the shade holds the middle half of measured rows of this kind, widened where none are.",
            label="fig-frontier",
        )

    def show_points(self) -> None:
        money = self.price_basis.replace("_", " ")
        rows = []
        for s in self.systems:
            name = show.escape(self.labels[s])
            if s not in self.points:
                rows.append([name, "not reached", *["–"] * 7])
                continue
            p, e = self.points[s], self.points[s].estimate
            rows.append([
                name, show.escape(p.plan.label), e.gpus, f"{p.batch:,}",
                show.number(e.interactivity_tok_s_user), show.number(e.throughput_tok_s_gpu),
                show.number(e.throughput_tok_s_mw), show.number(e.usd_per_mtok), e.bound,
            ])  # fmt: skip
        show.table(
            ["System", "Plan", "GPUs", "Batch", "tok/s/user", "tok/s/GPU", "tok/s/MW",
             "USD/Mtok", "Bound by"],
            rows,
            align="llrrrrrrl",
            caption=f"Operating points: most throughput per MW at {self._target} or more. "
            f"Batch counts sequences in the instance; output tokens; price basis: {money}.",
            label="tbl-points",
        )  # fmt: skip

    # ---- breakdown and memory

    def show_breakdown(self) -> None:
        if not self.ranking:
            show.text("No system reaches the target, so there is no step to take apart.")
            return
        for n, s in enumerate(self.ranking[:2]):
            self._breakdown(s, chart=n == 0)

    def _breakdown(self, system: str, *, chart: bool) -> None:
        e = self.points[system].estimate
        name = show.escape(self.labels[system])
        ops = sorted((o for o in e.operators if o.time_s > 0), key=lambda o: -o.time_s)
        head, tail = ops[:TOP], ops[TOP:]
        if chart:
            frame = pd.DataFrame(
                {
                    # The bound stands in the name too: colours vanish in a greyscale print.
                    "operator": [f"{o.name}, {o.layer_kind} ({o.bound})" for o in head],
                    "layer_kind": [o.layer_kind for o in head],
                    "seconds": [o.time_s for o in head],
                    "bound": [o.bound for o in head],
                }
            )
            show.figure(
                charts.breakdown_chart(frame, width=330),
                caption=f"The {len(head)} longest operators of one decode step of {name}, "
                f"{self._where(system)}; what bounds each stands in brackets.",
                label="fig-breakdown",
            )
        step = e.step_time_s
        rows = [
            [show.escape(o.name), show.escape(o.layer_kind), f"{o.count:,.0f}",
             f"{o.time_s * 1e3:.3f}", f"{100 * o.time_s / step:.1f} %", o.bound,
             f"{o.efficiency:.2f}" if o.efficiency else "–", self.sources.cite(o.efficiency_source)]
            for o in head
        ]  # fmt: skip
        if tail:
            rest = sum(o.time_s for o in tail)
            rows.append([f"{len(tail)} more", "", "", f"{rest * 1e3:.3f}",
                         f"{100 * rest / step:.1f} %", "", "", ""])  # fmt: skip
        outside = step - sum(o.time_s for o in ops)
        if abs(outside) > 1e-4 * step:
            rows.append(["Outside operators", "", "", f"{outside * 1e3:.3f}",
                         f"{100 * outside / step:.1f} %", "host", "", ""])  # fmt: skip
        rows.append(["**Step**", "", "", f"**{step * 1e3:.3f}**", "100 %", e.bound, "", ""])
        show.table(
            ["Operator", "Layers", "Count", "Time (ms)", "Share", "Bound", "Efficiency", "Source"],
            rows,
            align="llrrrlrl",
            caption=f"Decode step of {name}, {self._where(system)}: time of all layers together "
            "on one GPU. Efficiency is that of the binding resource.",
            label=f"tbl-step-{system}",
        )

    def show_memory(self) -> None:
        held = {s: self.points[s].estimate for s in self.systems if s in self.points}
        if not held:
            show.text("No system reaches the target, so there is no operating point to hold.")
            return
        by_part = {s: {m.name: m.bytes for m in e.memory} for s, e in held.items()}
        parts = list(dict.fromkeys(m.name for e in held.values() for m in e.memory))
        rows: list[list[object]] = [
            [show.escape(p), *(f"{by_part[s].get(p, 0) / 1e9:.1f}" for s in held)] for p in parts
        ]
        rows.append(["**Used**", *(f"**{e.memory_bytes / 1e9:.1f}**" for e in held.values())])
        rows.append(["Usable", *(f"{e.capacity_bytes / 1e9:.1f}" for e in held.values())])
        rows.append(["Filled", *(f"{100 * e.memory_bytes / e.capacity_bytes:.0f} %"
                                 for e in held.values())])  # fmt: skip
        show.table(
            ["Part", *(show.escape(self.labels[s]) for s in held)],
            rows,
            caption="Memory of one GPU at the operating point (GB, 1 GB = 10^9^ B).",
            label="tbl-memory",
        )

    def show_prefill(self) -> None:
        rows = []
        for s in self.ranking:
            p = self.points[s]
            name, label = show.escape(self.labels[s]), show.escape(p.plan.label)
            keywords = self._keywords | {
                "draft": None, "draft_tokens": 0, "acceptance_length": None,
            }  # fmt: skip
            try:
                e = api.estimate(
                    self.model, s, p.plan, phase="prefill", batch=p.plan.dp,
                    context_tokens=self.context_tokens, new_tokens=PREFILL_TOKENS, **keywords,
                )  # fmt: skip
            except DoesNotFit:
                rows.append([name, label, p.plan.dp, "does not fit", "–", "–", "–"])
                continue
            rows.append([name, label, p.plan.dp, show.number(e.step_time_s),
                         show.number(e.throughput_tok_s_gpu), show.number(e.throughput_tok_s_mw),
                         e.bound])  # fmt: skip
        if not rows:
            show.text("No system reaches the target, so there is no plan to prefill with.")
            return
        show.table(
            ["System", "Plan", "Prompts", "Time (s)", "tok/s/GPU", "tok/s/MW", "Bound by"],
            rows,
            align="llrrrrl",
            caption=f"Prefill of {PREFILL_TOKENS:,} uncached tokens in each prompt after "
            f"{self.context_tokens:,} cached ones, one prompt for each attention group, with the "
            "plan of the decode point. Rates count uncached input tokens; no queueing.",
            label="tbl-prefill",
        )

    # ---- assumptions, equations, trust

    def show_inputs(self) -> None:
        card = api.load_model(self.model)
        used = {p.estimate.precision: "" for p in self.points.values()} or {self.precision: ""}
        for name in used:
            runs = [self.labels[s] for s, p in self.points.items() if p.estimate.precision == name]
            where = f" ({', '.join(runs)})" if len(used) > 1 else ""
            text = card.precision[name].summary if name in card.precision else "by chip"
            used[name] = f"{name}{where}: {text}"
        speculation = "off"
        if self.draft_tokens:
            names = {p.estimate.draft or "" for p in self.points.values()}
            speculation = f"{', '.join(sorted(names))}, {self.draft_tokens} draft tokens".lstrip(
                ", "
            )
            lengths = {p.estimate.acceptance_length for p in self.points.values()}
            speculation += "".join(f", {x:g} tokens accepted a step" for x in sorted(lengths))
        show.table(
            ["Input", "Value"],
            [
                [
                    "Model",
                    f"{_sentence(show.escape(card.name))}, {show.escape(card.summary)} "
                    + " ".join(self.sources.cite(t) for t in card.sources.values()),
                ],
                ["Systems", show.escape(", ".join(self.systems))],
                ["Context in cache, each sequence", f"{self.context_tokens:,} tokens"],
                ["Precision", show.escape("; ".join(used.values()))],
                ["Mode", show.escape(MODES[self.mode])],
                ["Speculative decoding", speculation],
                ["Largest instance", f"{self.max_gpus} GPUs" if self.max_gpus else "no limit set"],
                ["Power basis", show.escape(api.POWER_BASES[self.power_basis])],
                ["Price basis", show.escape(api.PRICE_BASES[self.price_basis])],
            ],
            align="ll",
            caption="Inputs of this report.",
            label="tbl-inputs",
        )
        if card.notes:
            show.text("Of the model:\n\n" + "\n".join(f"- {show.escape(n)}" for n in card.notes))

    def show_assumptions(self) -> None:
        light = self.mode == "speed-of-light"
        # Three systems a table: more would not fit the width of a page.
        for start in range(0, len(self.systems), 3):
            chosen = self.systems[start : start + 3]
            cards = {s: api.load_system(s).quantities() for s in chosen}
            paths = [
                *_ASSUMED,
                (f"power.{self.power_basis}", "Power of a GPU, this basis"),
                (f"price.{self.price_basis}", "Price of a GPU-hour, this basis"),
            ]
            rows = [
                [what, *(self._quantity(cards[s].get(path)) for s in chosen)]
                for path, what in paths
                if not (light and path.startswith(("efficiency.", "floors.")))  # not applied
                and any(path in cards[s] for s in chosen)
            ]
            show.table(
                ["Quantity", *(show.escape(self.labels[s]) for s in chosen)],
                rows,
                align="l" * (1 + len(chosen)),
                caption="Hardware assumptions, per GPU, with the range where the card has one. "
                "V: vendor, M: measured, E: estimate; the number in brackets is the source.",
                label=f"tbl-hardware-{start // 3 + 1}",
            )

    def _quantity(self, q: Any) -> str:
        if q is None:
            return "–"
        text = re.sub(r"\bus\b", "µs", show.escape(q.text))
        found = re.match(r"[-+]?[\d.,]+(?:e[-+]?\d+)?", q.text.strip())
        if found and q.value and q.low is not None and q.high is not None and q.low < q.high:
            shown = float(found.group().replace(",", ""))
            low, high = (f"{x * shown / q.value:.4g}" for x in (q.low, q.high))
            text += f" ({low}–{high})"
        return f"{text} {_KIND[q.kind]} {self.sources.cite(q.source)}".strip()

    def show_equations(self) -> None:
        show.equations(
            [
                # 1000000 is a factor of a million, which the eye reads better as a power
                (latex.replace("1000000", "10^{6}"), _sentence(show.escape(doc)))
                for _, doc, latex in api.key_equations()
            ]
        )

    def _range(self, system: str) -> str:
        """One point with the range of 90 % of measured rows of its kind."""
        e = self.points[system].estimate
        assert e.band is not None and e.interactivity_tok_s_user is not None
        low, high = (e.interactivity_tok_s_user / r for r in (e.band.high, e.band.low))
        why = f" Extrapolated: {e.band.extrapolated}." if e.band.extrapolated else ""
        return show.escape(
            f"{self.labels[system]}: {show.number(e.interactivity_tok_s_user)} tok/s/user, and "
            f"{show.number(low)} to {show.number(high)} for 90 % of measured rows of its kind."
            f"{why}"
        )

    def show_trust(self) -> None:
        if self.mode == "speed-of-light":
            show.text(
                "This is the **speed of light**: datasheet peaks, no latency floors, no "
                "overheads. Real systems need about three times as long "
                f"{self.sources.cite(ACCURACY)}. Read the numbers as bounds, not as predictions."
            )
        else:
            show.text(
                "Efficiencies and floors come from kernel tables, the constants of the engine from "
                "serving rows of other models and chips. The ranges below are those of measured "
                "rows on which nothing was fitted (short contexts, NVIDIA chips from H100 to "
                f"GB300) {self.sources.cite(f'perfmodel, error bands: {bands.about()}')}; errors "
                "of a ratio of two systems can add or cancel."
            )
        borrowed = [
            s
            for s in self.systems
            if any("borrow" in q.source for q in api.load_system(s).quantities().values())
        ]
        notes = dict.fromkeys(n for p in self.points.values() for n in p.estimate.notes)
        skip = ("calibrated constants", "extrapolated:", "machine profile:")  # said here already
        items = [
            *(self._range(s) for s in self.ranking if self.points[s].estimate.band),
            *(
                f"{show.escape(self.labels[s])} has no published kernel measurements. Its "
                "efficiencies and floors are borrowed from another chip, so its curve is the "
                "least certain."
                for s in borrowed
            ),
            f"Ratios below {TIE:g} are ties. Where a curve falls steeply, a small error in "
            "time is a large one in throughput.",
            *(_sentence(show.escape(n)).rstrip(".") + "." for n in notes if not n.startswith(skip)),
        ]
        show.text("\n".join(f"- {i}" for i in items))

    def show_basis(self) -> None:
        watts = {s: self._quantity(api.load_system(s).quantities().get(f"power.{self.power_basis}"))
                 for s in self.systems}  # fmt: skip
        power = "; ".join(f"{show.escape(self.labels[s])} {w}" for s, w in watts.items())
        show.text(
            "- **Tokens.** Throughput counts output tokens of the decode instance only. GPUs that "
            "prefill, queueing and the share of prefill in a mixed instance are not in it; "
            "in the prefill table it counts uncached input tokens.\n"
            f"- **Power.** {_sentence(show.escape(api.POWER_BASES[self.power_basis]))}, per GPU: {power}. "
            "It is provisioned power, drawn in full at any load.\n"
            f"- **Cost.** {_sentence(show.escape(api.PRICE_BASES[self.price_basis]))}; USD for a million "
            "output tokens at full use of the instance, decode only.\n"
            "- **Load.** Steady state: the batch is always full, all sequences have the same "
            "length, experts are evenly used."
        )

    def show_sources(self) -> None:
        lines = [f"{n}. {show.escape(t)}" for n, t in enumerate(self.sources.texts, start=1)]
        show.text("\n".join(lines) if lines else "None: speed of light uses datasheet peaks only.")
