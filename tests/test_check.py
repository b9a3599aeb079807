"""check-cards: every fault with its line, in every kind of card; what a reviewer would ask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfmodel import catalog, check
from perfmodel.catalog import FOLDERS
from perfmodel.cli import main
from perfmodel.errors import CardError, InputError
from perfmodel.paths import data_dir

CARDS = [p for folder in FOLDERS.values() for p in sorted(data_dir(folder).glob("*.toml"))]
GB300, V4, K3 = (
    (data_dir(kind) / f"{name}.toml").read_text()
    for kind, name in (("hardware", "gb300-nvl72"), ("models", "deepseek-v4-pro"),
                       ("models", "kimi-k3"))
)  # fmt: skip
VLLM = (data_dir("engines") / "vllm.toml").read_text()
FIXED = (data_dir("protocols") / "fixed.toml").read_text()


def findings(path: Path) -> tuple[list[check.Finding], list[check.Finding]]:
    found = check.check(check.card_files([path]))
    assert found == sorted(found, key=lambda f: f.line)
    return [f for f in found if not f.warning], [f for f in found if f.warning]


@pytest.mark.parametrize("path", CARDS, ids=lambda p: p.stem)
def test_the_cards_of_the_project_have_no_faults(path: Path) -> None:
    faults, warnings = findings(path)
    assert not faults
    if path.parent.name == "hardware":  # of machines every source is used
        assert not [w for w in warnings if "without a range" not in w.expected]


CHIP = '[chip]\nname = "GB300"'
# card, text in it, text instead, the line of the new text that is meant, field, words
FAULTS: list[tuple[str, str, str, str, str, str]] = [
    (GB300, '"8.0 TB/s"', '"8 GB"', '"8 GB"', "memory.bandwidth.value", "converts to B/s"),
    (GB300, '"8.0 TB/s", kind = "vendor"', '"8 TB/s", kind = "guess"', '"guess"',
     "memory.bandwidth.kind", "vendor, measured, estimate"),
    (GB300, '"8.0 TB/s", kind = "vendor", source = "ACC"', '"8 TB/s", kind = "vendor", source = "X"',
     'source = "X"', "memory.bandwidth.source", "key of [sources]"),
    (GB300, '"8.0 TB/s", kind = "vendor", source = "ACC"', '"8 TB/s", kind = "vendor"',
     '"8 TB/s"', "memory.bandwidth.source", "missing"),
    (GB300, 'low = "190 GB/s"', 'low = "300 GB/s"', "300 GB/s", "host.bandwidth", "out of order"),
    (GB300, 'low = "190 GB/s"', 'low = "x"', 'low = "x"', "host.bandwidth.low", "number with a unit"),
    (GB300, 'low = "190 GB/s"', 'lo = "190 GB/s"', "lo =", "host.bandwidth.'lo'", "unknown key"),
    (GB300, "[memory]", "[memori]", "[memori]", "memori", "expected memory"),
    (GB300, 'capacity = { value = "288 GB"', 'capacty = { value = "288 GB"', "capacty",
     "memory.capacty", "expected capacity"),
    (GB300, "gpus = { value = 72,", "gpus = { value = 7.2,", "7.2,", "scale_up.gpus.value", "whole"),
    (GB300, '"15 PFLOP/s"', '"1500 TFLOP/s"', '"1500 TF', "chip.peak_fp4", "chip.peak_fp8"),
    (GB300, '"1.875 kW"', '"1.2 kW"', '"1.2 kW"', "power.rack_it", "power.chip"),
    (GB300, "moe_fp4 = {", "# moe_fp4 = {", "[efficiency]", "efficiency.moe_fp4", "missing"),
    (GB300, 'profile = "as sold"', 'profile = "new"', '"new"', "profile", "'as sold'"),
    (GB300, 'date = "2026-11-30"', 'date = "soon"', '"soon"', "date", "a date such as"),
    (GB300, 'ACC = "stas00', 'ACC = ""\nACC2 = "stas00', 'ACC = ""', "sources.ACC", "full citation"),
    (GB300, 'ACC = "stas00', 'ACC = 3\nACC2 = "stas00', "ACC = 3", "sources.ACC", "full citation"),
    (GB300, CHIP, '[chip]\nname = """\nGB\n300"""', 'name = """', "chip.name", "printable"),
    (GB300, 'also = ["gb300"]', 'also = [\n    "gb300",\n    # odd\n    3,\n]', "    3,", "also.1",
     "string"),
    (GB300, 'also = ["gb300"]', "also = 3", "also = 3", "also", "list"),
    (GB300, "bandwidth = { value = \"8.0 TB/s\", kind = \"vendor\", source = \"ACC\" }",
     "[memory.bandwidth]\nvalue = \"8.0 TB/s\"\nkind = \"vendor\"\nsource = \"NO\"", '"NO"',
     "memory.bandwidth.source", "key of [sources]"),
    (GB300, "bandwidth = { value = \"8.0 TB/s\", kind = \"vendor\", source = \"ACC\" }",
     "bandwidth.value = \"8.0 TB/s\"\nbandwidth.kind = \"no\"\nbandwidth.source = \"ACC\"", '"no"',
     "memory.bandwidth.kind", "expected one of"),
    (GB300, "bandwidth = { value = \"8.0 TB/s\",", "\"bandwidth\" = { 'value' = \"8 parsec\",",
     "parsec", "memory.bandwidth.value", "converts to B/s"),
    (V4, "heads = 128", "heads = 0", "heads = 0", "attention.csa.heads", "greater than 0"),
    (V4, "o_groups = 16", "o_groups = 7", "o_groups = 7", "attention.csa.o_groups", "divide heads"),
    (V4, 'type = "moe"', 'type = "moo"', "[ffn.moe]", "ffn.moe", "moe"),
    (V4, '    "hca/moe"', '    "hcb/moe"', "hcb/moe", "shape.order[0]", "ATTENTION/FFN"),
    (V4, "hidden_size = 7168", "hidden_size = 7168.5", "7168.5", "shape.hidden_size", "int"),
    (V4, "overlap = true", "overlap = 1", "overlap = 1", "attention.csa.overlap", "boolean"),
    (V4, "overlap = true", "overlapp = true", "overlapp", "attention.csa.overlapp", "unknown key"),
    (V4, "entry_bytes = 584", "entry_bytes = inf", "entry_bytes = inf",
     "precision.native.cache.entry_bytes", "finite"),
    (V4, "value = 1.6e12", 'value = "many"', '"many"', "published.total_parameters.value", "number"),
    (V4, "hash_layers = 3", "hash_layers = 99999", "99999", "ffn.moe.hash_layers", "1000"),
    (K3, 'experts = "mxfp4"', 'experts = "fp3"', '"fp3"', "precision.native.weights.experts",
     "number format"),
    (K3, "2 = 2.45", "2 = 9.5", "2 = 9.5", "draft.dspark.acceptance '2'", "counts the bonus"),
    (K3, "block_layers = 12", "", "[residual]", "residual", "block_layers"),
    (K3, "layers = 93", "layers = 94", "order = [", "shape.order", "93 layers listed"),
    (VLLM, "kernel_scale =", "kernel_scal =", "kernel_scal =", "values.kernel_scal", "kernel_scale"),
    (VLLM, 'name = "', 'nam = "', 'nam = "', "nam", "expected name"),
    (FIXED, "wave = { value = ", "wave = { value = 2, was = ", "was", "values.wave.'was'", "unknown"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "old", "new", "mark", "field", "words"), FAULTS)
def test_a_fault_is_found_on_its_line(
    text: str, old: str, new: str, mark: str, field: str, words: str, tmp_path: Path
) -> None:
    assert old in text
    broken = text.replace(old, new, 1)
    path = tmp_path / "card.toml"
    path.write_text(broken)
    at = [n for n, line in enumerate(broken.splitlines(), 1) if mark in line]
    faults, _ = findings(path)
    named = [f for f in faults if f.line in at and words in str(f)]
    assert named, (at, [str(f) for f in faults])
    shown = str(named[0])
    assert field.split(" ")[0] in shown and shown.startswith(f"{path}:{named[0].line}: ")
    assert shown.isprintable()
    with pytest.raises(CardError):  # what is a fault here is refused where cards are read
        what = catalog.card_kind(catalog.load_toml(path))
        catalog.read_card(check.CLASSES[what or "system"], path)


def test_all_faults_are_found_at_once(tmp_path: Path) -> None:
    """Unknown keys, wrong numbers, two slips in one number, and parts that don't fit together."""
    text = GB300
    for old, new in (
        ('"8.0 TB/s", kind = "vendor"', '"8 GB", kind = "guess"'),
        ('"15 PFLOP/s"', '"1500 TFLOP/s"'),
        ("neocloud =", "neoclod ="),
        ("gemm_fp8 =", "gemm_fp9 ="),
        ('"1.875 kW"', '"1.2 kW"'),
        ('PUE = "', 'PUE = ""\nPUE2 = "'),
        ('vendor = "NVIDIA"', "vendor = 3"),
    ):
        assert old in text
        text = text.replace(old, new, 1)
    path = tmp_path / "card.toml"
    path.write_text(text)
    faults, _ = findings(path)
    assert {f.field for f in faults} == {
        "vendor", "sources.PUE", "chip.peak_fp4", "memory.bandwidth.value", "memory.bandwidth.kind",
        "power.rack_it", "price.neoclod", "efficiency.gemm_fp9", "efficiency.gemm_fp8",
    }  # fmt: skip
    assert len(faults) == 9
    lines = text.splitlines()
    assert all(f.field.split(".")[-1] in lines[f.line - 1] for f in faults
               if f.field != "efficiency.gemm_fp8" and "bandwidth" not in f.field)  # fmt: skip


NUMBERS = [
    (path, at)
    for path in (data_dir("hardware") / "b300-nvl8.toml", data_dir("engines") / "trtllm.toml")
    for at in (
        ("memory", "capacity"), ("floors", "kernel"), ("efficiency", "unhidden"), ("values", "wave"),
        ("values", "sequence"),
    )
    if at[0] in catalog.load_toml(path) and at[1] in catalog.load_toml(path)[at[0]]
]  # fmt: skip
WRONG: list[tuple[str, str]] = [
    ("value", "-1"), ("value", "nan"), ("value", '"fast"'), ("value", "true"), ("value", "[]"),
    ("kind", '"guess"'), ("kind", "[]"), ("source", '"NOBODY"'), ("source", "{}"), ("low", '"1e300"'),
]  # fmt: skip


@pytest.mark.parametrize(("path", "at"), NUMBERS, ids=str)
@pytest.mark.parametrize(("key", "wrong"), WRONG)
@pytest.mark.parametrize("spread", [False, True])
def test_every_slip_of_a_number(
    path: Path, at: tuple[str, str], key: str, wrong: str, spread: bool, tmp_path: Path
) -> None:
    """Written in one line, or as a table of its own with a line for each key."""
    lines = path.read_text().splitlines()
    number = catalog.load_toml(path)[at[0]][at[1]]
    parts = {k: json.dumps(v) for k, v in number.items()} | {key: wrong}
    pairs = [f"{k} = {v}" for k, v in parts.items()]
    section = lines.index(f"[{at[0]}]")
    old = next(i for i in range(section, len(lines)) if lines[i].startswith(f"{at[1]} = "))
    if spread:
        end = next((i for i in range(old, len(lines)) if lines[i].startswith("[")), len(lines))
        lines[end:end] = [f"[{at[0]}.{at[1]}]", *pairs]
        del lines[old]
        line = end + 1 + list(parts).index(key)
    else:
        lines[old] = f"{at[1]} = {{ {', '.join(pairs)} }}"
        line = old + 1
    card = tmp_path / path.name
    card.write_text("\n".join(lines) + "\n")
    faults, _ = findings(card)
    mine = [f for f in faults if f.field.startswith(".".join(at))]
    assert len(faults) == len(mine) >= 1
    assert any(f.line == line and f.field == ".".join((*at, key)) for f in mine), faults


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (b"id = 'a'\nname = \n", 2, "not valid TOML"),
        (b"id = 'a'\nname = 'b", 2, "not valid TOML"),
        (b"id = 'a'\n\n\xff\xfe = 1", 3, "not UTF-8"),
        (b"", 1, "empty"),
        (b"# only words\n", 1, "empty"),
        (b"id = 'a'\nid = 'b'", 2, "not valid TOML"),
        (b"x = 1\n" * 200_001, 1, "at most"),
        (b"id = 'a'\n[what]\nis = 'this'\n", 1, "of no kind; expected [chip]"),
        (b"[chip]\n", 1, "missing"),
        (b"[values]\nx = 1\n", 2, "unknown key"),
        (b"sources = 3\n[chip]\n", 1, "sources: 3: expected a table"),
        (b"[" + b".".join([b"a"] * 3000) + b"]\nx = 1\n", 1, "of no kind"),
    ],
)
def test_files_that_are_no_cards(content: bytes, line: int, words: str, tmp_path: Path) -> None:
    path = tmp_path / "card.toml"
    path.write_bytes(content)
    faults, _ = findings(path)
    assert [f for f in faults if f.line == line and words in str(f)], [str(f) for f in faults]


def test_other_files_beside_cards(tmp_path: Path) -> None:
    """Nothing reads them: a warning in a folder, a fault where such a file is named."""
    (tmp_path / "gb300-nvl72.toml").write_text(GB300)
    other = tmp_path / "pyproject.toml"
    other.write_text('[project]\nname = "x"\n')
    (said,) = [f for f in check.check(check.card_files([tmp_path])) if f.file == str(other)]
    assert said.warning and "of no kind" in said.expected
    assert not findings(other)[1] and "of no kind" in findings(other)[0][0].expected
    both = check.card_files([tmp_path, other])
    assert both == {tmp_path / "gb300-nvl72.toml": False, other: True}


def test_a_card_in_the_wrong_folder(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "gb300-nvl72.toml"
    path.write_text(GB300)
    faults, _ = findings(path)
    assert "a card of a machine; expected a model in models/" in str(faults[0])


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    text=st.sampled_from([GB300, V4, FIXED]), start=st.integers(0, 20_000),
    length=st.integers(0, 60), new=st.text(max_size=12),
)  # fmt: skip
def test_no_text_makes_it_fail(
    text: str, start: int, length: int, new: str, tmp_path: Path
) -> None:
    path = tmp_path / "card.toml"
    start %= len(text)
    broken = text[:start] + new + text[start + length :]
    path.write_text(broken, encoding="utf-8", errors="replace", newline="")
    for f in check.check({path: True}):
        assert 1 <= f.line <= broken.count("\n") + 1
        assert str(f).isprintable() and len(str(f)) < 2000


# ---- what a reviewer would ask


@pytest.mark.parametrize(
    ("text", "old", "new", "field", "words"),
    [
        (GB300, 'ACC = "stas', 'OTHER = "x y z"\nACC = "stas', "sources.OTHER", "no number names"),
        (GB300, '"8.0 TB/s"', '"801 TB/s"', "memory.bandwidth", "more than 10 times beyond"),
        (GB300, '"240 GB"', '"2 GB"', "host.memory", "more than 10 times beyond"),
        (V4, "hidden_size = 7168", "hidden_size = 716800", "shape.hidden_size", "beyond"),
        (
            K3,
            "experts_per_token = 16",
            "experts_per_token = 320",
            "ffn.moe.experts_per_token",
            "10",
        ),
        (
            GB300,
            'id = "gb300-nvl72"',
            'id = "fast"',
            "id",
            "expected 'gb300-nvl72', the file's name",
        ),
    ],
)
def test_questions_are_warnings(
    text: str, old: str, new: str, field: str, words: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert old in text
    name = {GB300: "gb300-nvl72", V4: "deepseek-v4-pro", K3: "kimi-k3"}[text]
    path = tmp_path / f"{name}.toml"
    path.write_text(text)
    before = {(w.field, w.expected) for w in findings(path)[1]}
    path.write_text(text.replace(old, new, 1))
    faults, warnings = findings(path)
    assert not faults
    (asked,) = [w for w in warnings if (w.field, w.expected) not in before]
    assert asked.field == field and words in asked.expected
    assert new.partition(" = ")[0].strip('"') in path.read_text().splitlines()[asked.line - 1]
    assert main(["check-cards", str(path)]) == 0  # a question is no fault
    assert f"{path}:{asked.line}: warning: {field}: " in capsys.readouterr().out


def test_estimates_without_a_range_are_asked_about(tmp_path: Path) -> None:
    path = tmp_path / "gb300-nvl72.toml"
    path.write_text(GB300)
    asked = {w.field for w in findings(path)[1] if "without a range" in w.expected}
    data: dict[str, Any] = catalog.load_toml(path)
    assert asked == {
        f"{section}.{name}"
        for section, part in data.items()
        if isinstance(part, dict)
        for name, q in part.items()
        if isinstance(q, dict) and q["kind"] == "estimate" and "low" not in q and "high" not in q
    }
    assert "power.all_in" in asked


# ---- the command


def test_the_command_counts_and_exits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hardware").mkdir()
    good, bad = tmp_path / "hardware" / "gb300-nvl72.toml", tmp_path / "bad.toml"
    good.write_text(GB300)
    assert main(["check-cards", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 card: 0 faults, ")
    bad.write_text(FIXED.replace("lengths =", "length =", 1))
    assert main(["check-cards", str(tmp_path), str(bad)]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("2 cards: 2 faults, ") and not err
    (line,) = [n for n, x in enumerate(bad.read_text().splitlines(), 1) if x.startswith("length =")]
    assert f"{bad}:{line}: values.length: " in out
    assert main(["check-cards", str(bad), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["cards"], told["faults"]) == (1, 2)
    assert told["warnings"] == sum(f["warning"] for f in told["findings"])
    assert all(f["file"] == str(bad) and f["line"] >= 1 for f in told["findings"])


@pytest.mark.parametrize("name", ["absent.toml", "absent", "empty"])
def test_paths_that_hold_no_cards(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=name):
        check.card_files([tmp_path / name])
    assert main(["check-cards", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
