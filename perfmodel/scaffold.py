"""A new card to edit: a neighbour's numbers, marked as copied and unchecked, each field explained.

`new_card` gives the text of a card that loads at once; `write_new` puts it into a file. The TOML
that is written here is what cards need: tables, inline tables, arrays, text, numbers, booleans.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from perfmodel import catalog
from perfmodel.catalog import FOLDERS, KINDS
from perfmodel.errors import InputError
from perfmodel.hardware import System
from perfmodel.model import Model
from perfmodel.paths import data_dir

CLASSES: dict[str, type[BaseModel]] = {"system": System, "model": Model}
WIDTH = 100
Path_ = tuple[str, ...]

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_BARE = re.compile(r"[A-Za-z0-9_-]+")

# ---- what the fields mean: the whole path of a field, or its last part where that is enough

SYSTEM_COMMENTS = {
    "id": "the file's name without .toml, if the card lies in a folder of cards",
    "name": "what tables and charts call it",
    "vendor": "who makes it",
    "summary": "one line: how many of what, linked how",
    "profile": '"as sold", "vendor claim" (announced) or "conservative" (as somebody measured it)',
    "date": "state of knowledge, ISO 8601",
    "notes": "what a reader must know before trusting the numbers",
    "also": "other names that benchmark rows use for this machine; no other card may have them",
    "sources": "key = full citation; every number names one of these keys",
    "chip": "per GPU: dense peaks without sparsity; leave out a format that the chip lacks",
    "chip.name": "the chip alone",
    "chip.architecture": "one word, such as hopper",
    "chip.peak_bf16": "FLOP/s",
    "chip.peak_fp8": "FLOP/s; with it the efficiencies that end in _fp8 are needed",
    "chip.peak_fp4": "FLOP/s; with it the efficiencies that end in _fp4 are needed",
    "memory": "HBM of one GPU",
    "memory.capacity": "B, usable; GB is 10^9 bytes",
    "memory.bandwidth": "B/s, of the data sheet; what of it is reached is in [efficiency]",
    "scale_up": "the domain in which every GPU reaches every other at full rate (NVLink)",
    "scale_up.gpus": "GPUs in the domain",
    "scale_up.bandwidth": "B/s per GPU in one direction; vendors often print the sum of both",
    "scale_out": "the network between domains",
    "scale_out.bandwidth": "B/s per GPU in one direction; 400 Gb/s are 50 GB/s",
    "scale_out.gpus_max": "GPUs that it joins at most",
    "host": "CPU memory, one GPU's share",
    "host.bandwidth": "B/s per GPU in one direction (PCIe, C2C)",
    "host.memory": "B per GPU",
    "layout": "how the machine is built",
    "layout.gpus_per_node": "GPUs in a server or tray",
    "layout.gpus_per_rack": "GPUs in a rack",
    "power": "W per GPU, as provisioned; leave out what nobody publishes: what needs it is refused",
    "power.chip": "W: the board's limit",
    "power.rack_it": "W: all IT of the rack over its GPUs",
    "power.all_in": "W: at the utility, with cooling and losses (analysts' set of September 2026)",
    "power.all_in_old": "W: the same in the older set (April 2026)",
    "power.pue": "site power over IT power",
    "price": "per GPU; leave out what nobody publishes",
    "price.owned": "USD/h: a hyperscaler's own, over 4 years",
    "price.neocloud": "USD/h: a neocloud's own",
    "price.rental": "USD/h: rented for 3 years",
    "price.owned_old": "USD/h: as owned, older set (April 2026)",
    "price.neocloud_old": "USD/h: as neocloud, older set (April 2026)",
    "price.rental_old": "USD/h: as rental, older set (April 2026)",
    "price.capex": "USD: purchase",
    "efficiency": "share of the peak that is reached, 0 to 1, by kind of operator and format",
    "efficiency.gemm_bf16": "dense matrix products, of chip.peak_bf16",
    "efficiency.gemm_fp8": "of chip.peak_fp8",
    "efficiency.gemm_fp4": "of chip.peak_fp4",
    "efficiency.moe_bf16": "grouped products of experts",
    "efficiency.moe_fp8": "of chip.peak_fp8",
    "efficiency.moe_fp4": "of chip.peak_fp4",
    "efficiency.attention_prefill_bf16": "attention over new tokens",
    "efficiency.attention_prefill_fp8": "with an FP8 cache",
    "efficiency.attention_decode_bf16": "attention of one new token",
    "efficiency.attention_decode_fp8": "with an FP8 cache",
    "efficiency.hbm_gemm": "of memory.bandwidth: weights of dense products",
    "efficiency.hbm_moe": "of memory.bandwidth: weights of experts, wider than 4 bits",
    "efficiency.hbm_moe_4bit": "of memory.bandwidth: weights of experts, 4 bits",
    "efficiency.hbm_attention": "of memory.bandwidth: cache that decode reads",
    "efficiency.hbm_stream": "of memory.bandwidth: norms, copies",
    "efficiency.hbm_sparse": "of memory.bandwidth: gathered entries of sparse attention",
    "efficiency.hbm_scan": "of memory.bandwidth: passes of a recurrent prefill",
    "efficiency.moe_fused": "of the peak: the expert kernel that holds dispatch and combine",
    "efficiency.hbm_moe_fused": "of memory.bandwidth: weights in that kernel",
    "efficiency.unhidden": "share of the smaller of compute and memory time that adds to the larger",
    "efficiency.unhidden_attention": "the same in decode attention",
    "efficiency.link_all_reduce_one": "of scale_up.bandwidth: one-shot all-reduce (small messages)",
    "efficiency.link_all_reduce": "of scale_up.bandwidth: two-shot all-reduce",
    "efficiency.link_all_to_all": "of scale_up.bandwidth: dispatch and combine",
    "efficiency.link_scale_out": "of scale_out.bandwidth",
    "floors": "times that no bandwidth hides, and sizes below which a kernel works in vain",
    "floors.kernel": "s of each kernel",
    "floors.all_reduce": "s of a one-shot all-reduce of two ranks",
    "floors.all_reduce_two": "s of a two-shot all-reduce of two ranks",
    "floors.all_reduce_rank": "s for each further rank",
    "floors.all_to_all": "s of a dispatch or combine inside the domain",
    "floors.scale_out": "s of an exchange that leaves the domain",
    "floors.send": "s of a message between pipeline stages",
    "floors.step": "s of the host for each step",
    "floors.tile_rows": "rows of padding that each touched expert costs",
    "floors.context_decode": "cache entries of padding that decode attention computes",
    "floors.context_prefill": "cache entries of padding that prefill attention computes",
    "floors.sparse_heads": "heads that a sparse prefill core computes at least",
    "floors.scan_token": "s of a token's turn in a recurrent prefill",
    "floors.fused": "s of the fused expert kernel; with it moe_fused and hbm_moe_fused are needed",
}

MODEL_COMMENTS = {
    "id": SYSTEM_COMMENTS["id"],
    "name": "what tables and charts call it",
    "vendor": "who trained it",
    "summary": "one line: parameters, kinds of layers, context",
    "date": "of release, ISO 8601",
    "notes": "what a reader must know before trusting the numbers",
    "also": "other names of the same shape, as benchmark rows write them; no other card may have them",
    "sources": "key = full citation; every section names one of these keys",
    "published": "totals of the publisher, to check this card against",
    "total_parameters": "parameters of the checkpoint, drafts left out",
    "active_parameters": "parameters that one token uses",
    "checkpoint": "B of the published files",
    "shape": "kind: vendor, measured or estimate, for all numbers of a section",
    "hidden_size": "width of the residual stream",
    "vocab_size": "rows of the embedding",
    "context_tokens": "longest context",
    "layers": "how many",
    "prefill_layers": "layers that a prefill runs for all tokens, where it is not all layers",
    "prefill_tail_tokens": "last tokens for which a prefill runs the other layers",
    "draft.layers": "the layers of the draft, as ATTENTION/FFN",
    "order": "every layer from the first, as ATTENTION/FFN; `none` where a layer lacks one of them",
    "attention": "a kind of attention layer; its name is the left part in shape.order",
    "ffn": "a kind of feed-forward layer; its name is the right part in shape.order",
    "attention.type": "compressed, mla, gqa, kda, gated_delta, ... (docs/cards.md)",
    "ffn.type": "moe or dense",
    "heads": "query heads; in a recurrent layer the heads that hold the state",
    "kv_heads": "heads of keys and values",
    "head_dim": "values of a head",
    "q_lora_rank": "width of the compressed query",
    "kv_lora_rank": "values of the compressed cache entry",
    "o_groups": "groups of the output projection; divides heads",
    "o_lora_rank": "width of the compressed output",
    "nope_dim": "query and key values of a head without rotation",
    "rope_dim": "query and key values with rotation, kept beside the compressed entry",
    "v_dim": "output values of a head",
    "window": "tokens of a sliding window",
    "compression": "tokens in one compressed entry; 0: the window alone",
    "overlap": "whether neighbouring entries overlap",
    "indexer": "heads, head_dim and top_k of the indexer that picks entries",
    "kv_shared": "whether the layer reads the entries of the last layer before it that makes them",
    "index_shared": "whether the layer takes the picks of the last indexer before it",
    "output_gate": "whether a gate of the hidden width multiplies the output",
    "decay_rank": "rank of the decay projection",
    "gate_rank": "rank of the output gate, where it is not a full projection",
    "conv_kernel": "taps of the short convolution",
    "chunk": "tokens in a chunk of a recurrent prefill",
    "key_heads": "heads of keys",
    "key_dim": "values of a key",
    "value_dim": "values of a value head",
    "state_dim": "state values for each channel of a head",
    "groups": "groups that share the input and output maps of the state",
    "block_tokens": "tokens in a block of keys",
    "top_blocks": "blocks picked for a query",
    "local_blocks": "blocks next to the query, always read",
    "index_heads": "heads that score blocks",
    "index_head_dim": "values of such a head",
    "experts": "routed experts of a layer",
    "experts_per_token": "of them for each token",
    "intermediate": "width inside an expert, or inside a dense layer",
    "matrices": "3 with a gate, 2 without",
    "shared_experts": "experts that every token uses",
    "shared_intermediate": "width inside all shared experts together",
    "latent_dim": "width that routed experts see, where it is not hidden_size",
    "hash_layers": "layers that route by the token's id",
    "residual": "how layers are joined, where it is not by a plain sum",
    "residual.type": "mhc or attnres",
    "streams": "parallel streams of mhc",
    "block_layers": "layers in a block of attnres",
    "vision": "the tower in front of the text model, which is held but not timed",
    "parameters": "parameters of the tower",
    "engram": "tables of vectors looked up by the last tokens, held in host memory",
    "table_rows": "rows of each table; a layer has one",
    "row_dim": "values of a row",
    "rows_per_token": "rows that a token looks up in a table",
    "precision": "native is required; formats of weights and activations by class of tensor",
    "precision.summary": "in words",
    "weights": "format by class; default: of the classes not named",
    "activations": "the same for the operands of products",
    "cache": "B of a cache entry, of an index key, of a state value; rate of attention",
    "without_fp4": "the precision that chips without FP4 run instead",
    "labels": "what benchmark rows call this precision",
    "draft": "a draft for speculation",
    "method": "mtp or dspark",
    "block": "whether it runs once over a block (else once for each token)",
    "projections": "products of hidden_size x hidden_size in front of it",
    "max_tokens": "most tokens it drafts in a step",
    "in_checkpoint": "whether it comes with the checkpoint",
    "acceptance": "drafted tokens = tokens that a step yields, with the bonus token",
    "uncertain": "a number that is not public",
    "field": "its path on this card, such as ffn.moe.intermediate",
    "low": "least that it may be",
    "high": "most that it may be",
    "why": "what is known of it",
}

_COMMENTS = {"system": SYSTEM_COMMENTS, "model": MODEL_COMMENTS}


def comment(what: str, path: Path_) -> str:
    """What the field at `path` means, or "" for names that the card itself gives."""
    known = _COMMENTS[what]
    section = f"{path[0]}.{path[-1]}"
    if len(path) == 2 and f"{path[0]}" in ("attention", "ffn", "precision", "draft"):
        return known.get(path[0], "")  # its second part is a name that the card gives
    if what == "system" or len(path) == 1:
        return known.get(".".join(path), "")
    return known.get(section) or known.get(path[-1], "")


# ---- TOML


def toml(data: Mapping[str, Any], about: Callable[[Path_], str] = lambda _: "") -> str:
    """`data` as TOML in its order, with a comment where `about(path)` has one.

    Raises TypeError for values that cards don't have (dates, None).
    """
    return "\n".join(_lines(data, (), about)).lstrip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: Path_, about: Callable[[Path_], str]) -> Iterator[str]:
    below = {k: v for k, v in table.items() if _own_header(v, (*path, k))}
    for key, value in table.items():
        if key not in below:
            yield from _comment(about((*path, key)))
            yield from _wrapped(_key(key), value)
    for key, value in below.items():
        here = (*path, key)
        name = ".".join(map(_key, here))
        for part in value if isinstance(value, list) else [value]:
            plain = not part or any(not _own_header(v, (*here, k)) for k, v in part.items())
            if plain or isinstance(value, list):
                yield ""
                yield from _comment(about(here))
                yield f"[[{name}]]" if isinstance(value, list) else f"[{name}]"
            yield from _lines(part, here, about)


def _own_header(value: Any, path: Path_) -> bool:
    if isinstance(value, list):
        return len(path) == 1 and bool(value) and all(isinstance(v, dict) for v in value)
    return isinstance(value, Mapping) and len(path) <= 2 and "value" not in value


def _comment(text: str) -> Iterator[str]:
    for line in textwrap.wrap(text, WIDTH - 2, break_on_hyphens=False):
        yield f"# {line}"


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    # JSON's escapes are TOML's; DEL is a control character in TOML alone
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        short = f"{value:g}"  # 2.78e+12, not a row of zeros
        return short if abs(value) >= 1e6 and float(short) == value else repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    raise TypeError(f"{type(value).__name__} {value!r} has no place in a card")


def _wrapped(key: str, value: Any) -> Iterator[str]:
    line = f"{key} = {_value(value)}"
    if len(line) <= WIDTH or not isinstance(value, list):
        yield line
        return
    yield f"{key} = ["
    row = ""
    for item in map(_value, value):
        if row and len(row) + len(item) + 6 > WIDTH:
            yield f"    {row}"
            row = ""
        row += f"{' ' if row else ''}{item},"
    yield f"    {row}"
    yield "]"


# ---- a new card


def new_card(what: str, name: str, like: str | Path, today: datetime.date | None = None) -> str:
    """The text of a card `name` with the numbers of `like`; what: "system" or "model".

    Every number is an estimate, "copied from ..., not checked"; efficiencies and floors are
    borrowed, so that results say so. Raises InputError for a bad name or an unknown neighbour.
    """
    if not isinstance(name, str) or not _ID.fullmatch(name):
        raise InputError(
            f"name: {catalog.short(name)}: expected up to 100 letters, digits, '.', '_' and '-', "
            "a letter or digit first"
        )
    path = catalog.resolve(like, data_dir(FOLDERS[what]), what)
    catalog.read_card(CLASSES[what], path)  # a faulty neighbour is refused here
    data = catalog.load_toml(path)
    data = {k: v for k, v in data.items() if k != "also"}  # those names stay the neighbour's
    neighbour = data["id"]
    data |= {
        "id": name,
        "name": name,
        "summary": f"a draft copied from {neighbour}: nothing is checked",
        "date": (today or datetime.date.today()).isoformat(),
        "notes": [f"A draft: every number is copied from {neighbour} and not checked."],
    }
    copied = f"copied from {neighbour}, not checked"
    data = {k: _marked(v, "BORROWED" if k in ("efficiency", "floors") else "COPIED")
            for k, v in data.items()}  # fmt: skip
    data["sources"] = {"COPIED": copied}
    if what == "system":
        data["sources"]["BORROWED"] = f"borrowed: {copied}"
    if what == "model":
        del data["date"]  # of release, which is not the neighbour's
    order = ("id", "name", "vendor", "summary", "profile", "date", "notes", "sources")
    data = {k: data[k] for k in order if k in data} | data
    head = (
        f"# {name}: a draft with the numbers of {neighbour}. For each number you know: change it, "
        "its kind (vendor, measured, estimate), its source and its range, low <= value <= high. "
        "Then run `perfmodel check-cards` on this file."
    )
    text = "\n".join(textwrap.wrap(head, WIDTH, subsequent_indent="# ", break_on_hyphens=False))
    text += "\n\n" + toml(data, lambda p: comment(what, p))
    catalog.validate(CLASSES[what], data, Path(f"{name}.toml"))
    return text


def _marked(value: Any, source: str) -> Any:
    """The value with every mark and source in it made that of a copy."""
    if isinstance(value, list):
        return [_marked(v, source) for v in value]
    if not isinstance(value, dict):
        return value
    out = {k: _marked(v, source) for k, v in value.items()}
    if isinstance(out.get("source"), str):
        out["source"] = source
        if out.get("kind") in KINDS:
            out["kind"] = "estimate"
    return out


def place(what: str, name: str) -> Path:
    """Where a new card goes: the user's folder of cards if there is one, else here."""
    folder = catalog.user_folder()
    if folder is None:
        return Path(f"{name}.toml")
    inside = folder / FOLDERS[what]
    return (inside if inside.is_dir() else folder) / f"{name}.toml"


def write_new(
    what: str, name: str, like: str | Path, output: Path | None = None, force: bool = False
) -> Path:
    """Write `new_card` to `output` (default: `place`) and return where it is.

    The file is there whole or not at all. Warns (CardsWarning) when the project has a card of this
    name. Raises InputError when it exists and not `force`, or
    can't be written.
    """
    text = new_card(what, name, like)
    target = place(what, name) if output is None else Path(output)
    if target.suffix != ".toml":
        raise InputError(
            f"output: {str(target)!r} does not end in .toml, as the path of a card does"
        )
    if target.is_dir():
        raise InputError(f"output: {str(target)!r} is a folder; expected a file")
    try:
        _write(target, text, force)
    except FileExistsError:
        raise InputError(
            f"output: {str(target)!r} is there already; expected another file, or --force"
        ) from None
    except OSError as error:
        raise InputError(
            f"output: {str(target)!r} can't be written: {error.strerror or error}"
        ) from None
    if (data_dir(FOLDERS[what]) / f"{name}.toml").is_file():
        catalog.warn(f"{what} {name}: the project has a card of this name; yours will hide it")
    return target


def _write(target: Path, text: str, force: bool) -> None:
    """Put the text in place in one step; FileExistsError if `target` is there and not `force`."""
    handle, temp = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    part = Path(temp)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        part.chmod(0o666 & ~umask)  # mkstemp makes files for their owner only
        if force:
            os.replace(part, target)
        else:
            os.link(part, target)  # fails where a file is, even one that came a moment ago
    finally:
        part.unlink(missing_ok=True)
