"""The deployment report: parameters, a real PDF, failures."""

import json
from pathlib import Path

import pypdf
import pytest

from perfmodel import deployment, report, show
from perfmodel.errors import InputError
from perfmodel.paths import data_dir

SMALL = {"systems": ["h200-nvl8", "gb300-nvl72"]}


@pytest.fixture(scope="module")
def pdf(tmp_path_factory: pytest.TempPathFactory) -> pypdf.PdfReader:
    out = tmp_path_factory.mktemp("report") / "new folder" / "d.pdf"
    assert report.render("deployment", SMALL, out, progress=False) == out
    return pypdf.PdfReader(out)


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A report whose cell fails."""
    cell = {"cell_type": "code", "execution_count": None, "outputs": []}
    notebook = {
        "cells": [
            {**cell, "id": "a", "metadata": {"tags": ["parameters"]}, "source": "n: int = 1"},
            {**cell, "id": "b", "metadata": {}, "source": "x = n\nassert x > 5, 'too small'\n"},
        ],
        "metadata": {"language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    folder = tmp_path / "reports"
    folder.mkdir()
    (folder / "broken.ipynb").write_text(json.dumps(notebook))
    monkeypatch.setattr(report, "data_dir", lambda name: folder)
    return "broken"


def test_lists_reports_and_parameters() -> None:
    assert "deployment" in report.list_reports()
    defaults = report.parameters("deployment")
    assert defaults["model"] == "deepseek-v4-pro"
    assert defaults["interactivity_target_tok_s_user"] == 50
    assert defaults["max_gpus"] is None


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"contex_token": 1}, ["contex_token", "did you mean context_tokens", "allowed: model"]),
        ({"model": "gpt-9"}, ["model", "gpt-9", "deepseek-v4-pro"]),
        ({"systems": ["h900"]}, ["systems", "h900", "h200-nvl8"]),
        ({"systems": []}, ["systems", "empty"]),
        ({"systems": 7}, ["systems", "7", "list of text"]),
        ({"systems": ["h200-nvl8", "h200-nvl8"]}, ["systems", "twice"]),
        ({"context_tokens": "many"}, ["context_tokens", "many", "whole number"]),
        ({"context_tokens": 1.5}, ["context_tokens", "1.5", "whole number"]),
        ({"context_tokens": True}, ["context_tokens", "True"]),
        ({"context_tokens": float("inf")}, ["context_tokens", "inf"]),
        ({"context_tokens": 0}, ["context_tokens", "0", "out of range"]),
        ({"context_tokens": 10**12}, ["context_tokens", "out of range"]),
        ({"precision": "fp3"}, ["precision", "fp3", "native"]),
        ({"mode": "fast"}, ["mode", "fast", "calibrated", "speed-of-light"]),
        ({"power_basis": "wall"}, ["power_basis", "wall", "all_in", "chip"]),
        ({"price_basis": "free"}, ["price_basis", "free", "rental"]),
        ({"interactivity_target_tok_s_user": -1}, ["interactivity_target", "-1", "> 0"]),
        ({"interactivity_target_tok_s_user": float("nan")}, ["interactivity_target", "nan"]),
        ({"draft_tokens": -1}, ["draft_tokens", "-1"]),
        ({"draft_tokens": 1, "acceptance_length": 3}, ["acceptance_length", "1 to 2"]),
        ({"max_gpus": 0}, ["max_gpus", "0"]),
    ],
)
def test_bad_parameters_are_refused_before_anything_runs(
    params: dict, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "execute", lambda *a, **k: pytest.fail("the notebook ran"))
    out = tmp_path / "no" / "x.pdf"
    with pytest.raises(InputError) as caught:
        report.render("deployment", params, out)
    for word in words:
        assert word in str(caught.value)
    assert not out.parent.exists()


def test_unknown_report_and_format(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'nothing' is unknown, expected one of .*deployment"):
        report.render("nothing", {}, tmp_path / "x.pdf")
    with pytest.raises(InputError, match="'docx' is unknown, expected one of pdf, html, ipynb"):
        report.render("deployment", {}, tmp_path / "x.docx", fmt="docx")


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(report.ReportError, match="is a folder"):
        report.render("deployment", {}, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(report.ReportError, match="can't be written"):
        report.render("deployment", {}, tmp_path / "file" / "x.pdf")


def test_parse_params(tmp_path: Path) -> None:
    pairs = ["model=kimi-k3", "context_tokens=8192", 'systems=["a"]', "max_gpus=null", "x=a=b"]
    assert report.parse_params(pairs) == {
        "model": "kimi-k3", "context_tokens": 8192, "systems": ["a"], "max_gpus": None, "x": "a=b",
    }  # fmt: skip
    for name, text in {
        "p.yaml": "model: m\nsystems: [a, b]\n",
        "p.toml": 'model = "m"\nsystems = ["a", "b"]\n',
        "p.json": '{"model": "m", "systems": ["a", "b"]}',
    }.items():
        (tmp_path / name).write_text(text)
        got = report.parse_params(["model=n"], tmp_path / name)
        assert got == {"model": "n", "systems": ["a", "b"]}, name


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("p.json", "{", "can't be read"),
        ("p.json", "[1]", "expected names and values"),
        ("p.yaml", "a: [", "can't be read"),
        ("p.txt", "", "expected a name ending in"),
        ("missing.toml", None, "No such file"),
    ],
)
def test_bad_parameter_file(tmp_path: Path, name: str, text: str | None, word: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=word):
        report.parse_params([], tmp_path / name)


def test_bad_pair() -> None:
    with pytest.raises(InputError, match="'model', expected NAME=VALUE"):
        report.parse_params(["model"])


def test_systems_may_be_one_text() -> None:
    got = report.resolve("deployment", {"systems": "h200-nvl8, gb300-nvl72"})
    assert got["systems"] == ["h200-nvl8", "gb300-nvl72"]


def test_notebook_is_stored_without_outputs() -> None:
    notebook = json.loads((data_dir("reports") / "deployment.ipynb").read_text())
    for cell in notebook["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None
        assert len("".join(cell["source"]).splitlines()) <= 20, "logic belongs in the package"


@pytest.mark.slow
def test_failing_cell_is_named_and_nothing_is_left(failing: str, tmp_path: Path) -> None:
    out = tmp_path / "out" / "x.pdf"
    with pytest.raises(report.ReportError) as caught:
        report.render(failing, {"n": 2}, out, progress=False)
    assert "AssertionError: too small" in str(caught.value)
    assert "at: assert x > 5, 'too small'" in str(caught.value)
    assert list(out.parent.iterdir()) == []
    out.write_text("the old one")
    with pytest.raises(report.ReportError):
        report.render(failing, {}, out, progress=False)
    assert out.read_text() == "the old one"
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.slow
def test_pdf_reads_as_a_report(pdf: pypdf.PdfReader) -> None:
    assert 4 <= len(pdf.pages) <= 10
    text = " ".join(" ".join(p.extract_text() for p in pdf.pages).split())
    for words in (
        "Output per megawatt at a given interactivity", "deepseek-v4-pro", "h200-nvl8",
        "GB300 NVL72", "At 50 tok/s/user", "Figure 1:", "Figure 2:", "Table 1:", "(1)", "(2)",
        "How far to trust this", "for 90 % of measured rows", "Extrapolated", "Sources", "1.",
    ):  # fmt: skip
        assert words in text, words
    for words in ("@fig-", "@tbl-", "None", "nan", "$", "Traceback", "/tmp", "\\["):
        assert words not in text, words


@pytest.mark.slow
def test_pdf_metadata_and_fonts(pdf: pypdf.PdfReader) -> None:
    assert pdf.metadata is not None
    assert pdf.metadata.title == "Output per megawatt at a given interactivity"
    assert pdf.metadata.creation_date is not None
    assert "version" in str(pdf.metadata.get("/Keywords"))
    seen = 0
    for page in pdf.pages:
        for ref in page["/Resources"].get("/Font", {}).values():
            font = ref.get_object()
            child = font["/DescendantFonts"][0].get_object() if "/DescendantFonts" in font else font
            descriptor = child["/FontDescriptor"].get_object()
            assert any(k in descriptor for k in ("/FontFile", "/FontFile2", "/FontFile3")), font
            seen += 1
    assert seen


@pytest.mark.slow
def test_executed_notebook_has_no_machine_paths(tmp_path: Path) -> None:
    out = report.render(
        "deployment", {"systems": "h200-nvl8"}, tmp_path / "x.ipynb", "ipynb", False
    )
    text = out.read_text()
    assert "papermill" not in json.loads(text)["metadata"]
    assert str(tmp_path) not in text and "/perfmodel-" not in text


def test_unreachable_target_is_said() -> None:
    params = {**report.resolve("deployment", SMALL), "interactivity_target_tok_s_user": 1e6}
    study = deployment.Study(**params)
    assert "None of the systems reaches 1e+06 tok/s/user" in study.answer()
    for part in ("breakdown", "memory", "prefill", "points", "frontier"):
        getattr(study, f"show_{part}")()


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.5, "1,230"), (0.01234, "0.0123"), (999.9, "1,000"), (0.0, "0"), (None, "–"),
     (float("nan"), "–"), (float("inf"), "∞"), (-2.5, "-2.50")],
)  # fmt: skip
def test_number(value: float | None, text: str) -> None:
    assert show.number(value) == text


def test_escape() -> None:
    assert show.escape("a|b_c\n*d* [1]") == r"a\|b\_c \*d\* \[1\]"
