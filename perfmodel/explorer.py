"""The interactive explorer: inputs beside the curve, the selected point's breakdown below."""

from __future__ import annotations

import html
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import altair as alt
import ipywidgets as w
import numpy as np

from perfmodel import api, charts
from perfmodel.errors import PerfModelError
from perfmodel.live import LiveChart
from perfmodel.plan import Plan

MODEL = "deepseek-v4-pro"  # shown first
POINTS = 80  # batches tried on each curve
BATCHES = [2**i for i in range(18)]
MODES = {
    "Calibrated": "calibrated",
    "Speed of light": "speed-of-light",
}
FRONTIER = [
    "system", "plan", "batch", "interactivity_tok_s_user", "throughput_tok_s_mw",
    "throughput_tok_s_mw_low", "throughput_tok_s_mw_high", "bound",
]  # fmt: skip
SYSTEMS = ("h200-nvl8", "gb300-nvl72", "vr-nvl72", "vr-nvl72-conservative")  # shown at first
LABEL = {"description_width": "104px"}
WIDE = w.Layout(width="296px")
OWN_DRAFT = "the checkpoint's own"
TICK = w.Layout(width="270px", height="24px", margin="0 0 0 26px")


class Explorer(w.VBox):
    """Throughput per megawatt against interactivity, for a model on several systems.

    Every input is a widget attribute: model, systems (one check box each), plan ("best" or a plan
    such as "tp=8,dp=9"), batches (range, sequences in an instance), context (tokens), precision,
    mode, power, draft (tokens), acceptance (tokens a step; 0: the model card's), point_system and
    point_batch (the point explained below the curve), log_axes.  `rows` is what is drawn.
    """

    def __init__(self, model: str | None = None, systems: list[str] | None = None) -> None:
        self._quiet = False
        self._plan_hint: tuple[str, str, float] | None = None
        self.rows: dict[str, np.ndarray] = {}
        self._style_key: tuple[Any, ...] = ()
        self._make_inputs(model, systems)
        self._make_outputs()
        self._fill_model_choices()
        self._update()
        for box in self._inputs():
            box.observe(self._changed, "value")
        for box in (self.point_system, self.point_batch):
            box.observe(self._point_moved, "value")
        self.chart.observe(self._clicked, "selected")
        boxes = w.VBox(list(self.systems.values()))
        boxes.layout = w.Layout(max_height="124px", overflow="auto", flex="0 0 auto")
        rest = [x for x in self._inputs()[1:] if x not in self.systems.values()]
        side = w.VBox([self.model, boxes, *rest, self.point_system, self.point_batch])
        side.layout = w.Layout(width="304px", flex="0 0 auto")
        main = w.VBox([self.message, self.note, self.chart, self.point])
        main.layout = w.Layout(width="524px", flex="0 0 auto", overflow="visible")
        detail = w.HBox([self.breakdown, self.memory], layout=_wrap())
        # A wide page has the inputs beside the curve; a narrow one has them above it.
        super().__init__([w.HBox([side, main], layout=_wrap()), detail])
        self.add_class("perfmodel-explorer")

    def _make_inputs(self, model: str | None, systems: list[str] | None) -> None:
        models, known = api.list_models(), api.list_systems()
        # those shown at first come first: the chart gives each place its colour and dash
        known = [s for s in SYSTEMS if s in known] + [s for s in known if s not in SYSTEMS]
        chosen = list(SYSTEMS) if systems is None else [api.load_system(s).id for s in systems]
        known = sorted(known, key=lambda s: s not in chosen)
        self.model = w.Dropdown(
            options=models,
            value=model or self._first(models),
            description="Model",
            style=LABEL,
            layout=WIDE,
        )
        self.systems = {
            s: w.Checkbox(
                value=s in chosen, description=s, indent=False, layout=TICK,
                tooltip=api.load_system(s).name,
            )
            for s in known
        }  # fmt: skip
        self.plan = w.Text(
            value="best", description="Plan", continuous_update=False, style=LABEL, layout=WIDE,
            tooltip='"best" searches every plan; or write one such as tp=8,dp=9',
            placeholder="best, or tp=8,dp=9",
        )  # fmt: skip
        self.batches = w.SelectionRangeSlider(
            options=[(f"{b:,}", b) for b in BATCHES], index=(0, 15), description="Batch range",
            style=LABEL, layout=WIDE, tooltip="Sequences in one instance",
        )  # fmt: skip
        self.context = w.FloatLogSlider(
            value=2.0**16, base=2, min=10, max=20, step=0.25, readout_format=",.0f",
            description="Context tokens", style=LABEL, layout=WIDE,
            tooltip="Tokens each sequence has in its cache",
        )  # fmt: skip
        self.precision = w.Dropdown(
            options=["auto"], description="Precision", style=LABEL, layout=WIDE
        )
        self.mode = w.Dropdown(options=MODES, description="Mode", style=LABEL, layout=WIDE)
        self.power = w.Dropdown(
            options={text: key for key, text in api.POWER_BASES.items()}, value="all_in",
            description="Power basis", style=LABEL, layout=WIDE,
        )  # fmt: skip
        self.draft_name = w.Dropdown(
            options=[(OWN_DRAFT, None)], description="Draft", style=LABEL, layout=WIDE
        )
        self.draft = w.BoundedIntText(
            value=0, min=0, max=32, description="Draft tokens", style=LABEL, layout=WIDE
        )
        self.acceptance = w.BoundedFloatText(
            value=0, min=0, max=33, step=0.1, description="Acceptance", style=LABEL,
            layout=WIDE, tooltip="Acceptance length with the bonus token; 0: the model card's",
        )  # fmt: skip
        self.log_axes = w.Checkbox(
            value=False, description="Logarithmic axes", style=LABEL, layout=WIDE
        )
        self.point_system = w.Dropdown(
            options=[""], description="Point: system", style=LABEL, layout=WIDE
        )
        self.point_batch = w.FloatLogSlider(
            value=64, base=2, min=0, max=17, step=0.125, readout_format=",.0f",
            description="Point: batch", style=LABEL, layout=WIDE,
            tooltip="The point nearest to this batch is explained below; or click a point",
        )  # fmt: skip

    @staticmethod
    def _first(models: list[str]) -> str:
        return MODEL if MODEL in models else models[0]

    def _inputs(self) -> list[w.Widget]:
        return [
            self.model, *self.systems.values(), self.plan, self.batches, self.context,
            self.precision, self.mode, self.power, self.draft_name, self.draft, self.acceptance, self.log_axes,
        ]  # fmt: skip

    def _make_outputs(self) -> None:
        self.message, self.note, self.point = w.HTML(), w.HTML(), w.HTML()
        self.message.add_class("perfmodel-message")
        self.chart = LiveChart(self._frontier(), watch=["pick"])
        self.breakdown = LiveChart(
            charts.breakdown_chart(alt.NamedData(name="operators"), width=300)
        )
        self.memory = LiveChart(charts.memory_chart(alt.NamedData(name="parts"), width=200))
        for name in ("chart", "breakdown", "memory"):
            getattr(self, name).add_class(f"perfmodel-{name}")

    def _frontier(self) -> Any:
        log = bool(self.log_axes.value)
        basis = api.POWER_BASES[self.power.value].split(" (")[0]
        if self.mode.value != "calibrated":
            basis += ", speed of light"
        return charts.frontier_chart(
            alt.NamedData(name="rows"), width=430, height=330, power_basis=basis,
            log_x=log, log_y=log, systems=list(self.systems), interactive=True,
            bands=self.mode.value == "calibrated", shown=self._chosen(),
        )  # fmt: skip

    def _fill_model_choices(self) -> None:
        """Offer what the chosen model has: its precisions and its context length."""
        card = api.load_model(self.model.value)
        keep = self.precision.value
        self.precision.options = ["auto", *api.precisions(card)]
        if keep in self.precision.options:
            self.precision.value = keep
        drafts = api.drafts(card)
        chosen = self.draft_name.value
        self.draft_name.options = [(OWN_DRAFT, None), *((d, d) for d in drafts)]
        self.draft_name.value = chosen if chosen in drafts else None
        self.context.max = float(np.log2(card.shape.context_tokens))

    @contextmanager
    def _silent(self) -> Iterator[None]:
        """Change widgets from inside, without an update for each."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def _changed(self, change: dict[str, Any]) -> None:
        if self._quiet:
            return
        if change["owner"] is self.model:
            with self._silent():
                self._fill_model_choices()
        self._update()

    def _point_moved(self, _: dict[str, Any]) -> None:
        if not self._quiet:
            self._plan_hint = None
            self._draw()
            self._show_point()

    def _clicked(self, change: dict[str, Any]) -> None:
        pick = change["new"].get("pick") or {}
        try:
            system, plan, batch = (pick[k][0] for k in ("system", "plan", "batch"))
            batch = float(batch)
        except (KeyError, IndexError, TypeError, ValueError):
            return  # a click that selected nothing
        if system not in self.point_system.options:
            return
        with self._silent():
            self.point_system.value = system
            self.point_batch.value = batch
        self._plan_hint = (system, str(plan), batch)
        self._draw()
        self._show_point()

    def _keywords(self) -> dict[str, Any]:
        return {
            "precision": self.precision.value,
            "mode": self.mode.value,
            "draft": self.draft_name.value if self.draft.value else None,
            "draft_tokens": self.draft.value,
            "acceptance_length": self.acceptance.value or None,
            "power_basis": self.power.value,
        }

    def _context_tokens(self) -> int:
        limit = api.load_model(self.model.value).shape.context_tokens
        return min(int(round(self.context.value)), limit)

    def _curve(self, system: str) -> dict[str, np.ndarray]:
        """Return the points of one system. Raises PerfModelError saying why there are none."""
        low, high = self.batches.value
        batch = np.unique(np.geomspace(low, high, POINTS).round())
        common: dict[str, Any] = {"context_tokens": self._context_tokens(), **self._keywords()}
        api.check_power(system, self.power.value)
        text = self.plan.value.strip()
        if text.lower() in ("", "best"):
            return api.best(self.model.value, system, batch=batch, **common)
        plan = Plan.parse(text)
        columns = api.sweep(self.model.value, system, plan, batch=batch, **common)
        fits = columns["fits"]
        if not fits.any():  # the refusal of the smallest batch shows the arithmetic
            api.estimate(self.model.value, system, plan, batch=int(batch[0]), **common)
        rows = {k: v[fits] for k, v in columns.items()}
        rows["plan"] = np.full(int(fits.sum()), plan.label)
        rows["gpus"] = np.full(int(fits.sum()), plan.gpus)
        return rows | api.curve_band(self.model.value, system, rows, self.mode.value)

    def _update(self) -> None:
        parts, problems = [], []
        for system in self._chosen():
            try:
                rows = self._curve(system)
            except PerfModelError as error:
                problems.append((system, str(error)))
                continue
            rows["system"] = np.full(len(rows["batch"]), system)
            parts.append({k: rows[k] for k in FRONTIER})
        self._say(problems)
        self.rows = {k: np.concatenate([p[k] for p in parts]) for k in FRONTIER} if parts else {}
        drawn = [str(p["system"][0]) for p in parts if len(p["system"])]
        with self._silent():
            keep = self.point_system.value
            if list(self.point_system.options) != (drawn or [""]):  # else nothing is sent
                self.point_system.options = drawn or [""]
                if keep in drawn:
                    self.point_system.value = keep
        self._draw()
        self._show_point()

    def _chosen(self) -> list[str]:
        return [s for s, box in self.systems.items() if box.value]

    def _say(self, problems: list[tuple[str, str]]) -> None:
        """Put errors where the reader looks, each kind once, with the systems it is about."""
        by_text: dict[str, list[str]] = {}
        for system, text in problems:
            by_text.setdefault(text, []).append(system)
        blocks = [
            f"<b>No curve for {html.escape(', '.join(names))}</b>"
            f"<div style='white-space:pre-wrap;overflow-x:auto;font-size:12px;line-height:1.35'>"
            f"{html.escape(text)}</div>"
            for text, names in by_text.items()
        ]
        if not self._chosen():
            blocks = ["<b>No system chosen.</b> Tick at least one to see its curve."]
        self.message.value = (
            "<div role='alert' style='border-left:4px solid #D55E00;padding:4px 10px;"
            f"max-width:500px;line-height:1.4'>{'<br>'.join(blocks)}</div>"
            if blocks
            else ""
        )
        self.note.value = (
            "<div style='line-height:1.4;max-width:500px'><b>Speed of light:</b> peak rates, no efficiencies, "
            "no latencies: an upper bound, not a prediction.</div>"
            if self.mode.value != "calibrated"
            else ""
        )

    def _picked(self) -> int | None:
        """Return the index in `rows` of the point to explain."""
        if not self.rows:
            return None
        here = np.flatnonzero(self.rows["system"] == self.point_system.value)
        if not here.size:
            return None
        if self._plan_hint and self._plan_hint[0] == self.point_system.value:
            _, plan, batch = self._plan_hint
            same = (self.rows["plan"][here] == plan) & (self.rows["batch"][here] == batch)
            if same.any():
                return int(here[np.flatnonzero(same)[0]])
        distance = np.abs(np.log(self.rows["batch"][here] / self.point_batch.value))
        return int(here[distance.argmin()])

    def _draw(self) -> None:
        """Send the rows to the curve; redraw it only when its axes changed."""
        if not self.rows:
            self.chart.layout.display = "none"  # an empty logarithmic axis has no extent
            return
        self.chart.layout.display = ""
        picked = self._picked()
        ring = {k: v[[picked]] for k, v in self.rows.items()} if picked is not None else {}
        key = (self.power.value, self.mode.value, self.log_axes.value)
        restyled = self._frontier() if key != self._style_key else None
        self._style_key = key
        self.chart.update(
            {"rows": self.rows, "picked": ring},
            chart=restyled,
            shown_systems=list(self.point_system.options),
        )

    def _show_point(self) -> None:
        picked = self._picked()
        shown = "none" if picked is None else ""
        for chart in (self.breakdown, self.memory):
            chart.layout.display = shown
        if picked is None:
            self.point.value = ""
            return
        row = {k: v[picked] for k, v in self.rows.items()}
        try:
            e = api.estimate(
                self.model.value, str(row["system"]), Plan.parse(str(row["plan"])),
                batch=int(row["batch"]), context_tokens=self._context_tokens(),
                **self._keywords(),
            )  # fmt: skip
        except PerfModelError as error:
            self.point.value = f"<b>Point:</b> {html.escape(str(error))}"
            return
        self.point.value = _point_text(e)
        self.breakdown.update({"operators": _operators(e)})
        self.memory.update({"parts": _parts(e)})


def _wrap() -> w.Layout:
    return w.Layout(flex_flow="row wrap", align_items="flex-start", grid_gap="6px 8px")


def _operators(e: api.Estimate) -> dict[str, list[Any]]:
    return {
        "operator": [o.name for o in e.operators],
        "layer_kind": [o.layer_kind for o in e.operators],
        "seconds": [o.time_s for o in e.operators],
        "bound": [o.bound for o in e.operators],
    }


def _parts(e: api.Estimate) -> dict[str, list[Any]]:
    return {
        "name": [m.name for m in e.memory],
        "bytes": [m.bytes for m in e.memory],
        "capacity_bytes": [e.capacity_bytes] * len(e.memory),
    }


def _point_text(e: api.Estimate) -> str:
    speed = e.interactivity_tok_s_user or float("nan")
    cost = "" if e.usd_per_mtok is None else f", {e.usd_per_mtok:,.3g} USD per million tokens"
    notes = "".join(f"<br>{html.escape(n)}" for n in e.notes)
    return (
        f"<div style='line-height:1.45;max-width:500px'><b>{html.escape(e.system_id)}</b>, "
        f"{html.escape(e.plan.label)} ({e.gpus} GPUs), batch {e.batch:,}, "
        f"context {e.context_tokens:,}: step {e.step_time_s * 1e3:,.2f} ms, "
        f"{speed:,.1f} tok/s/user, {e.throughput_tok_s_mw or float('nan'):,.0f} tok/s/MW{cost}; "
        f"bound by {e.bound}.<span style='opacity:.75;font-size:12px'>{notes}</span></div>"
    )
