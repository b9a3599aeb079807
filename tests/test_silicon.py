"""Cleaning of the measured serving rows: each rule on made-up rows, then the real file."""

import pandas as pd
import pytest

from perfmodel.errors import InputError
from perfmodel.validation import silicon

INFERENCEX = "source_file=2026-04-06.csv; model=m; silicon_concurrency={c}; measured=2026-02-01"
OLDER = "source_file=2026-03-25.csv; model=m; silicon_concurrency={c}; measured=2026-02-01T01:02Z"
DB_DUMP = "db-dump/2026-04-27; config_id=1; silicon_concurrency={c}; measured=2026-02-01T00:00Z"
HOME = "/".join(("", "Users", ""))  # a path of the collection, not of this machine
HARRLI = f"source_file={HOME}harrli/projects/data/h100_sxm/trtllm/x.csv; silicon_concurrency={{c}}"
GAP = "source_file=kimi-k2.5-gap-analysis.csv; silicon_concurrency={c}"
_AGG = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
_count = iter(range(10**6))


def _row(source=INFERENCEX, layout=(4, 1, 4, 1), c=8, **changes):
    """Return one raw row; its times differ from those of all others unless given."""
    number = next(_count)
    row = dict.fromkeys((*silicon._TEXT, *silicon._NUMBERS))
    row |= {
        "id": f"row{number}",
        "silicon_data_source": source.format(c=c),
        "backend": "vllm",
        "backend_version": "0.17.0",
        "model_path": "MiniMaxAI/MiniMax-M2.5",
        "system": "b200_sxm",
        "precision": "fp8",
        "mode": "agg",
        "isl": 1024,
        "osl": 1024,
        "batch_size": c,
        "silicon_ttft_ms": 100 + number,
        "silicon_tpot_ms": 10 + number / 100,
    }
    return row | dict(zip(_AGG, layout, strict=True)) | changes


@pytest.fixture
def clean(tmp_path):
    """Return a function: raw rows to cleaned rows and the report."""

    def run(*rows):
        path = tmp_path / "sample.csv"
        pd.DataFrame(rows).to_csv(path, index=False)
        return silicon.clean_with_report(path)

    return run


def _dropped(result):
    rows, report = result
    assert sum(report.dropped.values()) + report.kept == report.rows
    assert report.kept == len(rows)
    assert len(report.reasons) == report.rows - report.kept
    return report.dropped


def test_columns_units_and_group(clean):
    row = _row(layout=(4, 1, 1, 4), c=16, precision=None)
    rows, report = clean(row)
    assert list(rows.columns) == list(silicon.COLUMNS)
    got = rows.iloc[0]
    assert got["group"] == "minimax|b200_sxm|vllm|bf16|agg|n4|dp1|ep4"
    assert (got["weights_precision"], got["measured"]) == ("bf16", "2026-02-01")
    assert got["src"] == "ix-2026-04-06"
    assert got["concurrency"] == 16
    assert got["ttft_mean_ms"] == row["silicon_ttft_ms"]
    assert got["tpot_mean_ms"] == row["silicon_tpot_ms"]
    assert "1 rows, 1 kept" in report.text()
    assert all(rule in report.text() for rule in silicon.NOT_APPLIED)


@pytest.mark.parametrize(
    ("written", "backend", "layout"),
    [
        ((8, 1, 8, 1), "sglang", (8, 8, 1, 1)),
        ((8, 1, 1, 8), "sglang", (8, 8, 1, 8)),
        ((64, 1, 8, 8), "sglang", (8, 8, 1, 8)),
        ((16, 1, 4, 4), "trtllm", (4, 4, 1, 4)),
        ((1, 64, 8, 8), "trtllm", (8, 1, 8, 8)),
        ((1, 4, 2, 2), "trtllm", (2, 1, 2, 2)),
        ((4, 1, 2, 2), "sglang", (2, 2, 1, 2)),
        ((4, 4, 1, 16), "vllm", (4, 1, 4, 4)),
        ((2, 2, 1, 4), "vllm", (2, 1, 2, 2)),
        ((1, 8, 1, 8), "trtllm", (8, 1, 8, 8)),
        ((1, 4, 4, 1), "trtllm", (4, 1, 4, 1)),
        ((1, 1, 1, 1), "vllm", (1, 1, 1, 1)),
    ],
)
def test_layout_encodings(clean, written, backend, layout):
    rows, _ = clean(_row(layout=written, backend=backend))
    columns = ["n_gpus", "attention_tp", "attention_dp", "moe_ep"]
    assert tuple(rows.loc[0, columns]) == layout


def test_layout_of_harrli_rows(clean):
    """They leave DP and expert sizes empty or 0 and write no squares."""
    rows, _ = clean(
        _row(HARRLI, (8, None, 1, 1), model_path="Qwen/Qwen3-32B"),
        _row(HARRLI, (2, 0, 0, 0), model_path="Qwen/Qwen3-32B"),
        _row(HARRLI, (4, None, 2, 2), model_path="Qwen/Qwen3-235B-A22B-FP8"),
    )
    assert rows["n_gpus"].tolist() == [8, 2, 4]
    assert rows["moe_ep"].tolist() == [1, 1, 2]
    assert rows["measured"].isna().all()


def test_copy_from_the_better_source_stays(clean):
    times = {"silicon_ttft_ms": 123.456, "silicon_tpot_ms": 7.891}
    rounded = {"silicon_ttft_ms": 123.46, "silicon_tpot_ms": 7.89}
    copies = [
        _row(GAP, **rounded),
        _row(INFERENCEX, (4, 4, 1, 16), **times),
        _row(OLDER, (4, 1, 1, 4), **times),
        _row(OLDER, (4, 1, 1, 4), **times),
    ]
    rows, report = clean(*copies)
    assert rows["id"].tolist() == [copies[2]["id"]]
    assert list(report.dropped.values()) == [3]
    best = _row(DB_DUMP, **times)
    rows, _ = clean(*copies, best)
    assert rows["id"].tolist() == [best["id"]]


def test_not_a_copy(clean):
    """Another concurrency, system or mode, or a time 0.02 ms off, is another measurement."""
    times = {"silicon_ttft_ms": 123.45, "silicon_tpot_ms": 7.89}
    rows, _ = clean(
        _row(**times),
        _row(**times, c=16),
        _row(**times, system="h200_sxm"),
        _row(**times | {"silicon_tpot_ms": 7.91}),
    )
    assert len(rows) == 4


def test_a_bad_row_takes_no_copy_with_it(clean):
    rows, _ = clean(
        _row(DB_DUMP, silicon_ttft_ms=5, silicon_tpot_ms=5, isl=0),
        _row(silicon_ttft_ms=5, silicon_tpot_ms=5),
    )
    assert len(rows) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"silicon_tpot_ms": 0}, "no positive"),
        ({"silicon_ttft_ms": -1}, "no positive"),
        ({"osl": None}, "no positive"),
        ({"system": None}, "no positive"),
        ({"mode": "other"}, "unknown mode"),
        ({"source": "somewhere; silicon_concurrency={c}"}, "unknown mode or source"),
        ({"source": None}, "unknown mode or source"),
        ({"source": "source_file=2026-04-06.csv; model=m"}, "no concurrency"),
        ({"c": 0}, "no concurrency"),
        ({"layout": (None, 1, 1, 1)}, "no TP size"),
        ({"layout": (0, 1, 1, 1)}, "no TP size"),
        ({"layout": (72, 1, 72, 1), "system": "gb200"}, "disaggregated cluster"),
        ({"layout": (64, 1, 64, 1), "system": "gb200"}, "disaggregated cluster"),
        ({"layout": (8, 1, 4, 1)}, "different GPU counts"),
        ({"model_path": "deepseek-ai/DeepSeek-R1", "backend": "trtllm"}, "speculation"),
        (
            {
                "source": INFERENCEX + "; image=lmsysorg/sglang:v0.5.9-cu130",
                "model_path": "Qwen/Qwen3.5-397B-A17B",
            },
            "speculation",
        ),
        ({"c": 512, "model_path": "openai/gpt-oss-120b", "system": "h100_sxm"}, "set aside"),
        (
            {"source": HARRLI, "layout": (1, None, 2, 1), "model_path": "Qwen/Qwen3-235B-A22B"},
            "set aside",
        ),
        ({"source": HARRLI, "model_path": "Qwen/Qwen3-32B", "system": "gb200"}, "set aside"),
        ({"source": HARRLI, "model_path": "nvidia/DeepSeek-R1-NVFP4"}, "set aside"),
        ({"source": HARRLI, "model_path": "nvidia/Llama-3.1-8B-Instruct-FP8"}, "set aside"),
        ({"source": HARRLI, "batch_size": 2}, "harrli: batch"),
    ],
)
def test_dropped(clean, changes, reason):
    good = _row()
    changes = dict(changes)
    source = changes.pop("source", INFERENCEX) or ""
    result = clean(good, _row(source, **changes))
    assert result[0]["id"].tolist() == [good["id"]]
    [(why, count)] = _dropped(result).items()
    assert reason in why and count == 1
    assert result[1].reasons["reason"].tolist() == [why]


@pytest.mark.parametrize(
    "changes",
    [
        {"source": DB_DUMP, "model_path": "deepseek-ai/DeepSeek-V3", "backend": "trtllm"},
        {"model_path": "deepseek-ai/DeepSeek-R1", "backend": "sglang"},
        {
            "source": INFERENCEX + "; image=lmsysorg/sglang:v0.5.9-cu130-amd64",
            "model_path": "Qwen/Qwen3.5-397B-A17B",
        },
        {"c": 512, "model_path": "openai/gpt-oss-120b", "system": "h200_sxm"},
    ],
)
def test_kept_beside_a_rule(clean, changes):
    changes = dict(changes)
    rows, _ = clean(_row(changes.pop("source", INFERENCEX), **changes))
    assert len(rows) == 1


def test_outlier_among_repeats(clean):
    """Over three times its repeats is a disturbed run; twice may be another software version."""
    times = [10, 50, 20]
    rows, report = clean(*(_row(c=c, silicon_tpot_ms=t) for c in (8, 16) for t in times[: c // 4]))
    assert rows["tpot_mean_ms"].tolist() == [10, 10, 20]
    assert sum(report.dropped.values()) == 2
    rows, _ = clean(_row(silicon_tpot_ms=10), _row(silicon_tpot_ms=20))
    assert len(rows) == 2


def _disagg(source, **changes):
    pools = {
        f"{pool}_{name}": value
        for pool in ("prefill", "decode")
        for name, value in {
            "num_workers": 2,
            "tp_size": 1,
            "attention_dp_size": 8,
            "moe_tp_size": 1,
            "moe_ep_size": 8,
        }.items()
        if f"{pool}_{name}" in silicon._NUMBERS
    }
    row = _row(source, (None,) * 4, c=256, mode="disagg", system="gb200", batch_size=None)
    return row | pools | changes


def test_disaggregated_rows(clean):
    good = _disagg(DB_DUMP)
    result = clean(
        good,
        _disagg(INFERENCEX, decode_num_workers=None, prefill_num_workers=None),
        _disagg(DB_DUMP, decode_num_workers=0),
    )
    assert result[0]["id"].tolist() == [good["id"]]
    got = result[0].iloc[0]
    assert got["group"] == "minimax|gb200|vllm|fp8|disagg|n8|dp8|ep8"
    assert got["concurrency"] == 128  # of one decode worker
    assert got["prefill_attention_dp_size"] == 8
    [(why, count)] = _dropped(result).items()
    assert "worker counts" in why and count == 2


def test_acceptance_holds_out_deployments(clean):
    rows, _ = clean(
        _row(c=8),
        _row(c=16),
        _row(layout=(8, 1, 8, 1)),
        _row(layout=(2, 1, 2, 1)),
        _row(layout=(1, 1, 1, 1)),
        _row(layout=(4, 1, 1, 4)),
        _row(layout=(4, 4, 1, 16)),
    )
    calibration = rows.iloc[[0, 2, 3, 5]].copy()
    calibration["group"] = [calibration["group"].iloc[0], "old", "name", rows["group"][5]]
    calibration.loc[3, "id"] = "renamed"
    got = silicon.acceptance(rows, calibration)
    # 0 and 1 share a calibrated group, 2 its id, 3 its measurement; 6 differs from 5 in DP
    assert got["id"].tolist() == rows["id"].iloc[[4, 6]].tolist()
    got = silicon.acceptance(rows, calibration, drop_twins=True)
    assert got["id"].tolist() == rows["id"].iloc[[4]].tolist()
    with pytest.raises(InputError, match=r"calibration: column 'group' is missing, expected"):
        silicon.acceptance(rows, calibration.drop(columns="group"))


def test_wrong_files(tmp_path, monkeypatch):
    path = tmp_path / "sample.csv"

    def error(content=None):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InputError) as caught:
            silicon.clean(path)
        message = str(caught.value)
        assert "sample.csv" in message and "expected" in message
        return message

    assert "No such file" in error()
    assert "not CSV" in error(b"")
    assert "not CSV" in error(b'a,b\n1,2\n3,4,5,6\n"')
    assert "not CSV" in error(b"\xff\xfe\x00\xd8")
    assert "more values" in error(b"a,b\n1,2,3\n")
    full = pd.DataFrame([_row()])
    assert "'moe_ep_size' is missing" in error(
        full.drop(columns="moe_ep_size").to_csv(index=False).encode()
    )
    assert "rows: 0" in error(full.iloc[:0].to_csv(index=False).encode())
    for value in ("four", "inf"):
        text = full.astype(object).assign(tp_size=value).to_csv(index=False)
        assert f"'tp_size', row 1: '{value}'" in error(text.encode())
    monkeypatch.setattr(silicon, "MAX_BYTES", 10)
    assert "at most 10" in error()


def test_find_sample_without_import(tmp_path, monkeypatch):
    """The metadata tell where the package is; its modules must not run."""
    package = tmp_path / "aiconfigurator_core"
    (package / "systems").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    info = tmp_path / "aiconfigurator_core-0.12.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: aiconfigurator-core\nVersion: 0.12.0\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert silicon.find_sample() is None  # installed, without the file
    sample = package / "systems" / "silicon_sample.csv"
    sample.touch()
    assert silicon.find_sample() == sample
    monkeypatch.setattr("sys.path", [])
    assert silicon.find_sample() is None


def test_calibration_half_comes_out(evidence, record_property):
    """The half that others cleaned: what comes out, with the same layout, and what is held out."""
    path = silicon.find_sample()
    if path is None:
        pytest.skip(f"{silicon.PACKAGE} is not installed")
    file = evidence / "evidence" / "serving_calibration.csv"
    if not file.is_file():
        pytest.skip(f"no measurements: {file} is not there")
    calibration = pd.read_csv(file)
    rows, report = silicon.clean_with_report(path)
    assert report.rows == 5221
    assert sum(report.dropped.values()) + report.kept == report.rows

    both = calibration.merge(rows, on="id", suffixes=("", "_ours"))
    share = both.groupby("mode").size() / calibration.groupby("mode").size()
    record_property("recall_agg", float(share["agg"]))
    record_property("recall_disagg", float(share["disagg"]))
    assert share["agg"] >= 0.99
    assert share["disagg"] >= 0.75  # the rest has its topology from a file we don't have
    for column in calibration.columns.drop("id"):
        theirs, ours = both[column], both[f"{column}_ours"]
        assert ((theirs == ours) | (theirs.isna() & ours.isna())).all(), column

    held_out = silicon.acceptance(rows, calibration)
    assert not set(held_out["group"]) & set(calibration["group"])
    # published for the other half: 1,195 aggregated rows (with a memory model) and 175
    count = held_out.groupby("mode").size()
    assert 1195 <= count["agg"] <= 1195 * 1.03
    assert 0.9 * 175 <= count["disagg"] <= 175
