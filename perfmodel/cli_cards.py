"""The commands that help with cards: `new-hardware`, `new-model`, `check-cards`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NEW = {"new-hardware": ("system", "hardware"), "new-model": ("model", "models")}


def add(command: Any) -> None:
    """Add the commands; `command(name, function, text)` makes a subparser."""
    for name, like in (("new-hardware", "gb300-nvl72"), ("new-model", "kimi-k3")):
        sub = command(name, _new, "Write a commented card to edit, with a neighbour's numbers.")
        sub.add_argument("name", metavar="NAME", help="id of the new card")
        sub.add_argument(
            "--like", required=True, metavar="ID", help=f"the neighbour, such as {like}"
        )
        sub.add_argument(
            "-o", "--output", type=Path, metavar="FILE",
            help="default: NAME.toml in your folder of cards, else here",
        )  # fmt: skip
        sub.add_argument("--force", action="store_true", help="replace a file that is there")

    sub = command("check-cards", _check, "Check cards: every fault with its line.")
    sub.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="card files or folders")


def _new(args: argparse.Namespace) -> Iterator[str]:
    from perfmodel import scaffold
    from perfmodel.cli import _json

    what, listing = NEW[args.command]
    file = scaffold.write_new(what, args.name, args.like, args.output, args.force)
    if args.json:
        yield _json({"file": str(file), "id": args.name, "like": args.like})
        return
    yield f"wrote {file}: the numbers of {args.like}, none of them checked"
    yield f"Edit it, then: perfmodel check-cards {file}"
    yield f"See it with: perfmodel {listing} {file}"


def _check(args: argparse.Namespace) -> Iterator[str]:
    from perfmodel import check
    from perfmodel.cli import _json

    files = check.card_files(args.paths)
    findings = check.check(files)
    faults = sum(not f.warning for f in findings)
    args.status = 1 if faults else 0
    if args.json:
        yield _json(
            {
                "cards": len(files),
                "faults": faults,
                "warnings": len(findings) - faults,
                "findings": [f.to_dict() for f in findings],
            }
        )
        return
    yield from (str(f) for f in findings)
    yield (
        f"{len(files)} {'card' if len(files) == 1 else 'cards'}: {faults} "
        f"{'fault' if faults == 1 else 'faults'}, {len(findings) - faults} "
        f"{'warning' if len(findings) - faults == 1 else 'warnings'}"
    )
