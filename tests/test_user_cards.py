"""A user's own folder of cards: searched first, said aloud where it hides a card, or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perfmodel import api, catalog, report, rows
from perfmodel.cli import main
from perfmodel.errors import CardError, CardsWarning, InputError
from perfmodel.explorer import Explorer
from perfmodel.paths import data_dir
from perfmodel.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore::perfmodel.errors.CardsWarning")
HBM = 'bandwidth = { value = "8.0 TB/s"'
POINT: dict[str, Any] = dict(batch=8, context_tokens=4096)
ARGV = ["--tp", "8", "--batch", "8", "--context", "4Ki"]


def card(kind: str, name: str, new: str | None = None, *pairs: tuple[str, str]) -> str:
    text = (data_dir(kind) / f"{name}.toml").read_text()
    for old, by in ((f'id = "{name}"', f'id = "{new or name}"'), *pairs):
        assert old in text, old
        text = text.replace(old, by, 1)
    return text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One machine of its own in hardware/, one model beside, one machine that hides the project's."""
    mine = tmp_path / "mine"
    (mine / "hardware").mkdir(parents=True)
    (mine / "models").mkdir()
    (mine / "hardware" / "fast.toml").write_text(
        card("hardware", "gb300-nvl72", "fast", (HBM, HBM.replace("8.0", "16")), ("gb300\"]", "fast1\"]"))
    )  # fmt: skip
    (mine / "lama.toml").write_text(card("models", "llama-3.1-8b", "lama"))
    (mine / "h200-nvl8.toml").write_text(
        card("hardware", "h200-nvl8", None, ('"4.8 TB/s"', '"4.0 TB/s"'))
    )
    monkeypatch.setenv(catalog.CARDS_VARIABLE, str(mine))
    return mine


def test_cards_of_the_folder_load_by_id_and_are_listed(folder: Path) -> None:
    assert {"fast", "h200-nvl8"} <= set(api.list_systems()) and "lama" in api.list_models()
    assert "lama" not in api.list_systems() and "fast" not in api.list_models()
    assert len(set(api.list_systems())) == len(api.list_systems())
    e = api.estimate("lama", "fast", Plan(tp=8), **POINT)
    slow = api.estimate("llama-3.1-8b", "gb300-nvl72", Plan(tp=8), **POINT)
    assert (e.model_id, e.system_id) == ("lama", "fast") and e.step_time_s < slow.step_time_s
    assert not any("your card" in n for n in e.notes)


def test_the_same_id_twice_is_said_aloud(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(folder / "h200-nvl8.toml")
    with pytest.warns(CardsWarning, match="h200-nvl8.*your card") as caught:
        system = api.load_system("h200-nvl8")
    assert system.memory.bandwidth.value == 4e12 and where in str(caught[0].message)
    assert Path(caught[0].filename).name == Path(__file__).name  # where the user asked for it
    for named in ("h200-nvl8", system):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CardsWarning)
            e = api.estimate("lama", named, Plan(tp=8), **POINT)
        assert [n for n in e.notes if where in n and "project's card" in n]
    assert main(["estimate", "lama", "h200-nvl8", *ARGV]) == 0
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and err.startswith(
        "perfmodel: warning: system h200-nvl8: your card"
    )
    assert "project's card of this name" in " ".join(out.split())
    # a card given by its path, or another one: nothing is hidden
    with warnings.catch_warnings():
        warnings.simplefilter("error", CardsWarning)
        project = api.load_system(str(data_dir("hardware") / "h200-nvl8.toml"))
        e = api.estimate("lama", project, Plan(tp=8), **POINT)
    assert e.system_id == "h200-nvl8" and not any("your card" in n for n in e.notes)


def test_option_and_variable_do_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "lama", "fast", *ARGV, "--json"]) == 0
    by_variable = json.loads(capsys.readouterr().out)
    monkeypatch.delenv(catalog.CARDS_VARIABLE)
    assert main(["estimate", "lama", "fast", *ARGV]) == 2
    assert "lama" in capsys.readouterr().err
    assert main(["estimate", "lama", "fast", *ARGV, "--json", "--cards", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out) == by_variable
    assert catalog.CARDS_VARIABLE not in os.environ  # the option is of that command alone
    api.use_cards(folder)
    try:
        assert api.load_model("lama").id == "lama"
    finally:
        api.use_cards(None)
    assert "lama" not in api.list_models()


def test_the_lists_say_whose(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, key, own in (
        ("hardware", "systems", {"fast", "h200-nvl8"}),
        ("models", "models", {"lama"}),
    ):
        assert main([command, "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)[key]
        assert {r["id"] for r in listed if r["your_card"]} == own
        assert all(r["your_card"] is None or Path(r["your_card"]).is_file() for r in listed)
        assert main([command]) == 0
        out = capsys.readouterr().out
        assert out.count("  yours") == len(own)


def test_explorer_and_rows_see_them(folder: Path) -> None:
    explorer = Explorer(model="lama", systems=["fast"])
    assert "fast" in explorer.systems and set(explorer.rows["system"]) == {"fast"}
    assert rows._card("system", "system", "fast1") == "fast"  # a name in `also`
    assert rows._card("model", "model_path", "lama") == "lama"


def test_a_name_of_two_cards_is_the_users(folder: Path) -> None:
    """`also` copied with a card: the user's wins, and it is said."""
    rows._names.cache_clear()
    (folder / "hardware" / "fast.toml").write_text(card("hardware", "gb300-nvl72", "fast"))
    with pytest.warns(CardsWarning, match="gb300: a name of gb300-nvl72 and of fast"):
        assert rows._card("system", "system", "gb300") == "fast"
    rows._names.cache_clear()


def test_a_process_started_from_here_has_them_too(folder: Path) -> None:
    code = "from perfmodel import api; print(api.load_model('lama').id)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "lama\n"


def absent(mine: Path) -> None:
    for path in sorted(mine.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    mine.rmdir()


def a_file(mine: Path) -> None:
    absent(mine)
    mine.write_text("no folder")


@pytest.mark.parametrize(
    ("spoil", "why"), [(absent, "No such file or directory"), (a_file, "Not a directory")]
)
def test_a_folder_that_is_none(
    folder: Path, spoil: Callable[[Path], None], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(folder)
    for call in (api.list_systems, lambda: api.load_system("h200-nvl8"), api.list_models):
        with pytest.raises(InputError, match=f"PERFMODEL_CARDS.*{why}.*readable folder"):
            call()
    with pytest.raises(InputError, match=why):
        api.use_cards(folder)
    assert main(["hardware", "--cards", str(folder)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"perfmodel: error: cards: '{folder}': {why}") and err.count("\n") == 1


def test_an_unreadable_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(InputError, match="Permission denied"):
        catalog.user_folder()
    with pytest.raises(InputError, match="null byte"):
        monkeypatch.undo()
        api.use_cards("a\0b")


def test_an_id_that_two_files_have(folder: Path) -> None:
    (folder / "fast.toml").write_text((folder / "hardware" / "fast.toml").read_text())
    for call in (lambda: api.load_system("fast"), api.list_systems):
        with pytest.raises(InputError, match=r"'fast' is there twice.*hardware/fast.*/fast.toml"):
            call()


def test_the_file_is_named_like_the_card(folder: Path) -> None:
    (folder / "hardware" / "other.toml").write_text(card("hardware", "gb300-nvl72", "fast"))
    with pytest.raises(CardError, match="other.toml: id: 'fast': expected 'other'"):
        api.load_system("other")
    assert api.load_system(str(folder / "hardware" / "other.toml")).id == "fast"


def test_broken_cards_are_named(folder: Path) -> None:
    broken = folder / "broken.toml"
    broken.write_text("id = ")
    for call in (api.list_systems, api.list_models, lambda: api.load_model("broken")):
        with pytest.raises(CardError, match="broken.toml: not valid TOML"):
            call()
    assert api.load_system("fast").id == "fast"  # a card that is not in its way
    broken.write_text("[nonsense]\nx = 1\n")  # of no kind: not listed, and named when asked for
    assert "broken" not in api.list_systems() + api.list_models()
    with pytest.raises(CardError, match=r"broken.toml: nonsense"):
        api.load_system("broken")
    (folder / "models" / "fast.toml").write_text(card("hardware", "gb300-nvl72", "fast"))
    with pytest.raises(CardError, match="this is a machine card; expected a model card"):
        api.load_model("fast")


@pytest.mark.parametrize("name", ["../mine/lama", "/etc/passwd", "a b", "hardware/fast", ".."])
def test_an_id_is_no_path(folder: Path, name: str) -> None:
    with pytest.raises(InputError, match="is unknown"):
        api.load_model(name)


def test_an_unset_or_empty_variable_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(catalog.CARDS_VARIABLE, "")
    assert catalog.user_folder() is None and catalog.user_cards("model") == {}
    assert api.load_model("llama-3.1-8b").id == "llama-3.1-8b"


def test_a_report_sees_a_folder_given_by_a_relative_path(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cells run elsewhere, in a process of their own."""
    cell = {"cell_type": "code", "execution_count": None, "outputs": []}
    code = "from perfmodel import api\nprint(api.load_model('lama').id, len(api.load_system('fast').id))"
    notebook = {
        "cells": [
            {**cell, "id": "a", "metadata": {"tags": ["parameters"]}, "source": "n: int = 1"},
            {**cell, "id": "b", "metadata": {}, "source": code},
        ],
        "metadata": {"language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "own.ipynb").write_text(json.dumps(notebook))
    monkeypatch.setattr(report, "data_dir", lambda name: tmp_path / "reports")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(catalog.CARDS_VARIABLE, folder.name)
    work = tmp_path / "work"
    work.mkdir()
    done = report.execute("own", {}, work, progress=False)
    assert "lama 4" in json.dumps(done["cells"][-1]["outputs"])
    assert os.environ[catalog.CARDS_VARIABLE] == folder.name
