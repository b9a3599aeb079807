"""The validation report: what `reports/validation.ipynb` shows, part by part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from perfmodel import charts, show
from perfmodel.errors import InputError
from perfmodel.validation import run, silicon

TARGETS = (  # what, table, selection, column, target in %
    ("TPOT, aggregated, MdAPE", ("TPOT", "agg"), "MdAPE", 9.0),
    ("TPOT, aggregated, P90", ("TPOT", "agg"), "P90", 28.0),
    ("TPOT, disaggregated, MdAPE", ("TPOT", "disagg"), "MdAPE", 13.0),
    ("TTFT, aggregated, MdAPE", ("TTFT", "agg"), "MdAPE", 27.0),
)
MODES = {"agg": "aggregated", "disagg": "disaggregated"}


def check(params: Mapping[str, Any]) -> None:
    """Raise InputError when a named folder or file is not there, or there is nothing to score."""
    folder = run.find_evidence(params["evidence"] or None)
    sample = params["sample"]
    if sample and not Path(sample).is_file():
        raise InputError(f"sample: there is no file {sample!r}")
    if folder is None and not sample and silicon.find_sample() is None:
        raise InputError(
            "evidence: none found; name a folder, or install perfmodel[evidence] "
            "(aiconfigurator-core)"
        )


class Study:
    """All rings, run once; each method shows one part of the report."""

    def __init__(self, evidence: str = "", sample: str = "") -> None:
        check({"evidence": evidence, "sample": sample})
        self.folder = run.find_evidence(evidence or None)
        self.sample = Path(sample) if sample else None

    @cached_property
    def result(self) -> run.Result:
        return run.validate(self.folder, self.sample)

    @cached_property
    def main_set(self) -> str:
        """The set that scores the model: acceptance rows where there are some."""
        sets = set(self.result.scored["set"])
        return "acceptance" if "acceptance" in sets else sorted(sets)[0]

    def show_answer(self) -> None:
        t = self.result.tables.get("serving variants")
        if t is None:
            show.text("There are no serving rows here, so the model is not scored as a whole.")
            return
        t = t[(t["set"] == self.main_set) & (t["variant"] == "calibrated")]
        found = {(r["metric"], r["mode"]): r for r in t.to_dict("records")}
        rows = []
        for text, key, column, target in TARGETS:
            if key in found:
                got = float(found[key][column])
                rows.append((text, got, target, "yes" if got <= target else "no"))
        n = int(t["n"].max()) if len(t) else 0
        show.text(
            f"Scored on **{len(self.result.scored[self.result.scored['set'] == self.main_set]):,} "
            f"{self.main_set} rows** (up to {n:,} a line). Errors in %, predicted over measured."
        )
        show.table(("Figure", "reached", "target", "met"), rows, align="lrrl",
                   caption="Targets and what was reached (%)", label="tbl-targets")  # fmt: skip

    def show_variants(self) -> None:
        t = self.result.tables["serving variants"]
        self._table(
            t[t["metric"] != "throughput"].assign(mode=t["mode"].map(MODES)),
            ("variant", "metric", "set", "mode"),
            "What the constants are worth: all as shipped, none from serving rows, and data sheets "
            "alone",
            "tbl-variants",
        )

    def show_groups(self, by: str, label: str) -> None:
        t = self.result.tables["serving"]
        t = t[(t["set"] == self.main_set) & (t["by"] == by) & (t["metric"] == "TPOT")]
        self._table(
            t.assign(mode=t["mode"].map(MODES)), ("value", "mode"),
            f"TPOT errors by {label}, {self.main_set} rows", f"tbl-{by}", head=(label, "mode"),
        )  # fmt: skip

    def show_scatter(self) -> None:
        d = self.result.scored
        d = d[(d["set"] == self.main_set) & (d["reason"] == "")]
        parts = [
            pd.DataFrame(
                {
                    "metric": name,
                    "measured": d[f"{column}_s_measured"] * 1e3,
                    "predicted": d[column] * 1e3,
                    "mode": d["mode"].map(MODES),
                }
            )
            for name, column in (("TPOT (ms)", "tpot"), ("TTFT (ms)", "ttft"))
        ]
        show.figure(
            scatter_chart(pd.concat(parts, ignore_index=True)),
            caption="Predicted against measured, each point one row; the line is equality.",
            label="fig-scatter",
        )

    def show_kernels(self) -> None:
        t = self.result.tables.get("kernels")
        if t is None:
            show.text("There are no kernel tables here.")
            return
        chips = sorted(t["chip"].unique())
        errors = {(r["op"], r["chip"]): float(r["MdAPE"]) for r in t.to_dict("records")}
        n = t.groupby("op")["n"].sum().to_dict()
        show.table(
            ("Kernel", "rows", *(charts_name(c) for c in chips)),
            [(str(op).replace("_", " "), int(n[op]), *(errors.get((op, c)) for c in chips))
             for op in n],
            caption="Kernel ring: median absolute error of each table by chip (%)",
            label="tbl-kernels",
        )  # fmt: skip

    def show_phases(self) -> None:
        for name, text in (
            ("phases", "Phase ring: published prefill and decode rates"),
            ("speculation", "Speculation: rows with drafts and their twins without"),
            ("medians", "Published medians against predicted means"),
        ):
            if name in self.result.tables:
                self._table(self.result.tables[name], ("what",), text, f"tbl-{name}")

    def show_notes(self) -> None:
        lines = [x for note in self.result.notes for x in note.splitlines() if x.strip()]
        show.text(
            "\n".join(f"- {show.escape(x.strip())}" for x in lines) or "Nothing was left out."
        )

    def _table(
        self, t: pd.DataFrame, keys: Sequence[str], caption: str, label: str,
        head: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        rows: Iterable[tuple[object, ...]] = (
            (*(show.escape(r[k]) for k in keys), int(r["n"]), r["MdAPE"], r["P90"], r["bias"])
            for r in t.to_dict("records")
        )
        show.table(
            (*(head or keys), "n", "MdAPE", "P90", "bias"), rows, caption=f"{caption} (%)",
            label=label, align="l" * len(keys) + "rrrr",
        )  # fmt: skip


def charts_name(chip: str) -> str:
    return chip.split("-")[0].upper()


def scatter_chart(data: pd.DataFrame) -> alt.HConcatChart:
    """Two log-log panels (column `metric`): predicted against measured, by serving mode."""
    panels = []
    for name, part in data.groupby("metric", sort=False):
        low = float(np.nanmin(part[["measured", "predicted"]].to_numpy())) * 0.8
        high = float(np.nanmax(part[["measured", "predicted"]].to_numpy())) * 1.25
        scale = alt.Scale(type="log", domain=[low, high], nice=False)
        axis = alt.Axis(format="~s", tickCount=4)
        line = alt.Chart(pd.DataFrame({"x": [low, high], "y": [low, high]})).mark_line(
            color="#777", strokeWidth=1
        )
        dots = (
            alt.Chart(part)
            .mark_point(size=14, filled=True, opacity=0.45, clip=True)
            .encode(
                x=alt.X("measured:Q", title=f"Measured {name}", scale=scale, axis=axis),
                y=alt.Y("predicted:Q", title=f"Predicted {name}", scale=scale, axis=axis),
                color=alt.Color(
                    "mode:N",
                    scale=alt.Scale(domain=list(MODES.values()), range=["#0072B2", "#D55E00"]),
                    legend=alt.Legend(title=None, orient="top"),
                ),
                shape=alt.Shape(
                    "mode:N",
                    scale=alt.Scale(domain=list(MODES.values()), range=["circle", "triangle-up"]),
                    legend=None,
                ),
            )  # fmt: skip
        )
        panels.append(
            alt.layer(line.encode(x=alt.X("x:Q", scale=scale), y=alt.Y("y:Q", scale=scale)), dots)
            .properties(width=205, height=205)
        )  # fmt: skip
    chart = alt.hconcat(*panels)
    return charts.finish(
        chart, "Two scatter plots on logarithmic axes: predicted against measured TPOT and TTFT."
    )
