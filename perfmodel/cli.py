"""The command `perfmodel`; docs/cli.md describes it and the keys of its JSON.

Everything heavy is imported inside the command that needs it: `--help` and `--version` answer at
once, and `estimate` never pays for the notebook stack.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from perfmodel import __version__, cli_cards, cli_evidence, cli_search
from perfmodel.errors import CardsWarning, InputError, PerfModelError
from perfmodel.text import fields, plain, si, table

PHASES = ("decode", "prefill")
MODES = ("calibrated", "speed-of-light")
FORMATS = ("pdf", "html", "ipynb")
_SUFFIXES = {"": 1, "k": 1000, "M": 1000**2, "Ki": 1024, "Mi": 1024**2}
_NUMBER = re.compile(r"([0-9]+(?:_[0-9]+)*)(|k|M|Ki|Mi)")
_COUNT_MAX = 10**12  # far above any use; keeps the arithmetic in range


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        _complain(f"{message} (see `{self.prog} --help`)")
        self.exit(2)


def count(text: str) -> int:
    """Parse a whole number: digits with `_`, and k, M (1000, 1000²) or Ki, Mi (1024, 1024²)."""
    match = _NUMBER.fullmatch(text.strip())
    value = int(match[1]) * _SUFFIXES[match[2]] if match and len(text) <= 24 else None
    if value is None or value > _COUNT_MAX:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not a whole number up to 10^12, expected one such as"
            " 4096, 131_072, 128k (128000) or 128Ki (131072)"
        )
    return value


def positive(text: str) -> int:
    """Parse a whole number of at least 1; see `count`."""
    if (value := count(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is too small, expected at least 1")
    return value


def finite(text: str) -> float:
    """Parse a finite decimal number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number, expected such as 2.4")
    return value


# ---- the command line


def _parser() -> Parser:
    parser = Parser(
        prog="perfmodel",
        description="Latency, throughput, power and cost of large-language-model inference.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"perfmodel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(function=function)
        sub.add_argument("--json", action="store_true", help="print JSON, in SI units")
        sub.add_argument(
            "--cards", metavar="DIR", help="your own cards, searched first ($PERFMODEL_CARDS)"
        )
        return sub

    sub = command("estimate", _estimate, "Estimate one operating point.")
    _add_point(sub)
    sub.add_argument("--top", type=positive, metavar="N", help="only the N longest operators")

    sub = command("explain", _explain, "Derive one number of an estimate, with its sources.")
    sub.add_argument("name", metavar="NAME", help="operator or metric; `list` lists the names")
    _add_point(sub)

    sub = command("models", _models, "List the models, or every number of one.")
    sub.add_argument("id", nargs="?", metavar="MODEL", help="id or card file of a model")
    sub = command("hardware", _hardware, "List the systems, or every number of one.")
    sub.add_argument("id", nargs="?", metavar="SYSTEM", help="id or card file of a system")

    cli_cards.add(command)
    cli_evidence.add(command)
    cli_search.add(command)

    sub = command("report", _report, "Write a report.")
    sub.add_argument("name", nargs="?", metavar="NAME", help="name of the report")
    sub.add_argument("--list", action="store_true", help="list the reports")
    sub.add_argument(
        "-p", "--param", action="append", default=[], metavar="KEY=VALUE", help="a parameter"
    )
    sub.add_argument("-f", "--params-file", type=Path, metavar="FILE", help=".yaml, .toml, .json")
    sub.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="file to write (default NAME.pdf)"
    )
    sub.add_argument("--format", choices=FORMATS, help="default: by the output's ending, or pdf")
    return parser


def _add_point(sub: argparse.ArgumentParser) -> None:
    """Add the arguments that describe one operating point."""
    sub.add_argument("model", metavar="MODEL", help="id or card file (see `perfmodel models`)")
    sub.add_argument("system", metavar="SYSTEM", help="id or card file (see `perfmodel hardware`)")
    add = sub.add_argument
    add("--phase", choices=PHASES, default="decode", help="default: decode")
    add("--tp", type=positive, default=1, metavar="N", help="attention tensor parallel (1)")
    add("--dp", type=positive, default=1, metavar="N", help="attention data parallel (1)")
    add("--pp", type=positive, default=1, metavar="N", help="pipeline stages (1)")
    add("--ep", type=positive, metavar="N", help="expert parallel (all GPUs of a stage)")
    add("--etp", type=positive, metavar="N", help="tensor parallel in an expert (tp*dp/ep)")
    add("--dcp", type=positive, default=1, metavar="N", help="decode context parallel (1)")
    add("--batch", type=positive, required=True, metavar="N", help="sequences in the instance")
    add("--context", type=count, required=True, metavar="N", help="tokens in cache, a sequence")
    add("--new-tokens", type=positive, metavar="N", help="prefill: uncached tokens, a prompt")
    add(
        "--precision",
        default="auto",
        metavar="NAME",
        help="of the model (auto: what the chip runs)",
    )
    add("--mode", choices=MODES, default="calibrated", help="default: calibrated")
    add("--engine", default="typical", metavar="NAME", help="trtllm, vllm, sglang (typical)")
    add("--overlap", default="none", metavar="NAME", help="none, two-batch, fused (none)")
    add("--balance", default="balanced", metavar="NAME", help="balanced, unbalanced (balanced)")
    add("--redundant-experts", type=count, default=0, metavar="N", help="replicas in a layer (0)")
    add("--draft", metavar="NAME", help="draft of the model (the checkpoint's own)")
    add("--draft-tokens", type=count, default=0, metavar="N", help="speculative decoding (0: off)")
    add("--acceptance-length", type=finite, metavar="X", help="tokens a step yields")
    add(
        "--power", "--power-basis", dest="power_basis", default="all_in", metavar="SET",
        help="chip, rack_it, all_in or all_in_old (all_in)",
    )  # fmt: skip
    add(
        "--price", "--price-basis", dest="price_basis", default="owned", metavar="SET",
        help="owned, neocloud or rental; _old: of April 2026 (owned)",
    )  # fmt: skip


# ---- estimate and explain


def _point(args: argparse.Namespace) -> Any:
    """Return the estimate that the arguments describe."""
    from perfmodel import api

    model, system = _model(args.model), _system(args.system)
    plan = api.Plan(tp=args.tp, dp=args.dp, pp=args.pp, ep=args.ep, etp=args.etp, dcp=args.dcp)
    if args.phase == "prefill" and args.new_tokens is None:
        raise InputError("--new-tokens: missing, expected the uncached tokens of each prompt")
    return api.estimate(
        model,
        system,
        plan,
        phase=args.phase,
        batch=args.batch,
        context_tokens=args.context,
        new_tokens=args.new_tokens or 1,
        precision=args.precision,
        mode=args.mode,
        engine=_engine(args.engine),
        overlap=args.overlap,
        balance=args.balance,
        redundant_experts=args.redundant_experts,
        draft=args.draft,
        draft_tokens=args.draft_tokens,
        acceptance_length=args.acceptance_length,
        power_basis=args.power_basis,
        price_basis=args.price_basis,
    )


def _model(name: str) -> Any:
    """Load a model by id or by the file of its card; raises InputError or CardError."""
    from perfmodel import api

    if not name.endswith(".toml"):
        _known("model", name, api.list_models())
    return api.load_model(name)


def _system(name: str) -> Any:
    """Load a system by id or by the file of its card; raises InputError or CardError."""
    from perfmodel import api

    if not name.endswith(".toml"):
        _known("system", name, api.list_systems())
    return api.load_system(name)


def _engine(name: str) -> Any:
    """Load an engine by id or by the file of its card; raises InputError or CardError."""
    from perfmodel import api

    if not name.endswith(".toml"):
        _known("engine", name, api.list_engines())
    return api.load_engine(name)


def _known(what: str, name: str, known: Iterable[str]) -> None:
    """Raise InputError with the nearest name if `name` is not one of `known`."""
    names = list(known)
    if name in names:
        return
    near = difflib.get_close_matches(name.lower(), names, 1, 0.4)
    hint = f"did you mean {near[0]}? Known: " if near else "expected one of "
    raise InputError(f"{what}: {name[:60]!r} is unknown, {hint}{', '.join(names)}")


def _estimate(args: argparse.Namespace) -> Iterator[str]:
    estimate = _point(args)
    if args.json:
        yield _json(estimate.to_dict())
        return
    yield fields(_metrics(estimate))
    yield ""
    yield _memory(estimate)
    yield ""
    yield _operators(estimate, args.top)
    if estimate.notes:
        yield ""
        yield fields(("Note", note) for note in estimate.notes)


def _metrics(e: Any) -> Iterator[tuple[str, str]]:
    yield "Model", f"{e.model_id}, precision {e.precision}"
    yield "System", f"{e.system_id}, {e.plan.label} ({e.gpus} GPUs)"
    prefill = f", {e.new_tokens:,} new tokens each" if e.phase == "prefill" else ""
    context = f"{e.context_tokens:,} tokens in cache"
    yield "Point", f"{e.phase}, batch {e.batch:,}, {context}{prefill}; {e.mode}"
    overlap = "" if e.overlap == "none" else f", overlap {e.overlap}"
    if e.balance != "balanced":
        overlap += ", experts unbalanced"
    if e.redundant_experts:
        overlap += f", {e.redundant_experts} redundant experts"
    yield "Engine", f"{e.engine}{overlap}"
    if e.draft_tokens:
        length = f"{e.acceptance_length:g} tokens a step"
        yield "Draft", f"{e.draft}, {e.draft_tokens} draft tokens, {length}"
    yield "Step time", f"{si(e.step_time_s, 's')}, bound by {e.bound}"
    tokens = "uncached input tokens" if e.phase == "prefill" else "output tokens"
    if e.tpot_s is not None:
        yield "TPOT", f"{si(e.tpot_s, 's')}, {si(e.interactivity_tok_s_user)} tok/s/user"
    if e.band is not None:
        yield "  band", _band(e)
    yield (
        "Throughput",
        f"{si(e.throughput_tok_s)} tok/s, {si(e.throughput_tok_s_gpu)} tok/s/GPU ({tokens})",
    )
    if e.power_set is None:
        yield "Per MW", f"no {e.power_basis} power on the card of {e.system_id}"
    else:
        yield "Per MW", f"{si(e.throughput_tok_s_mw)} tok/s/MW at {si(e.power_w, 'W')}"
        yield "  power", e.power_set
    if e.price_set is None:
        yield "Cost", f"no {e.price_basis} price on the card of {e.system_id}"
    else:
        yield "Cost", f"{e.usd_per_mtok:.4g} USD per million {tokens}"
        yield "  price", e.price_set


def _band(e: Any) -> str:
    b = e.band
    x = e.step_time_s if e.tpot_s is None else e.tpot_s
    note = f"; extrapolated: {b.extrapolated}" if b.extrapolated else ""
    return (
        f"{si(x * b.low, 's')} to {si(x * b.high, 's')} ({b.metric.upper()} of 90 % of "
        f"{b.rows} measured rows{note}); typical error {b.typical:.0f} %"
    )


def _memory(e: Any) -> str:
    rows = [(m.name, si(m.bytes, "B"), f"{m.bytes / e.capacity_bytes:.1%}") for m in e.memory]
    rows.append(("total", si(e.memory_bytes, "B"), f"{e.memory_bytes / e.capacity_bytes:.1%}"))
    head = ("Memory of the fullest GPU", "size", f"of {si(e.capacity_bytes, 'B')}")
    return table(head, rows, "lrr")


def _operators(e: Any, top: int | None) -> str:
    """Return the table of operators (in order, or the `top` longest and the rest)."""
    total = e.step_time_s
    shown = list(e.operators)
    if top is not None:
        shown = sorted(shown, key=lambda o: -o.time_s)[:top]
    rows = [
        (
            _operator_name(o),
            plain(o.count),
            o.precision,
            _short(o.flops),
            _short(o.weight_bytes + o.kv_bytes + o.activation_bytes),
            _short(o.message_bytes),
            si(o.time_s, "s"),
            f"{o.time_s / total:.1%}",
            o.bound,
            f"{o.efficiency:.2f}" if o.efficiency is not None else "-",
        )
        for o in shown
    ]
    if hidden := len(e.operators) - len(shown):
        time = math.fsum(o.time_s for o in e.operators) - math.fsum(o.time_s for o in shown)
        name = f"({hidden} more)"
        rows.append(
            (name, *("",) * 5, si(max(time, 0.0), "s"), f"{max(time, 0) / total:.1%}", "", "")
        )
    # What is in the step and in no operator, so that the shares add up to the whole.
    other = e.outside_operators_s
    if other > 1e-6 * total:
        name = "(host time)" if e.plan.pp == 1 else "(host time, pipeline)"
        rows.append((name, *("",) * 5, si(other, "s"), f"{other / total:.1%}", "", ""))
    head = ("Operator", "count", "prec.", "FLOP", "B", "msg B", "time", "share", "bound", "eff.")
    return table(head, rows, "lrlrrrrrlr")


def _operator_name(o: Any) -> str:
    return o.name if o.name.startswith(f"{o.layer_kind}.") else f"{o.layer_kind}.{o.name}"


def _short(value: float) -> str:
    """Return a count of bytes or FLOP with a prefix and without its unit (it is in the head)."""
    return si(value, "B").removesuffix("B").rstrip() if value else "-"


def _explain(args: argparse.Namespace) -> Iterator[str]:
    from perfmodel import api

    estimate = _point(args)
    names = list(api.explain_names(estimate))
    if args.name == "list":
        yield _json({"names": names}) if args.json else "\n".join(names)
        return
    if args.name not in names:
        near = difflib.get_close_matches(args.name, names, 3, 0.4)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        raise InputError(
            f"name: {args.name[:60]!r} is unknown, {hint or 'see '}`perfmodel explain list ...`"
            f"{' lists all' if hint else ''} {len(names)} names"
        )
    x = api.explain(estimate, args.name)
    inputs: list[dict[str, Any]] = [
        dict(zip(("symbol", "value", "unit", "doc", "source"), row, strict=True))
        for row in x.inputs
    ]
    if args.json:
        keys = ("name", "unit", "doc", "formula", "latex", "numbers", "value")
        yield _json({k: getattr(x, k) for k in keys} | {"inputs": inputs})
        return
    pairs = [(x.name, x.doc), ("formula", x.formula), ("numbers", x.numbers)]
    yield fields([*pairs, ("value", _value(x.value, x.unit))])
    if not inputs:
        return
    sources = list(dict.fromkeys(i["source"] for i in inputs))
    rows = []
    for i in inputs:
        mark = f"[{sources.index(i['source']) + 1}]"
        rows.append((i["symbol"], _value(i["value"], i["unit"]), i["doc"], mark))
    yield ""
    yield table(("Input", "value", "what", "source"), rows, "lrll", stretch=2)
    yield "\nSources"
    yield fields((f"[{n}]", source) for n, source in enumerate(sources, start=1))


def _value(value: Any, unit: str) -> str:
    if not isinstance(value, (int, float)):
        return str(value)
    if unit == "B" and abs(value) < 1e5:  # a cache entry of 1,152 bytes, not "1.15 kB"
        return f"{plain(value)} B"
    return si(value, unit)


# ---- cards


def _models(args: argparse.Namespace) -> Iterator[str]:
    from perfmodel import api, catalog

    if args.id is not None:
        yield from _card(_model(args.id), args.json)
        return
    rows, own = [], catalog.user_cards("model")
    for name in api.list_models():
        m = api.load_model(name)
        row = {k: getattr(m, k) for k in ("id", "name", "vendor", "summary")}
        row["context_tokens"] = m.shape.context_tokens
        row["your_card"] = str(own[name]) if name in own else None
        rows.append(row | {"precisions": list(api.precisions(m))})
    if args.json:
        yield _json({"models": rows})
        return
    pairs = []
    for r in rows:
        pairs += [
            (r["id"], f"{r['name']} ({r['vendor']}): {r['summary']}"),
            ("  context", f"{r['context_tokens']:,} tokens"),
            ("  precisions", ", ".join(r["precisions"])),
        ]
        pairs += [("  yours", r["your_card"])] if r["your_card"] else []
    yield fields(pairs)


def _hardware(args: argparse.Namespace) -> Iterator[str]:
    from perfmodel import api, catalog

    if args.id is not None:
        yield from _card(_system(args.id), args.json)
        return
    columns = {
        "peak_bf16": "chip.peak_bf16",
        "peak_fp8": "chip.peak_fp8",
        "peak_fp4": "chip.peak_fp4",
        "memory_capacity": "memory.capacity",
        "memory_bandwidth": "memory.bandwidth",
        "scale_up_gpus": "scale_up.gpus",
        "power_all_in": "power.all_in",
    }
    rows: list[dict[str, Any]] = []
    own = catalog.user_cards("system")
    for name in api.list_systems():
        s = api.load_system(name)
        known = s.quantities()
        row = {k: getattr(s, k) for k in ("id", "name", "vendor", "profile", "summary")}
        numbers = {k: known[p].value if p in known else None for k, p in columns.items()}
        rows.append(row | numbers | {"your_card": str(own[name]) if name in own else None})
    if args.json:
        yield _json({"systems": rows})
        return
    units = dict.fromkeys(columns, "FLOP/s")
    units |= {"memory_capacity": "B", "memory_bandwidth": "B/s", "scale_up_gpus": "1"}
    units["power_all_in"] = "W"
    head = ("System", "BF16", "FP8", "FP4", "HBM", "bandwidth", "GPUs", "all-in")
    yield table(head, [(r["id"], *(si(r[k], units[k]) for k in columns)) for r in rows], "lrrrrrrr")
    yield ""
    pairs = []
    for r in rows:
        pairs.append((r["id"], f"{r['name']}, {r['profile']}: {r['summary']}"))
        pairs += [("  yours", r["your_card"])] if r["your_card"] else []
    yield fields(pairs)
    yield "\nOf each GPU, dense peaks; GPUs: in a scale-up domain; all-in: power at the utility."


def _card(card: Any, as_json: bool) -> Iterator[str]:
    """Print a card: its words, then every number with unit, kind, range and source."""
    words = [k for k in ("id", "name", "vendor", "profile", "date", "summary") if hasattr(card, k)]
    numbers = list(_numbers(card, ""))
    notes = list(getattr(card, "notes", None) or [])
    uncertain = {u.field: u for u in getattr(card, "uncertain", ())}
    for n in numbers:
        if u := uncertain.get(n["path"]):
            n |= {"low": u.low, "high": u.high}
            notes.append(f"Not public: {u.field}: {u.why} [{u.source}]")
    if as_json:
        texts: dict[str, Any] = {k: getattr(card, k) for k in words}
        yield _json(texts | {"notes": notes, "numbers": numbers})
        return
    yield fields([(k, str(getattr(card, k) or "")) for k in words] + [("note", n) for n in notes])
    yield ""
    sources = list(dict.fromkeys(n["source"] for n in numbers))
    rows = []
    for n in numbers:
        limits = ""
        if n["low"] is not None or n["high"] is not None:
            limits = f"{_value(n['low'], n['unit'])} to {_value(n['high'], n['unit'])}"
        mark = f"[{sources.index(n['source']) + 1}]"
        rows.append((n["path"], _value(n["value"], n["unit"]), limits, n["kind"], mark))
    yield table(("Number", "value", "range", "kind", "source"), rows, "lrlll")
    yield "\nSources"
    yield fields((f"[{i}]", s) for i, s in enumerate(sources, start=1))


def _numbers(node: Any, path: str, kind: str = "", source: str = "") -> Iterator[dict[str, Any]]:
    """Walk a card: a quantity has its own unit and source, a plain number its section's."""
    from pydantic import BaseModel

    if isinstance(node, BaseModel):
        names = type(node).model_fields
        if {"value", "unit", "kind", "source"} <= set(names):
            found = {k: getattr(node, k) for k in ("value", "unit", "kind", "low", "high")}
            yield {"path": path} | found | {"source": getattr(node, "source")}  # noqa: B009
            return
        kind = getattr(node, "kind", kind)
        source = getattr(node, "source", source)
        parts: Iterable[tuple[str, Any]] = ((k, getattr(node, k)) for k in names)
    elif isinstance(node, dict):
        parts = node.items()
    elif isinstance(node, (int, float)) and not isinstance(node, bool):
        yield {
            "path": path, "value": node, "unit": "B" if "_bytes" in path else "1", "kind": kind,
            "low": None, "high": None, "source": source,
        }  # fmt: skip
        return
    else:
        return
    for key, value in parts:
        yield from _numbers(value, f"{path}.{key}" if path else str(key), kind, source)


# ---- report


def _report(args: argparse.Namespace) -> Iterator[str]:
    if not args.list:
        _check_report(args)
    from perfmodel import report

    names = list(report.list_reports())
    if args.list:
        yield _json({"reports": names}) if args.json else "\n".join(names)
        return
    _known("report", args.name, names)
    fmt = args.format or "pdf"
    if args.output is None:
        args.output = Path(f"{args.name}.{fmt}")
    if not args.format and args.output.suffix[1:].lower() in FORMATS:
        fmt = args.output.suffix[1:].lower()
    params = report.parse_params(args.param, args.params_file)
    file = report.render(args.name, params, args.output, fmt=fmt, progress=not args.json)
    if args.json:
        yield _json({"report": args.name, "file": str(file), "format": fmt, "params": params})
    else:
        yield f"wrote {file}"


def _check_report(args: argparse.Namespace) -> None:
    """Find what is wrong with the arguments before the notebook stack is imported."""
    if args.name is None:
        raise InputError("report: no name given, expected one that `perfmodel report --list` shows")
    if args.output is None:
        return  # NAME.FORMAT in the current folder, once the name is known to be one
    ending = args.output.suffix[1:].lower()
    if ending in FORMATS and args.format and ending != args.format:
        raise InputError(
            f"--output: {str(args.output)!r} does not end in .{args.format}, the --format given"
        )
    if ending not in FORMATS and not args.format:
        raise InputError(
            f"--output: {str(args.output)!r} has no known ending, expected .pdf, .html or .ipynb"
            " (or --format)"
        )
    if args.output.is_dir():
        raise InputError(f"--output: {str(args.output)!r} is a folder, expected a file")


# ---- output and errors


def _json(value: Any) -> str:
    return json.dumps(_clean(value), indent=2, ensure_ascii=False, allow_nan=False)


def _clean(value: Any) -> Any:
    """Return value with only what JSON has: infinity and not-a-number become null."""
    if isinstance(value, dict):
        return {str(k): _clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if hasattr(value, "item"):  # a NumPy scalar
        return _clean(value.item())
    return str(value)


def _complain(message: str) -> None:
    print(f"perfmodel: error: {message}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status: 0, 2 (bad input), 130 (interrupted).

    141 means that the reader of our output went away, as for other programs in a pipe.
    """
    try:
        # A terminal or file with a narrow encoding gets "?" instead of a traceback.
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        args = _parser().parse_args(argv)
        with _cards(args.cards):
            for block in args.function(args):
                print(block)
        sys.stdout.flush()
    except SystemExit as stop:  # argparse: --help, --version or a bad command line
        return stop.code if isinstance(stop.code, int) else 2
    except PerfModelError as error:
        _complain(str(error))
        return 2
    except BrokenPipeError:
        # Python flushes stdout once more when it ends; that must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        name = f": {error.filename}" if error.filename else ""
        _complain(f"{error.strerror or error}{name}")
        return 2
    except KeyboardInterrupt:
        return 130
    return getattr(args, "status", 0)


@contextmanager
def _cards(folder: str | None) -> Iterator[None]:
    """Use this folder of the user's cards, and say in one line where two cards have one name."""
    said: set[str] = set()
    before = os.environ.get("PERFMODEL_CARDS")
    with warnings.catch_warnings():
        show = warnings.showwarning

        def aloud(message: Any, category: Any, *rest: Any, **more: Any) -> None:
            if not issubclass(category, CardsWarning):
                show(message, category, *rest, **more)
            elif str(message) not in said:
                said.add(str(message))
                print(f"perfmodel: warning: {message}", file=sys.stderr)

        warnings.showwarning = aloud
        warnings.simplefilter("always", CardsWarning)
        try:
            if folder is not None:
                from perfmodel import catalog

                catalog.use_cards(folder)
            yield
        finally:
            if folder is not None:
                os.environ.pop("PERFMODEL_CARDS", None)
                if before is not None:
                    os.environ["PERFMODEL_CARDS"] = before


if __name__ == "__main__":
    sys.exit(main())
