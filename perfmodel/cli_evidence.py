"""The commands that hold the model against measurements: `validate` and `predict`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perfmodel.errors import InputError
from perfmodel.text import table

MODES = ("calibrated", "speed-of-light")


def add(command: Any) -> None:
    """Add both commands; `command(name, function, text)` makes a subparser."""
    sub = command("validate", _validate, "Compare the model with measurements.")
    sub.add_argument(
        "--evidence", type=Path, metavar="DIR",
        help="folder of measurements (default: $PERFMODEL_EVIDENCE)",
    )  # fmt: skip
    sub.add_argument(
        "--sample", type=Path, metavar="CSV",
        help="silicon_sample.csv (default: of the installed aiconfigurator-core)",
    )  # fmt: skip
    sub.add_argument("--csv", type=Path, metavar="DIR", help="save every table as CSV there")
    sub.add_argument("--pdf", type=Path, metavar="FILE", help="write the validation report")
    sub.add_argument("--all", action="store_true", help="print every table, not only the main ones")
    sub.add_argument("--write-bands", action="store_true", help="write the error bands anew")

    sub = command("predict", _predict, "Predict TTFT and TPOT of benchmark rows.")
    sub.add_argument("rows", type=Path, metavar="ROWS.csv", help="rows (docs/cli.md lists columns)")
    sub.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.csv")
    sub.add_argument("--mode", choices=MODES, default="calibrated", help="default: calibrated")


def _predict(args: argparse.Namespace) -> Iterator[str]:
    from perfmodel.cli import _json
    from perfmodel.predict import predict_file

    out = predict_file(args.rows, args.output, args.mode)
    refused = out.loc[out["reason"] != "", "reason"]
    counts = refused.str[:160].value_counts()
    if args.json:
        yield _json(
            {
                "file": str(args.output),
                "rows": len(out),
                "predicted": len(out) - len(refused),
                "refused": [{"reason": r, "rows": int(n)} for r, n in counts.items()],
            }
        )
        return
    yield f"wrote {args.output}: {len(out)} rows, {len(out) - len(refused)} predicted"
    for reason, n in counts.items():
        yield f"  {n} refused: {reason}"


MAIN = ("serving variants", "phases", "speculation")


def _validate(args: argparse.Namespace) -> Iterator[str]:
    from perfmodel.cli import _json
    from perfmodel.validation import run

    if args.pdf is not None and args.pdf.suffix.lower() != ".pdf":
        raise InputError(f"--pdf: {str(args.pdf)!r} does not end in .pdf")
    evidence = run.find_evidence(args.evidence)
    if args.sample is not None and not args.sample.is_file():
        raise InputError(f"--sample: there is no file {str(args.sample)!r}")
    result = run.validate(evidence, args.sample)
    if args.write_bands:
        run.write_bands(result)
    if args.csv is not None:
        run.save(result, args.csv)
    if args.pdf is not None:
        from perfmodel import report

        params = {
            "evidence": str(evidence.resolve()) if evidence else "",
            "sample": str(args.sample.resolve()) if args.sample else "",
        }
        report.render("validation", params, args.pdf, fmt="pdf", progress=not args.json)
    if args.json:
        tables = {k: t.to_dict("records") for k, t in result.tables.items()}
        yield _json({"tables": tables, "notes": result.notes})
        return
    yield "MdAPE: median absolute error; P90: its 90th percentile; bias: median error; all in %.\n"
    for name, t in _shown(result, args.all):
        yield f"{name}\n"
        yield table(tuple(t.columns), [_cells(r) for r in t.itertuples(index=False)], _align(t))
        yield ""
    if result.notes:
        yield "Notes"
        yield from (f"  {line}" for note in result.notes for line in note.splitlines())
    if args.csv is not None:
        yield f"\nwrote {len(result.tables)} tables to {args.csv}"
    if args.pdf is not None:
        yield f"wrote {args.pdf}"


def _shown(result: Any, every: bool) -> Iterator[tuple[str, Any]]:
    for name, t in result.tables.items():
        if name == "serving" and not every:
            new = "acceptance" if (t["set"] == "acceptance").any() else t["set"].iloc[0]
            part = t[(t["set"] == new) & (t["by"] != "all") & (t["metric"] != "throughput")]
            yield f"serving, {new} rows", part.drop(columns="set")
        elif every or name in MAIN or name == "kernels":
            yield name, t


def _cells(row: Any) -> tuple[str, ...]:
    return tuple(
        ("-" if math.isnan(x) else f"{x:.1f}") if isinstance(x, float) else str(x) for x in row
    )


def _align(t: Any) -> str:
    return "".join("l" if t[c].dtype.kind in "OUT" or c in ("by",) else "r" for c in t.columns)
