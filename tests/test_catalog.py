"""Cards: every field broken on purpose is refused with file and field; units parse or refuse."""

from __future__ import annotations

import copy
import itertools
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import api, catalog, units
from perfmodel.catalog import Quantity
from perfmodel.engine import Engine, Protocol
from perfmodel.errors import CardError, InputError
from perfmodel.hardware import System
from perfmodel.model import Model
from perfmodel.paths import data_dir

CARDS = [
    *((System, data_dir("hardware") / f"{s}.toml") for s in api.list_systems()),
    *((Model, data_dir("models") / f"{m}.toml") for m in api.list_models()),
    *((Engine, data_dir("engines") / f"{e}.toml") for e in api.list_engines()),
    *((Protocol, p) for p in sorted(data_dir("protocols").glob("*.toml"))),
]
# every fault in every number of these; of the other cards a few faults a number, in turn
THOROUGH = ("gb300-nvl72", "deepseek-v4-pro", "typical", "inferencex")
cards = pytest.mark.parametrize(("cls", "path"), CARDS, ids=lambda x: getattr(x, "stem", ""))


def quantities(data: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where the `{ value, kind, source }` tables of a card lie."""
    for key, value in data.items():
        if isinstance(value, dict):
            if "value" in value:
                yield (*at, key)
            else:
                yield from quantities(value, (*at, key))


def sections(data: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every table of a card except sources and free maps."""
    yield at
    for key, value in data.items():
        if isinstance(value, dict) and key not in ("sources", "acceptance"):
            yield from sections(value, (*at, key))


def table(data: dict[str, Any], at: tuple[str, ...]) -> dict[str, Any]:
    for key in at:
        data = data[key]
    return data


def refused(cls: Any, data: dict[str, Any], path: Path, *says: str) -> None:
    with pytest.raises(CardError) as e:
        catalog.validate(cls, data, path)
    for text in (str(path), *says):
        assert text in str(e.value), (says, str(e.value))


@cards
def test_every_number_has_a_source_and_ordered_range(cls: Any, path: Path) -> None:
    data = catalog.load_toml(path)
    card = catalog.validate(cls, data, path)
    found = 0
    for at in quantities(data):
        q: Any = card
        for key in at:
            q = q[key] if isinstance(q, dict) else getattr(q, key)
        assert isinstance(q, Quantity) and q.kind in catalog.KINDS and q.source.strip()
        assert q.source in data["sources"].values()
        assert math.isfinite(q.value) and q.value >= 0
        assert q.low is None or q.low <= q.value
        assert q.high is None or q.high >= q.value
        found += 1
    least = {System: 30, Model: 2, Engine: 10, Protocol: 3}[cls]
    assert found >= least or data.get("published") == {}  # a model whose sizes nobody has said
    assert card.id == path.stem
    if cls is Model:
        for at in sections(data):
            part = table(data, at)
            if "kind" in part:
                assert part["kind"] in catalog.KINDS and part["source"] in data["sources"], at


WRONG = [
    ("value", -1.0), ("value", math.nan), ("value", math.inf), ("value", True),
    ("value", "fast"), ("value", "3 parsec"), ("value", "1e999 B"), ("value", None),
    ("value", [1]), ("value", ""), ("kind", "guess"), ("kind", None), ("kind", []),
    ("source", "NOBODY"), ("source", ""), ("source", []), ("surprise", 1),
    ("low", "1e300"), ("high", "-1"),
]  # fmt: skip


def break_key(key: str, value: Any) -> Callable[[dict[str, Any], str], None]:
    def change(part: dict[str, Any], name: str) -> None:
        part[name][key] = value

    return change


def drop_key(key: str) -> Callable[[dict[str, Any], str], None]:
    def change(part: dict[str, Any], name: str) -> None:
        del part[name][key]

    return change


def bare_number(part: dict[str, Any], name: str) -> None:
    part[name] = 5  # it has no source


def other_unit(part: dict[str, Any], name: str) -> None:
    """A unit of another dimension, with the number as it was."""
    part[name]["value"] = f"{str(part[name]['value']).split()[0]} token"


FAULTS = [break_key(*w) for w in WRONG] + [drop_key(k) for k in ("value", "kind", "source")]
FAULTS += [bare_number, other_unit]


@cards
def test_every_broken_quantity_is_refused(cls: Any, path: Path) -> None:
    data = catalog.load_toml(path)
    turn = itertools.cycle(FAULTS)
    for at in quantities(data):
        for fault in FAULTS if path.stem in THOROUGH else itertools.islice(turn, 2):
            bad = copy.deepcopy(data)
            fault(table(bad, at[:-1]), at[-1])
            refused(cls, bad, path, ".".join(at))


@cards
def test_unknown_and_renamed_keys_are_refused(cls: Any, path: Path) -> None:
    data = catalog.load_toml(path)
    for at in sections(data):
        bad = copy.deepcopy(data)
        part = table(bad, at)
        if not any(isinstance(v, dict) for v in part.values()) or at in ((), ("chip",)):
            part["surprise"] = 1
            refused(cls, bad, path, "surprise")
    for at in quantities(data):
        bad = copy.deepcopy(data)
        part = table(bad, at[:-1])
        part[at[-1] + "_x"] = part.pop(at[-1])
        refused(cls, bad, path, at[-1] + "_x")


@cards
def test_dropped_tables_are_refused(cls: Any, path: Path) -> None:
    data = catalog.load_toml(path)
    for key in data:
        optional = ("notes", "also", "draft", "vision", "residual", "engram", "uncertain")
        if key in optional or (cls is Model and key == "date"):
            continue
        bad = copy.deepcopy(data)
        del bad[key]
        refused(cls, bad, path, key if key != "sources" else "source")


@cards
def test_every_source_is_cited_text(cls: Any, path: Path) -> None:
    data = catalog.load_toml(path)
    for key in data["sources"]:
        for wrong in ("", "  ", 3, None):
            bad = copy.deepcopy(data)
            bad["sources"][key] = wrong
            refused(cls, bad, path, "sources")


@pytest.mark.parametrize(
    "content", [b"id = ", b"\xff\xfe", b"x = 1\n" * 200_001, b"", b"id = 'a'\nid = 'b'"]
)
def test_files_that_are_no_cards(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(CardError, match="broken.toml"):
        catalog.read_card(System, path)


def test_unknown_ids_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gb300-nvl72"):
        api.load_system("gb300")
    with pytest.raises(InputError, match="kimi-k3"):
        api.load_model("kimi-k4")
    with pytest.raises((CardError, InputError), match="absent.toml"):
        api.load_system(str(tmp_path / "absent.toml"))
    with pytest.raises(InputError, match="'vllm'.*known: kernels, sglang, trtllm, typical, vllm"):
        api.load_engine("vlm")


@pytest.mark.parametrize("engine", api.list_engines())
def test_engine_cards(engine: str, tmp_path: Path) -> None:
    """Each loads by id and by path, and its numbers are shares and times that make sense."""
    card = api.load_engine(engine)
    path = tmp_path / "mine.toml"
    path.write_text((data_dir("engines") / f"{engine}.toml").read_text())
    assert api.load_engine(str(path)) == card
    v = card.values
    assert v.kernel_scale.value >= 1 and v.prefill_scale.value >= 1
    assert 0 < v.decode_only.value <= 1 and 0 < v.memory_fraction.value <= 1
    assert 0 <= v.deferred.value < 1 and v.sequence.value < 1e-3 and v.request.value < 1
    path.write_text(path.read_text().replace("kernel_scale", "kernel_scal", 1))
    with pytest.raises(CardError, match="values.kernel_scal.*kernel_scale"):
        api.load_engine(str(path))


PREFIX = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
NUMBER = st.floats(1e-3, 1e6).map(lambda x: float(f"{x:.6g}"))


@given(x=NUMBER, prefix=st.sampled_from(list(PREFIX)), si=st.sampled_from(["B", "B/s", "FLOP/s"]))
def test_parse_scales_by_the_prefix(x: float, prefix: str, si: str) -> None:
    assert units.parse(f"{x} {prefix}{si}", si) == pytest.approx(x * PREFIX[prefix], rel=1e-12)


@given(x=NUMBER)
def test_parse_known_conversions(x: float) -> None:
    assert units.parse(f"{x} GiB", "B") == pytest.approx(x * 2**30)
    assert units.parse(f"{x} us", "s") == pytest.approx(x * 1e-6)
    assert units.parse(f"{x} Gb/s", "B/s") == pytest.approx(x * 1e9 / 8)
    assert units.parse(f"{x} kW", "W") == pytest.approx(x * 1e3)
    assert units.parse(x, "1") == x


@given(text=st.text(max_size=70), si=st.sampled_from(sorted(units.EXAMPLES)))
def test_parse_never_fails_otherwise(text: str, si: str) -> None:
    try:
        assert math.isfinite(units.parse(text, si))
    except ValueError as e:
        assert "expected" in str(e)


@given(
    x=NUMBER, given_unit=st.sampled_from(sorted(units.EXAMPLES)),
    wanted=st.sampled_from(sorted(units.EXAMPLES)),
)  # fmt: skip
def test_parse_refuses_other_dimensions(x: float, given_unit: str, wanted: str) -> None:
    text = f"{x}" if given_unit == "1" else f"{x} {given_unit}"
    if given_unit == wanted:
        assert units.parse(text, wanted) == pytest.approx(x)
    else:
        with pytest.raises(ValueError, match="expected"):
            units.parse(text, wanted)


@pytest.mark.parametrize(
    ("model", "old", "new", "words"),
    [
        ("deepseek-v4-pro", '"hca/moe", "hca/moe", ', '"hca/moe", ', ("60 layers listed", "= 61")),
        ("deepseek-v4-pro", "index_key_bytes = 68, ", "", ("cache.index_key_bytes", "csa")),
        ("qwen3.5-397b-a17b", "state_value_bytes = 4, ", "", ("cache.state_value_bytes", "gdn")),
        ("kimi-k3", 'id = "kimi-k3"', 'id = "a/b"', ("id", "a/b")),
        ("deepseek-v4-pro", "heads = 128", "heads = 0", ("attention.csa.heads: 0",)),
    ],
)
def test_a_model_card_that_cannot_be(
    tmp_path: Path, model: str, old: str, new: str, words: tuple[str, ...]
) -> None:
    text = (data_dir("models") / f"{model}.toml").read_text()
    assert old in text
    path = tmp_path / "card.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(CardError) as e:
        catalog.read_card(Model, path)
    assert all(w in str(e.value) for w in words) and "\n" not in str(e.value)


NOT_A_CARD = [
    ("entry_bytes = 584", "entry_bytes = inf", "entry_bytes"),
    ("entry_bytes = 584", "entry_bytes = 1e300", "entry_bytes"),
    ("entry_bytes = 584", 'entry_bytes = "584"', "entry_bytes"),
    ("entry_bytes = 584", "entry_bytes = true", "entry_bytes"),
    ("tail_bytes_per_sequence = 18.7e6", "tail_bytes_per_sequence = inf", "tail_bytes"),
    ("score_bytes = 2", "score_bytes = nan", "score_bytes"),
    ("o_groups = 16", "o_groups = 7", "o_groups 7"),
    ("hash_layers = 3", "hash_layers = 99999", "hash_layers"),
    ("overlap = true", "overlap = 1", "overlap"),
    ("block = false", "block = 0", "block"),
    ("max_tokens = 8", "max_tokens = 100000", "max_tokens"),
    ("acceptance = { 1 = 1.79", "acceptance = { 9 = 1.79, 1 = 1.79", "acceptance '9'"),
    ('date = "2026-04-24"', 'date = "yesterday"', "date"),
    ('name = "DeepSeek V4 Pro"', 'name = "two\\nlines"', "name"),
    ('name = "DeepSeek V4 Pro"', 'name = "\\u001b[31mred"', "name"),
    ('name = "DeepSeek V4 Pro"', 'name = "x"\n"bad\\nkey" = 1', "'bad\\nkey'"),
    ('type = "moe"', 'type = "1\\n2"', "ffn.moe"),
    ("value = 1.6e12", "value = 1e-320", "total_parameters"),
    ("value = 1.6e12", 'value = "١٢"', "total_parameters"),
    ('"hca/moe", "hca/moe", ', f'"{"x" * 100_000}", ', "shape.order[0]"),
]


@pytest.mark.parametrize(("old", "new", "word"), NOT_A_CARD)
def test_odd_values_in_a_model_card(tmp_path: Path, old: str, new: str, word: str) -> None:
    text = (data_dir("models") / "deepseek-v4-pro.toml").read_text()
    assert old in text
    path = tmp_path / "card.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(CardError) as e:
        catalog.read_card(Model, path)
    message = str(e.value)
    assert word in message and message.isprintable() and len(message) < 1000, message[:300]


def test_endless_tables_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "card.toml"
    path.write_text("[" + ".".join("a" * 3000) + "]\nx = 1\n")
    for cls in (Model, System):
        with pytest.raises(CardError):
            catalog.read_card(cls, path)


def test_an_edited_card_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = (data_dir("models") / "deepseek-v4-pro.toml").read_text()
    path.write_text(text)
    assert api.load_model(str(path)).shape.hidden_size == 7168
    path.write_text(text.replace("hidden_size = 7168", "hidden_size = 7000"))
    os.utime(path, ns=(1, 1))
    assert api.load_model(str(path)).shape.hidden_size == 7000


def test_notes_on_a_chip_without_fp4(tmp_path: Path) -> None:
    plan = api.Plan(tp=8, dp=4, ep=32)
    e = api.estimate("kimi-k3", "h200-nvl8", plan, batch=4, context_tokens=99, precision="nvfp4")
    assert any("FP4 products" in n for n in e.notes)
    text = (data_dir("models") / "deepseek-v4-pro.toml").read_text()
    path = tmp_path / "card.toml"
    path.write_text(text.replace('without_fp4 = "hopper"\n', ""))
    e = api.estimate(str(path), "h200-nvl8", plan, batch=4, context_tokens=99)
    assert any("FP4 index keys" in n and "None" not in n for n in e.notes)
