"""New cards: they load at once, say that nothing is checked, explain each field, never overwrite."""

from __future__ import annotations

import datetime
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from perfmodel import api, catalog, scaffold
from perfmodel.cli import main
from perfmodel.errors import InputError
from perfmodel.hardware import System
from perfmodel.paths import data_dir
from perfmodel.plan import Plan

NEIGHBOURS = [("system", s) for s in api.list_systems()] + [("model", m) for m in api.list_models()]
DAY = datetime.date(2026, 12, 1)


def numbers(node: Any, at: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Everything in a card but marks and sources."""
    if isinstance(node, list) and node and isinstance(node[0], dict):
        node = {str(i): part for i, part in enumerate(node)}
    if not isinstance(node, dict):
        return {at: node}
    out: dict[tuple[str, ...], Any] = {}
    for key, value in node.items():
        if key not in ("kind", "source", "sources"):
            out |= numbers(value, (*at, key))
    return out


@pytest.mark.parametrize(("what", "like"), NEIGHBOURS)
def test_a_new_card_is_its_neighbour_unchecked(what: str, like: str, tmp_path: Path) -> None:
    text = scaffold.new_card(what, "mine", like, DAY)
    path = tmp_path / "mine.toml"
    path.write_text(text)
    card = catalog.read_card(scaffold.CLASSES[what], path)
    assert card.id == "mine" and f"copied from {like}" in card.summary
    old = tomllib.loads((data_dir(catalog.FOLDERS[what]) / f"{like}.toml").read_text())
    new = tomllib.loads(text)
    changed = {("id",), ("name",), ("summary",), ("date",), ("notes",), ("also",)}
    kept = {k: v for k, v in numbers(old).items() if k not in changed}
    assert {k: v for k, v in numbers(new).items() if k not in changed} == kept
    assert "also" not in new  # names of the neighbour

    def marks(node: Any) -> None:
        if isinstance(node, dict):
            if "source" in node:
                assert (
                    node["source"] in new["sources"] and node.get("kind", "estimate") == "estimate"
                )
            for value in node.values():
                marks(value)

    marks({k: v for k, v in new.items() if k != "sources"})
    assert all("copied from" in s and "not checked" in s for s in new["sources"].values())
    long = [x for x in text.splitlines() if x.startswith("#") and len(x) > scaffold.WIDTH]
    assert not long


def test_results_of_a_new_card_say_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(scaffold.new_card("system", "mine", "gb300-nvl72"))
    point: dict[str, Any] = dict(batch=8, context_tokens=4096)
    e = api.estimate("llama-3.1-8b", str(path), Plan(tp=8), **point)
    old = api.estimate("llama-3.1-8b", "gb300-nvl72", Plan(tp=8), **point)
    assert e.step_time_s == old.step_time_s
    assert any("mine has no kernel measurements; it borrows" in n for n in e.notes)
    assert e.power_set and "copied from gb300-nvl72, not checked" in e.power_set


def fields_of(cls: type[BaseModel], at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    out: list[tuple[str, ...]] = []
    for name, field in cls.model_fields.items():
        out.append((*at, name))
        part = field.annotation
        if isinstance(part, type) and issubclass(part, BaseModel) and part.__module__.endswith(
            ".hardware"
        ):  # fmt: skip
            out += fields_of(part, (*at, name))
    return out


def test_every_field_of_a_machine_is_explained() -> None:
    fields = fields_of(System)
    assert len(fields) > 80
    assert not [f for f in fields if not scaffold.comment("system", f)]
    known = {".".join(f) for f in fields}
    assert set(scaffold.SYSTEM_COMMENTS) == known  # and nothing that isn't there
    units = {"peak": "FLOP/s", "bandwidth": "B/s", "memory": "B", "capacity": "B"}
    for field in fields:
        for part, unit in units.items():
            if len(field) == 2 and part in field[1] and field[0] != "efficiency":
                assert scaffold.comment("system", field).startswith(unit), field


@pytest.mark.parametrize("like", api.list_models())
def test_every_field_of_a_model_is_explained(like: str) -> None:
    text = scaffold.new_card("model", "mine", like, DAY)
    before = ""
    for line in text.splitlines():
        key = line.partition(" = ")[0]
        if " = " in line and not line.startswith(("#", " ")) and key not in ("kind", "source"):
            assert before.startswith("#") or key in ("COPIED", "BORROWED"), line
        if line.startswith("["):
            assert before.startswith("#"), line
        before = line


# ---- TOML

VALUES = st.recursive(
    st.one_of(
        st.text(max_size=20), st.integers(-(2**62), 2**62), st.booleans(),
        st.floats(allow_nan=False), st.sampled_from(["\x7f", '"', "\\", "\n\t\x00", "ü"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(data=st.dictionaries(st.text(max_size=8), VALUES, max_size=6), about=st.text(max_size=300))
def test_toml_reads_back(data: dict[str, Any], about: str) -> None:
    text = scaffold.toml(data, lambda _: " ".join(about.split()) if about.isprintable() else "")
    assert tomllib.loads(text) == data


def test_toml_has_no_place_for_other_things() -> None:
    with pytest.raises(TypeError, match="NoneType None"):
        scaffold.toml({"a": None})


# ---- the command


def test_the_command_writes_a_card_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-hardware", "mine", "--like", "gb300-nvl72"]) == 0
    assert "wrote mine.toml" in capsys.readouterr().out
    assert api.load_system("mine.toml").id == "mine"
    assert main(["new-model", "k4", "--like", "kimi-k3", "-o", "a.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": "a.toml", "id": "k4", "like": "kimi-k3"}
    assert api.load_model("a.toml").id == "k4"
    assert main(["check-cards", "mine.toml"]) == 0
    # a new card is a neighbour too
    assert main(["new-hardware", "two", "--like", "mine.toml"]) == 0
    assert "copied from mine" in Path("two.toml").read_text()
    assert sorted(os.listdir()) == ["a.toml", "mine.toml", "two.toml"]  # nothing half written


def test_nothing_is_overwritten_without_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("my work")
    argv = ["new-hardware", "mine", "--like", "h200-nvl8"]
    assert main(argv) == 2
    assert "'mine.toml' is there already" in capsys.readouterr().err
    assert Path("mine.toml").read_text() == "my work" and os.listdir() == ["mine.toml"]
    assert main([*argv, "--force"]) == 0
    assert api.load_system("mine.toml").id == "mine" and os.listdir() == ["mine.toml"]


def test_a_name_of_the_project_is_said_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    assert main(["new-hardware", "h200-nvl8", "--like", "h100-nvl8", "-o", str(file)]) == 0
    err = capsys.readouterr().err
    assert err.startswith(
        "perfmodel: warning: system h200-nvl8: the project has a card of this name"
    )
    assert err.count("\n") == 1 and api.load_system(str(file)).id == "h200-nvl8"


@pytest.mark.parametrize("inside", [True, False])
def test_the_default_place_is_the_users_folder(
    inside: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine = tmp_path / "cards"
    (mine / "hardware" if inside else mine).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert main(["new-hardware", "mine", "--like", "h200-nvl8", "--cards", str(mine)]) == 0
    assert (mine / "hardware" / "mine.toml" if inside else mine / "mine.toml").is_file()
    capsys.readouterr()
    assert main(["hardware", "mine", "--cards", str(mine)]) == 0
    assert "copied from h200-nvl8, not checked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["a/b", "--like", "h200-nvl8"], "name: 'a/b'"),
        (["", "--like", "h200-nvl8"], "name: ''"),
        (["x" * 101, "--like", "h200-nvl8"], "up to 100"),
        (["mine", "--like", "h2000"], "'h2000' is unknown; did you mean 'h200-nvl8'"),
        (["mine", "--like", "none.toml"], "there is no such file"),
        (["mine", "--like", "h200-nvl8", "-o", "card.txt"], "does not end in .toml"),
        (
            ["mine", "--like", "h200-nvl8", "-o", "no/where/x.toml"],
            "can't be written: No such file",
        ),
        (["mine", "--like", "h200-nvl8", "-o", "dir.toml"], "is a folder"),
        (["mine"], "--like"),
    ],
)
def test_wrong_input(
    argv: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("dir.toml").mkdir()
    assert main(["new-hardware", *argv]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
    assert os.listdir() == ["dir.toml"]


def test_a_model_is_no_neighbour_of_a_machine(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="kimi-k3"):
        scaffold.write_new("system", "mine", "kimi-k3", tmp_path / "mine.toml")
