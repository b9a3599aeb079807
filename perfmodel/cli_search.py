"""The commands that search: `frontier` and `plan`."""

from __future__ import annotations

import argparse
import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perfmodel.errors import InputError
from perfmodel.text import fields, si, table


def add(command: Any) -> None:
    """Add the commands; `command(name, function, text)` makes a subparser."""
    from perfmodel.cli import positive

    sub = command("frontier", _frontier, "Search the Pareto front of serving a workload.")
    _add_search(sub)
    sub.add_argument("--x", default="interactivity", metavar="METRIC", help="(interactivity)")
    sub.add_argument("--y", default="total_mw", metavar="METRIC", help="(total_mw)")
    sub.add_argument("--top", type=positive, default=20, metavar="N", help="rows printed (20)")
    sub.add_argument("-o", "--output", type=Path, metavar="CSV", help="write every point")

    sub = command("plan", _plan, "Find the cheapest deployment for a load within limits.")
    _add_search(sub)
    sub.add_argument("--sessions", type=positive, required=True, metavar="N", help="live sessions")


def _add_search(sub: argparse.ArgumentParser) -> None:
    from perfmodel.cli import count, positive

    add = sub.add_argument
    add("model", metavar="MODEL", help="id or card file")
    add("systems", nargs="+", metavar="SYSTEM", help="ids or card files")
    add("--workload", required=True, metavar="NAME", help="id or card file of a workload")
    add("--slo", action="append", default=[], metavar="NAME=X",
        help="upper limit: ttft_s, tpot_s, e2e_s, task_s, power_w")  # fmt: skip
    add("--max-gpus", type=positive, metavar="N", help="of a deployment (one domain, or 64)")
    add("--pools", default="both", choices=("both", "aggregated", "disaggregated"))
    add("--precision", action="append", metavar="NAME", help="may be repeated (auto)")
    add("--draft", metavar="NAME", help="draft of the model (the checkpoint's own)")
    add("--draft-tokens", action="append", type=count, metavar="N", help="may be repeated (0)")
    add("--tier", action="append", default=[], choices=("host",), help="memory below HBM")
    add("--routing", default="cache-aware", choices=("cache-aware", "random"))
    add("--mode", default="calibrated", metavar="NAME", help="calibrated, speed-of-light")
    add("--engine", default="typical", metavar="NAME", help="trtllm, vllm, sglang (typical)")
    add("--power", dest="power_basis", default="all_in", metavar="SET", help="(all_in)")
    add("--price", dest="price_basis", default="owned", metavar="SET", help="(owned)")


def _options(args: argparse.Namespace) -> dict[str, Any]:
    limits: dict[str, float] = {}
    for text in args.slo:
        name, equals, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise InputError(f"--slo: {text!r}: expected NAME=NUMBER, such as ttft_s=2")
        if name in limits:
            raise InputError(f"--slo: {name} is given twice")
        limits[name] = number
    return dict(
        limits=limits,
        pools=("aggregated", "disaggregated") if args.pools == "both" else (args.pools,),
        max_gpus=args.max_gpus,
        precisions=args.precision or ["auto"],
        draft=args.draft,
        draft_tokens=args.draft_tokens or [0],
        tiers=args.tier,
        routing=args.routing,
        mode=args.mode,
        engine=args.engine,
        power_basis=args.power_basis,
        price_basis=args.price_basis,
    )


NAMED = {"system": "system", "precision": "precision", "draft_tokens": "draft tokens"}
SHOWN = (  # column, heading, unit
    ("interactivity", "tok/s/user", ""), ("ttft", "TTFT", "s"), ("sessions", "sessions", ""),
    ("total_mw", "total tok/s/MW", ""), 
    ("usd_total", "USD/Mtok total", ""), ("hit", "hit", ""),
)  # fmt: skip


def _frontier(args: argparse.Namespace) -> Iterator[str]:
    from perfmodel.cli import _json
    from perfmodel.frontier import frontier

    f = frontier(args.model, args.systems, args.workload, x=args.x, y=args.y, **_options(args))
    if args.output is not None:
        _write(f, args.output)
    if args.json:
        yield _json({"x": f.x, "y": f.y, "tried": f.tried, "points": [_point(r) for r in _rows(f)]})
        return
    yield fields(_head(args, f))
    yield ""
    extra = tuple((n, n, "") for n in (args.x, args.y) if n not in [c for c, _, _ in SHOWN])
    yield _table(f, SHOWN + extra, args.top)
    if args.output is not None:
        yield f"\nwrote {args.output}: {len(f.deployments)} points"


def _head(args: argparse.Namespace, f: Any) -> list[tuple[str, str]]:
    from perfmodel.request import POWER_BASES, PRICE_BASES

    bands = f.columns
    low, high = bands["band_low"].min(), bands["band_high"].max()
    why = sorted({part for w in bands["extrapolated"] for part in w.split("; ") if part})
    same = [(text.capitalize(), str(bands[k][0])) for k, text in NAMED.items()
            if len(set(bands[k])) == 1]  # fmt: skip
    return [
        ("Model", args.model),
        *same,
        ("Workload", args.workload),
        ("Limits", ", ".join(args.slo) or "none"),
        ("Searched", f"{f.tried['deployments']:,} deployments, {f.tried['points']:,} points"),
        ("Front", f"{len(f.deployments)} points: {f.x} against {f.y}"),
        ("Power", f"{args.power_basis}: {POWER_BASES[args.power_basis]}"),
        ("Price", f"{args.price_basis}: {PRICE_BASES[args.price_basis]}"),
        ("Band", f"measured TPOT of 90 % of rows: {low:.2f} to {high:.2f} times the predicted; "
         + (f"extrapolated: {'; '.join(why)}" if why else "no part extrapolated")),
    ]  # fmt: skip


def _table(f: Any, columns: tuple[tuple[str, str, str], ...], top: int) -> str:
    n = len(f.deployments)
    step = max(1, -(-n // top))
    # what is the same for all points stands in the head
    told = [k for k in NAMED if len(set(f.columns[k])) > 1]
    rows = []
    for i in range(n - 1, -1, -step):
        values = [si(float(f.columns[c][i]), u or "1") for c, _, u in columns]
        words = [str(f.columns[k][i]) for k in ("bound", *told, "plan")]
        rows.append((*values, *words))
    heads = [h for _, h, _ in columns] + ["bound", *(NAMED[k] for k in told), "deployment"]
    align = "r" * len(columns) + "l" * (len(heads) - len(columns))
    return table(heads, rows, align, stretch=len(heads) - 1)


def _rows(f: Any) -> Iterator[dict[str, Any]]:
    for i in range(len(f.deployments)):
        yield {k: c[i].item() for k, c in f.columns.items()}


# what JSON holds of a point beside the metrics, which are AXES; a CSV file has every term
KEYS = (
    "system", "precision", "draft_tokens", "pools", "plan", "bound", "sessions", "batch",
    "sequences", "gpus", "hit", "hit_hbm", "kept_s", "band_low", "band_high", "extrapolated",
)  # fmt: skip


def _point(row: dict[str, Any]) -> dict[str, Any]:
    from perfmodel.frontier import AXES

    return {k: row[k] for k in (*KEYS, *AXES)}


def _write(f: Any, path: Path) -> None:
    """Every point with all its columns, whole or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(f.columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_rows(f))
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text.getvalue(), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"--output: {str(path)!r} can't be written: {error.strerror}") from None


def _plan(args: argparse.Namespace) -> Iterator[str]:
    from perfmodel.cheapest import cheapest
    from perfmodel.cli import _json

    found = cheapest(
        args.model, args.systems, args.workload, sessions=args.sessions, **_options(args)
    )
    if args.json:
        points = [_point(next(_rows(c.front))) for c in found]
        more = [{"replicas": c.replicas, "usd_h": c.usd_s * 3600} for c in found]
        yield _json({"choices": [m | p for m, p in zip(more, points, strict=True)]})
        return
    rows = []
    for c in found:
        v = {k: x[0] for k, x in c.front.columns.items()}
        rows.append((
            str(v["system"]), f"{c.replicas} x ({v['plan']})", f"{c.replicas * int(v['gpus']):,}",
            f"{c.usd_s * 3600:,.0f}", f"{c.usd_s * 3600 / args.sessions:.3g}",
            si(float(v["ttft"]), "s"), f"{v['interactivity']:.1f}", str(v["bound"]),
        ))  # fmt: skip
    yield fields([
        ("Load", f"{args.sessions:,} live sessions of {args.workload}"),
        ("Limits", ", ".join(args.slo) or "none"),
        ("Price", args.price_basis),
    ])  # fmt: skip
    yield ""
    yield table(
        ("system", "deployment", "GPUs", "USD/h", "USD/h/session", "TTFT", "tok/s/user", "bound"),
        rows, "llrrrrrl", stretch=1,
    )  # fmt: skip
