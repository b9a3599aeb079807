"""The catalogue in a notebook: inputs beside one chart at a time, the table with sources below."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable
from typing import Any

import altair as alt
import ipywidgets as w
import pandas as pd

from perfmodel import api
from perfmodel import catalogue as c
from perfmodel import catalogue_charts as draw
from perfmodel import catalogue_tables as tables
from perfmodel.errors import PerfModelError
from perfmodel.live import LiveChart

LABEL = {"description_width": "84px"}
WIDE = w.Layout(width="296px")
# Sources are long; the tooltip of Vega cuts its values after a few lines.
TOOLTIP = (
    "<style>#vg-tooltip-element table tr td.value{max-width:420px;max-height:none}"
    "#vg-tooltip-element table tr td.key{max-width:90px}"
    # a long one lies over the table: nothing may shine through
    "#vg-tooltip-element.light-theme,#vg-tooltip-element{background:#fff}"
    "#vg-tooltip-element.dark-theme{background:#202020}</style>"
)


class Catalogue(w.VBox):
    """Cards side by side: `cards` chooses them, `view` the chart; chart and table follow.

    `message` says what can't be shown. Subclasses give `frame`, `views` (name: caption and chart)
    and `make_table`.
    """

    def __init__(self, what: str, ids: list[str], inputs: list[w.Widget], views: list[str]) -> None:
        self.frame = pd.DataFrame()
        self.cards = w.SelectMultiple(
            options=ids, value=ids, rows=14, description=what, style=LABEL, layout=WIDE,
            tooltip="Ctrl or Shift for several, Ctrl+A for all",
        )  # fmt: skip
        self.view = w.ToggleButtons(
            options=views, tooltips=views, style={"button_width": "auto"},
            layout=w.Layout(width="auto"),
        )  # fmt: skip
        self.message, self.caption, self.table = w.HTML(), w.HTML(), w.HTML()
        self.message.add_class("perfmodel-message")
        self.chart = LiveChart(alt.Chart(pd.DataFrame({"x": []})).mark_point())
        self.chart.add_class("perfmodel-catalogue-chart")
        self._inputs = [self.cards, self.view, *inputs]
        self._update()
        for box in self._inputs:
            box.observe(self._update, "value")
        hint = w.HTML("<small>Ctrl or Shift for several, Ctrl+A for all</small>")
        side = w.VBox([self.cards, hint, *inputs], layout=w.Layout(width="304px", flex="0 0 auto"))
        main = w.VBox([self.view, self.message, self.caption, self.chart])
        main.layout = w.Layout(flex="1 1 600px", min_width="0", overflow="visible")
        wrap = w.Layout(flex_flow="row wrap", align_items="flex-start", grid_gap="6px 8px")
        super().__init__([w.HBox([side, main], layout=wrap), self.table, w.HTML(TOOLTIP)])
        self.add_class("perfmodel-catalogue")

    def views(self) -> dict[str, tuple[str, Callable[[], Any]]]:
        raise NotImplementedError

    def make_frame(self, ids: list[str]) -> tuple[pd.DataFrame, list[str]]:
        """Return the frame and what there is to say about cards that it lacks."""
        raise NotImplementedError

    def make_table(self) -> str:
        raise NotImplementedError

    def _update(self, _: Any = None) -> None:
        self.frame, notes = self.make_frame(list(self.cards.value))
        if not self.cards.value:
            notes = ["No card chosen: choose at least one."]
        lines = "<br>".join(map(html.escape, notes))
        mark = "border-left:4px solid #D55E00;padding:4px 10px;line-height:1.4"
        self.message.value = f"<div role='alert' style='{mark}'>{lines}</div>" if notes else ""
        shown = "" if len(self.frame) else "none"
        self.chart.layout.display = self.caption.layout.display = self.table.layout.display = shown
        if self.frame.empty:
            return
        text, make = self.views()[self.view.value]
        self.caption.value = (
            f"<div style='line-height:1.4;max-width:680px'>{html.escape(text)}</div>"
        )
        self.chart.update({}, chart=make())
        self.table.value = self.make_table()


def readable(ids: Iterable[str], load: Callable[[str], Any]) -> tuple[list[str], list[str]]:
    """Split ids into those whose card can be read and what is wrong with the others."""
    good, notes = [], []
    for name in ids:
        try:
            load(name)
            good.append(name)
        except PerfModelError as error:
            notes.append(str(error))
    return good, notes


class MachineCatalogue(Catalogue):
    """Machines side by side. Inputs: cards, precision, power and price (named sets), view."""

    def __init__(self, systems: list[str] | None = None) -> None:
        ids = api.list_systems()
        good, _ = readable(ids, api.load_system)
        peaks = c.pick(c.machine_frame(good), "peak").dropna(subset=["value"])
        rates = [str(x) for x in peaks["part"].drop_duplicates()]
        self.precision = _choice(
            "Precision", {r.upper(): r for r in rates}, "fp8" if "fp8" in rates else rates[0]
        )
        self.power = _choice("Power set", {t: k for k, t in api.POWER_BASES.items()}, "all_in")
        self.price = _choice("Price set", {t: k for k, t in c.PRICES.items()}, "owned")
        views = ["Ridge points", "Bytes per FLOP", "Memory", "Power", "Price"]
        super().__init__("Machines", ids, [self.precision, self.power, self.price], views)
        if systems is not None:
            self.cards.value = systems

    def make_frame(self, ids: list[str]) -> tuple[pd.DataFrame, list[str]]:
        good, notes = readable(ids, api.load_system)
        return c.machine_frame(good, self.power.value, self.price.value), notes

    def make_table(self) -> str:
        return tables.machine_table(
            self.frame, self.precision.value, self.power.value, self.price.value
        )

    def views(self) -> dict[str, tuple[str, Callable[[], Any]]]:
        rate, power, price = self.precision.value, self.power.value, self.price.value
        return {
            "Ridge points": (
                "Peak over HBM bandwidth. A kernel that does less work for each byte it reads than"
                " this waits for memory, one that does more for arithmetic. Wide bars: sources"
                " disagree.",
                lambda: draw.ridge_chart(self.frame),
            ),
            "Bytes per FLOP": (
                "The other way round: what memory and links (one direction) move while the chip"
                " does a thousand FLOP of the chosen precision. The gap from HBM to a link says how"
                " much less an exchange between GPUs may carry.",
                lambda: draw.bytes_per_flop_chart(self.frame, rate),
            ),
            "Memory": (
                "What one GPU holds, and what all GPUs of a scale-up domain hold together: a model"
                " that fits a domain need not cross the slower network.",
                lambda: draw.memory_size_chart(self.frame),
            ),
            "Power": (
                f"Power set: {api.POWER_BASES[power]}. A machine without this number, or without"
                " this precision, says so.",
                lambda: draw.power_chart(self.frame, rate, power),
            ),
            "Price": (
                f"Price set: {c.PRICES[price]}. A machine without this number, or without this"
                " precision, says so.",
                lambda: draw.price_chart(self.frame, rate, price),
            ),
        }


class ModelCatalogue(Catalogue):
    """Models side by side. Inputs: cards, precision, context (tokens), view."""

    def __init__(self, models: list[str] | None = None) -> None:
        ids = api.list_models()
        good, _ = readable(ids, api.load_model)
        names = dict.fromkeys(["native", *sorted({p for m in good for p in api.precisions(m)})])
        self.precision = _choice("Precision", {n: n for n in names}, "native")
        self.context = w.SelectionSlider(
            options=[(c.kilo(t), t) for t in c.CONTEXTS], value=1 << 16, description="Context",
            style=LABEL, layout=WIDE, continuous_update=False,
        )  # fmt: skip
        self._kept: dict[str, pd.DataFrame] = {}
        views = ["Parameters", "Weights", "Weights (GB)", "KV per token", "Cache moved", "FLOPs"]
        super().__init__("Models", ids, [self.precision, self.context], views)
        if models is not None:
            self.cards.value = models

    def make_frame(self, ids: list[str]) -> tuple[pd.DataFrame, list[str]]:
        precision = self.precision.value
        good, notes = readable(ids, api.load_model)
        if precision not in self._kept:  # all models at once, kept: choosing is then quick
            every, _ = readable(self.cards.options, api.load_model)
            self._kept[precision] = c.model_frame(every, precision)
        frame = self._kept[precision]
        frame = frame[frame["id"].isin(good)]
        found = set(frame["id"])
        if lacking := [name for name in good if name not in found]:
            notes.append(f"No precision {precision} on the card of {', '.join(lacking)}.")
        return frame, notes

    def make_table(self) -> str:
        return tables.model_table(self.frame, self.context.value, self.precision.value)

    def views(self) -> dict[str, tuple[str, Callable[[], Any]]]:
        context = self.context.value
        shares = (
            "What the checkpoint is made of. In a mixture of experts nearly all bytes are routed"
            " experts, of which a token reads a few."
        )
        return {
            "Parameters": (
                "All parameters, which must be held, and those that one token uses, which must be"
                " computed; counted from the shapes.",
                lambda: draw.parameters_chart(self.frame),
            ),
            "Weights": (shares, lambda: draw.weights_chart(self.frame)),
            "Weights (GB)": (shares, lambda: draw.weights_chart(self.frame, share=False)),
            "KV per token": (
                "Resident bytes that grow with the context, divided by it. Windows fill up and"
                " count ever less; recurrent states do not grow and are in the table.",
                lambda: draw.kv_chart(self.frame),
            ),
            "Cache moved": (
                "What decoding one token reads of its sequence's cache; recurrent states are read"
                " and written. Sparse attention reads its index keys and what it picks.",
                lambda: draw.read_chart(self.frame),
            ),
            "FLOPs": (
                "Work for one decoded token. Weights cost the same at every context; the cache costs"
                " more the longer it is.",
                lambda: draw.flops_chart(self.frame, context),
            ),
        }


def _choice(what: str, options: dict[str, str], value: str) -> w.Dropdown:
    return w.Dropdown(options=options, value=value, description=what, style=LABEL, layout=WIDE)
