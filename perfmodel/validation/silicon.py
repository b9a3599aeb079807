"""Measured serving rows of an optional package, cleaned for validation.

`silicon_sample.csv` of aiconfigurator-core 0.12.0 (Apache-2.0) holds 5,221 end-to-end rows: mean
TTFT and mean TPOT in ms, collected from InferenceX dumps and other labs' sweeps.  It repeats rows,
writes layouts in several ways and mixes in runs with speculative decoding that it doesn't label.
`clean` turns it into one row a measurement with the layout that ran, `acceptance` keeps the
deployments that no calibration row has seen.

No rule asks the model.  Two things still lean on judgement, so scores are a little optimistic: the
series set aside were named by the notes whose rules these are, after they had seen residuals of a
model, and which unlabelled rows ran multi-token prediction (`_HIDDEN_MTP`) is inferred.

What can't be had from the file alone: worker counts of the disaggregated rows in the date dumps,
the speculation label of DeepSeek-R1 (both are in an InferenceX JSON that is not in the package),
and whether a batch fits the KV cache (that needs a memory model; see `NOT_APPLIED`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import numpy as np
import pandas as pd

from perfmodel.errors import InputError

PACKAGE = "aiconfigurator-core"
MAX_BYTES = 64 * 2**20  # the file of 0.12.0 has 1.9 MB
_POOLS = ("prefill", "decode")
_LAYOUT = ("tp_size", "attention_dp_size", "moe_ep_size")
_TEXT = (
    *("id", "silicon_data_source", "backend", "backend_version", "model_path", "system"),
    *("precision", "mode", "gemm_quant_mode", "moe_quant_mode"),
)
_NUMBERS = (
    *("isl", "osl", "batch_size", "moe_tp_size", *_LAYOUT, "decode_moe_tp_size"),
    *(f"{pool}_{name}" for pool in _POOLS for name in ("num_workers", *_LAYOUT)),
    *("silicon_ttft_ms", "silicon_tpot_ms"),
)
# ISL and OSL in tokens (nominal), concurrency in requests (of one decode worker where mode is
# disagg), times in ms (means over the requests of a run), n_gpus of the decode worker.
COLUMNS = (
    *("id", "model_path", "system", "backend", "backend_version", "weights_precision", "mode"),
    *("isl", "osl", "n_gpus", "attention_tp", "attention_dp", "moe_ep", "concurrency"),
    *(f"{pool}_{name}" for pool in _POOLS for name in ("num_workers", *_LAYOUT)),
    *("gemm_quant_mode", "moe_quant_mode", "ttft_mean_ms", "tpot_mean_ms"),
    *("measured", "src", "group"),
)
# First match wins; a model that is not here goes by the last part of its path.
_FAMILIES = (
    *(("DeepSeek", "dsv3"), ("MiniMax-M2.5", "minimax"), ("Qwen3-235B", "qwen235")),
    *(("Qwen3-32B", "qwen32"), ("Qwen3.5", "qwen35"), ("Llama-3.1-70B", "llama70")),
    *(("Llama-3.1-8B", "llama8"), ("Kimi-K2", "kimi"), ("gpt-oss", "gptoss"), ("GLM-5", "glm5")),
)
# Of two copies of a measurement the one with the better layout stays: db-dump names its config.
_SOURCES = ("db-dump", "ix", "harrli", "gap-analysis")
_LARGEST_TP = 8  # GPUs; an aggregated row with more is a whole disaggregated cluster
_OUTLIER = 3.0  # times the median of the other runs of the same setting

# Inference from the measurements, not from a label.
_HIDDEN_MTP = (
    "speculation likely: R1, TRT-LLM, aggregated date dump without a db-dump copy",
    "speculation likely: Qwen3.5 FP8, date dump, image v0.5.9-cu130",
)
NOT_APPLIED = (
    "needed batch over twice the KV capacity, weights that don't fit: need a memory model",
    "speculation confirmed or excluded by the InferenceX JSON: not in the package",
    "topology of disaggregated date-dump rows: only in the InferenceX JSON",
)


@dataclass(frozen=True)
class Report:
    """What `clean` dropped and why: rows in and out, rows by reason, the reason of each row id."""

    file: str
    rows: int
    kept: int
    dropped: dict[str, int]
    reasons: pd.DataFrame = field(repr=False)  # columns: id, reason

    def text(self) -> str:
        """Return the counts as lines for a terminal."""
        lines = [f"{self.file}: {self.rows:,} rows, {self.kept:,} kept"]
        lines += [f"  {count:>5,} dropped: {reason}" for reason, count in self.dropped.items()]
        return "\n".join([*lines, *(f"        not applied: {rule}" for rule in NOT_APPLIED)])


def find_sample() -> Path | None:
    """Return the file in the installed optional package, or None where it isn't installed.

    Asks the package's metadata only: importing it would load its compiled part.
    """
    try:
        found = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(found.locate_file("aiconfigurator_core/systems/silicon_sample.csv")))
    return path if path.is_file() else None


def clean(path: Path | str) -> pd.DataFrame:
    """Return the usable rows of the file, in its order, with `COLUMNS`."""
    return clean_with_report(path)[0]


def clean_with_report(path: Path | str) -> tuple[pd.DataFrame, Report]:
    """Return the usable rows of the file and what was dropped; every dropped row has one reason.

    The rules and the counts to expect were published with the calibration half of the file
    (accuracy notes, sections 2 and 8).  Two of them are inference: no label says that the rows of
    `_HIDDEN_MTP` speculate.  R1 on TRT-LLM: TPOT of the date dumps is mostly 0.5-0.75 of db-dump
    (which has no speculation) at the same TTFT; without the label, all that have no copy in
    db-dump go, a few honest ones among them.  Qwen3.5: the image is that of a speculating series.
    R1 on SGLang B200 stays, as in the published half, though its TPOT is 0.67-0.91 of db-dump where
    there is one to compare: 27 rows to look at before trusting them.
    """
    raw = _read(Path(path))
    row = _normalise(raw)
    why = pd.Series("", index=raw.index)
    dropped: dict[str, int] = {}

    def drop(mask: pd.Series, reason: str) -> None:
        mask = mask.reindex(raw.index, fill_value=False) & (why == "")
        why[mask] = reason  # the first one that holds
        if mask.any():
            dropped[reason] = int(mask.sum())

    mode, src, total, n_gpus = (row[k] for k in ("mode", "src", "total", "n_gpus"))
    family, chip, backend = (row[k] for k in ("family", "system", "backend"))
    agg, ix, harrli = mode == "agg", src.str.startswith("ix-"), src == "harrli"
    valid = (row[["isl", "osl", "ttft_mean_ms", "tpot_mean_ms"]] > 0).all(axis=1)  # not if missing
    valid &= row[["id", "model_path", "system", "backend"]].notna().all(axis=1)
    drop(~valid, "no positive TTFT, TPOT or length, or no id, model, system or backend")
    unknown = ~mode.isin(["agg", "disagg"]) | (src == "other")
    drop(unknown, "unknown mode or source, so its encoding is unknown")
    drop(~(total > 0), "no concurrency")
    copies = _copies(row[why == ""])  # no good row goes as the copy of a bad one
    drop(copies, "duplicate: same system, mode, concurrency, TTFT and TPOT to 0.01 ms")
    drop(agg & ~(n_gpus > 0), "no TP size")
    lost = ~agg & ~(row[["n_gpus", "moe_ep", "decode_num_workers"]] > 0).all(axis=1)
    drop(lost, "disaggregated without worker counts (only in the InferenceX JSON)")
    drop(agg & (row["attention_tp"] > _LARGEST_TP), "disaggregated cluster, its GPUs written as TP")
    unequal = ~harrli & (row["experts_on"] != n_gpus)  # harrli leaves expert sizes open, at 0 or 1
    drop(unequal, "attention and experts need different GPU counts")

    drop(ix & agg & (family == "dsv3") & (backend == "trtllm"), _HIDDEN_MTP[0])
    image = raw["silicon_data_source"].str.contains(r"sglang:v0\.5\.9-cu130(?:;|$)")  # not -amd64
    fp8 = row["weights_precision"] == "fp8"
    drop(ix & agg & (family == "qwen35") & fp8 & image, _HIDDEN_MTP[1])

    vllm, aside = backend == "vllm", "series set aside: "
    gptoss = ix & (family == "gptoss") & (chip == "h100_sxm") & vllm
    drop(gptoss & (total == 512), aside + "gpt-oss H100 vLLM at concurrency 512")
    drop(harrli & (family == "qwen235") & (n_gpus == 1), aside + "Qwen3-235B said to run on 1 GPU")
    drop(harrli & (family == "qwen32") & (chip == "gb200"), aside + "Qwen3-32B GB200")
    drop(harrli & family.isin(["dsv3", "gptoss"]), aside + "R1 and gpt-oss of harrli")
    drop(harrli & (family == "llama8") & vllm, aside + "Llama-8B vLLM, prefix reuse suspected")
    batch = harrli & agg & (raw["batch_size"] != total)
    drop(batch, "harrli: batch is not the concurrency, DP attention or replicas written as TP")
    drop(_outliers(row[why == ""]), f"TPOT over {_OUTLIER:g} times the other runs of its setting")

    kept = why == ""
    report = Report(
        file=Path(path).name,
        rows=len(raw),
        kept=int(kept.sum()),
        dropped=dropped,
        reasons=pd.DataFrame({"id": raw["id"], "reason": why})[~kept].reset_index(drop=True),
    )
    result = row.loc[kept, list(COLUMNS)].reset_index(drop=True)
    return result.astype({"isl": "int64", "osl": "int64"}), report


def acceptance(
    cleaned: pd.DataFrame, calibration: pd.DataFrame, *, drop_twins: bool = False
) -> pd.DataFrame:
    """Return the cleaned rows of deployments that are in no calibration row.

    A group holds all lengths and concurrencies of a deployment, so none is seen in part.  A row
    whose id or measurement (system, mode, TTFT and TPOT to 0.01 ms) was calibrated on goes too.

    `drop_twins` also drops what may be a calibrated deployment under its other encoding: vLLM
    with expert parallelism is written as TP n or as DP n, and copies of one measurement carry
    both, so two groups that differ in DP alone need not be two deployments.
    """
    for name, frame in (("cleaned", cleaned), ("calibration", calibration)):
        for column in ("id", "group", "system", "mode", "ttft_mean_ms", "tpot_mean_ms"):
            if column not in frame:
                raise InputError(f"{name}: column {column!r} is missing, expected rows of clean()")
    seen = cleaned["group"].isin(calibration["group"]) | cleaned["id"].isin(calibration["id"])
    seen |= _measurement(cleaned).isin(_measurement(calibration))
    if drop_twins:
        known = _without_dp(calibration["group"]).dropna()
        seen |= _without_dp(cleaned["group"]).isin(known)
    return cleaned[~seen].reset_index(drop=True)


def _without_dp(group: pd.Series) -> pd.Series:
    """Return the group names less their DP where vLLM has expert parallelism, else missing."""
    twin = group.str.contains("|vllm|", regex=False) & ~group.str.endswith("|ep1")
    return group.str.replace(r"\|dp\d+", "", regex=True).where(twin & group.str.contains("|agg|"))


def _measurement(row: pd.DataFrame) -> pd.Series:
    times = [row[name].map("|{:.2f}".format) for name in ("ttft_mean_ms", "tpot_mean_ms")]
    return row["system"] + "|" + row["mode"] + times[0] + times[1]


def _copies(row: pd.DataFrame) -> pd.Series:
    """Return which rows repeat a measurement of a better source (or an earlier row of the same).

    Model and lengths are left out on purpose: the copies of R1 in db-dump are called V3.
    """
    rank = row["src"].str.replace(r"^ix-.*", "ix", regex=True).map(_SOURCES.index)
    ranked = row.assign(rank=rank).sort_values(["rank", "src"], kind="stable")
    key = ranked[["system", "mode", "total"]].assign(
        ttft=ranked["ttft_mean_ms"].round(2), tpot=ranked["tpot_mean_ms"].round(2)
    )
    return key.duplicated()


def _outliers(row: pd.DataFrame) -> pd.Series:
    """Return which rows took far longer than the other runs of their setting: a disturbed run."""

    def others(tpot: pd.Series) -> np.ndarray:
        values = tpot.to_numpy()
        rest = [np.delete(values, i) for i in range(len(values))]
        return np.array([np.median(r) if len(r) else math.inf for r in rest])

    setting = row.groupby(["group", "isl", "osl", "concurrency"])["tpot_mean_ms"]
    return row["tpot_mean_ms"] > _OUTLIER * setting.transform(others)


def _normalise(raw: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of the result for every row, good or bad, and some to judge it by."""
    row = raw.rename(columns={"silicon_ttft_ms": "ttft_mean_ms", "silicon_tpot_ms": "tpot_mean_ms"})
    source = raw["silicon_data_source"].fillna("")
    dump = source.str.extract(r"^source_file=(\d{4}-\d\d-\d\d)\.csv")[0]
    row["src"] = "other"
    row.loc[source.str.contains("gap-analysis.csv", regex=False), "src"] = "gap-analysis"
    row.loc[source.str.contains("/harrli/", regex=False), "src"] = "harrli"
    row.loc[source.str.startswith("db-dump/"), "src"] = "db-dump"
    row["src"] = row["src"].where(dump.isna(), "ix-" + dump)
    row["measured"] = source.str.extract(r"measured=(\d{4}-\d\d-\d\d)")[0]
    # batch_size is concurrency over DP as written, so wrong wherever DP is
    row["total"] = source.str.extract(r"silicon_concurrency=(\d{1,9})\b")[0].astype(float)
    row["weights_precision"] = raw["precision"].fillna("bf16")

    tp = raw["tp_size"]
    dp, ep, experts_tp = (  # harrli has them missing or 0 where there is nothing to split
        raw[name].fillna(1).clip(lower=1)
        for name in ("attention_dp_size", "moe_ep_size", "moe_tp_size")
    )
    own = row["src"] != "harrli"  # the InferenceX sources multiply TP by EP once too often
    # TP 64 (or DP 64) with experts 8x8 is TP8 EP8 (or DP8 EP8) on 8 GPUs
    square = own & (experts_tp > 1) & (experts_tp == ep) & (tp * dp == ep**2)
    square &= (tp == 1) | (dp == 1)
    # vLLM: TP 4, DP 4, EP 16 is DP4 EP4 on 4 GPUs
    both = own & (tp > 1) & (tp == dp) & (experts_tp == 1) & (ep == tp * dp)
    agg = {
        "attention_tp": tp.mask(square & (dp == 1), ep).mask(both, 1),
        "attention_dp": dp.mask(square & (tp == 1), ep),
        "moe_ep": ep.mask(both, tp),
        "experts_on": (experts_tp * ep).mask(square | both, tp.where(both, ep)),
    }
    disagg = {
        "attention_tp": raw["decode_tp_size"],
        "attention_dp": raw["decode_attention_dp_size"],
        "moe_ep": raw["decode_moe_ep_size"],
        "experts_on": raw["decode_moe_tp_size"] * raw["decode_moe_ep_size"],
    }
    is_agg = raw["mode"] == "agg"
    for name in agg:
        row[name] = agg[name].where(is_agg, disagg[name])
    row["n_gpus"] = row["attention_tp"] * row["attention_dp"]
    row["concurrency"] = row["total"].where(is_agg, row["total"] / raw["decode_num_workers"])

    model = raw["model_path"].fillna("")
    row["family"] = model.str.rsplit("/").str[-1].str.lower()
    for part, name in reversed(_FAMILIES):
        row.loc[model.str.contains(part, regex=False), "family"] = name
    parts = [row[name] for name in ("family", "system", "backend", "weights_precision", "mode")]
    for name, label in (("n_gpus", "n"), ("attention_dp", "dp"), ("moe_ep", "ep")):
        parts.append(label + row[name].map("{:.0f}".format))
    row["group"] = ["|".join(map(str, values)) for values in zip(*parts, strict=True)]
    return row


def _read(path: Path) -> pd.DataFrame:
    """Return the columns of the file that are needed, numbers as such; InputError if it's wrong."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise InputError(
                f"{path}: size is {size:,} bytes, expected at most {MAX_BYTES:,}: is it the sample?"
            )
        raw = pd.read_csv(path, dtype=str, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}, expected a CSV file to read") from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        what = str(error).strip().splitlines()[0][:120]
        raise InputError(f"{path}: content is not CSV ({what}), expected a CSV file") from error
    if not isinstance(raw.index, pd.RangeIndex):  # pandas takes surplus values for row names
        raise InputError(f"{path}: rows: more values than column names, expected as many")
    for name in (*_TEXT, *_NUMBERS):
        if name not in raw:
            has = ", ".join(map(str, raw.columns))[:120]
            raise InputError(f"{path}: column {name!r} is missing, expected it among: {has}")
    if raw.empty:
        raise InputError(f"{path}: rows: 0, expected at least one below the column names")
    for name in _NUMBERS:
        number = pd.to_numeric(raw[name], errors="coerce")
        wrong = raw.index[~np.isfinite(number) & raw[name].notna()]
        if len(wrong):
            where = f"{path}: column {name!r}, row {wrong[0] + 1}"
            value = str(raw[name][wrong[0]])[:60]
            raise InputError(f"{where}: {value!r} is no number, expected a finite one or none")
        raw[name] = raw[name].astype(float)
    return raw[[*_TEXT, *_NUMBERS]].copy()
