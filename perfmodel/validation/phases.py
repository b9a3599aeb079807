"""The phase ring of validation: published rates of a phase, of drafts and of serving, predicted.

Three tables over one file of published operating points: `phases` (prefill and decode), `medians`
(TPOT and TTFT of InferenceX) and `speculation` (what drafts gain and cost). Each line has
`measured`, `predicted` and `ratio` (predicted over measured), or the `reason` why it is left out;
`note` names what stands in for something that a row does not state. The file is not part of the
project; `read` takes its path.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pandas as pd

from perfmodel import rows
from perfmodel.api import Estimate, estimate, load_engine, load_model, load_system
from perfmodel.engine import Engine
from perfmodel.errors import DoesNotFit, InputError
from perfmodel.model import Model
from perfmodel.plan import Plan
from perfmodel.validation.errors import error_table

__all__ = ["error_table", "medians", "phases", "read", "speculation"]
COLUMNS = [
    "id", "source", "kind", "model", "weights_precision", "kv_precision", "system", "n_gpus",
    "role", "tp", "ep", "dp", "isl", "osl", "concurrency_or_batch", "spec_decode", "software",
    "metric", "value", "notes",
]  # fmt: skip
TIDY = ["id", "source", "model", "system", "what", "measured", "predicted", "reason", "note"]
CARDS = {
    "DeepSeek-V3/R1": "deepseek-v3", "DeepSeek-V3": "deepseek-v3", "DeepSeek-R1": "deepseek-v3",
    "DeepSeek-R1-0528": "deepseek-v3", "DeepSeek-V3.2": "deepseek-v3.2", "Kimi-K2": "kimi-k2",
    "H100": "h100-nvl8", "H200": "h200-nvl8", "H800": "h800-nvl8", "H20-96G": "h20-nvl8",
    "B200": "b200-nvl8", "B300": "b300-nvl8", "GB200 NVL72": "gb200-nvl72",
    "GB300 NVL72": "gb300-nvl72",
}  # fmt: skip
ENGINES = {"TensorRT-LLM": "trtllm", "SGLang": "sglang", "vLLM": "vllm", "DeepSeek": "typical"}
# Weights that are no checkpoint of a card: (precision to start from, classes that differ).
MIXED: dict[str, tuple[str, dict[str, str]]] = {
    "FP8 attention + NVFP4 experts": ("native", {"experts": "nvfp4"}),
    "BF16 attention + FP8 experts": ("native", {"attention": "bf16"}),
    "FP8 MoE, BF16 attention": ("native", {"attention": "bf16"}),
    "NVFP4 MoE, BF16/FP8 rest": ("nvfp4", {}),
}
# Tokens of a rank in a prefill step, where not stated: those of DeepSeek's profile (DSK-0004).
PREFILL_TOKENS = 16_384
# Draft tokens of InferenceX (SemiAnalysisAI/InferenceX, benchmarks/single_node, dsr1_*_mtp.sh) by
# attention DP: TensorRT-LLM num_nextn_predict_layers, SGLang speculative-num-steps.
RECIPE = {("trtllm", False): 3, ("trtllm", True): 1, ("sglang", False): 2, ("sglang", True): 2}
# DeepSeek's service: one draft token; 85-90 % are accepted (DeepSeek-V3 technical report).
DEEPSEEK_DRAFT = (1, 1.875)
# Least published acceptance of V3's draft over the card's, less the bonus token: LMSYS 2.18 of 2.82
LOW_ACCEPTANCE = 0.65
_POOL = r"(\d+)x\(TP(\d+) EP(\d+)( DPattn)?\)=(\d+) GPU"
Row = dict[Any, Any]


def read(path: str | Path) -> pd.DataFrame:
    """The published points. Raises InputError when the file, a column or every row is missing."""
    try:
        table = pd.read_csv(path, low_memory=False)
    except FileNotFoundError:
        raise InputError(f"phases: there is no file {str(path)!r}; expected a CSV file") from None
    except (OSError, ValueError) as e:
        raise InputError(f"phases: {Path(path).name} is not a CSV table: {e}") from None
    return _checked(table)


def _checked(table: pd.DataFrame) -> pd.DataFrame:
    if missing := [c for c in COLUMNS if c not in table.columns]:
        raise InputError(f"phases: column {missing[0]!r} is missing; expected {', '.join(COLUMNS)}")
    if table.empty:
        raise InputError("phases: the table has no rows; expected at least one")
    return table


def phases(table: pd.DataFrame) -> pd.DataFrame:
    """Prefill (input) and decode (output) tokens per second and GPU of instances of one role.

    Prefill is its kernels at scale 1 and the engine's launches, as `serving` has a pool that only
    prefills; decode has the kernel floor of a worker that only decodes. `predicted_overlapped` is
    the rate if link time and the rest ran side by side: the most that two-batch overlap can give.
    """
    keys = _checked(table)[table["kv_precision"].notna()].to_dict("records")
    caches = {_cache_key(r): r["kv_precision"] for r in keys}
    wanted = table["metric"].astype(str).str.fullmatch("(prefill|decode)_tok_s_per_gpu")
    out = []
    for r in table[wanted].to_dict("records"):
        line, notes = _line(r, r["metric"].split("_")[0], float(r["value"])), list[str]()
        out.append(line)
        try:
            e = _estimate(r, caches, notes)
        except (InputError, DoesNotFit) as error:
            line["reason"] = str(error).splitlines()[0]
            continue
        v, tokens, seconds = e.values, e.batch * e.acceptance_length, e.step_time_s
        link = sum(x.time_s for x in e.operators if x.link_s > 0)
        if e.phase == "prefill":
            tokens, link = e.batch * e.new_tokens, v["sum_link"]
            launch = _engine(r).values.prefill_kernel.value
            seconds += v["n_kernels"] * (launch - v["tau_kernel"]) - v["t_host"]
        line |= {"predicted": tokens / seconds / e.gpus, "note": "; ".join(notes)}
        line["predicted_overlapped"] = tokens / max(seconds - link, link) / e.gpus
    return _tidy(out, ["predicted_overlapped"])


def _estimate(r: Row, caches: dict[tuple[str, ...], str], notes: list[str]) -> Estimate:
    """The row's own point; what the model holds too big is predicted too, with a note."""
    if r["kind"] != "measured":
        raise InputError(f"not measured: {r['kind']}")
    model, precision = _model(r, caches, notes)
    plan, system, engine = _layout(r, notes), load_system(_known(r, "system")), _engine(r)
    if r["role"] == "prefill":
        isl, load = _length(r), re.search(r"(\d+) tok/GPU", _text(r, "concurrency_or_batch"))
        if load is None:
            notes.append(f"{PREFILL_TOKENS:,} tokens a rank (not stated)")
        prompts = max(1, round(int(load[1] if load else PREFILL_TOKENS) / isl))
        asked: Row = {"phase": "prefill", "batch": plan.dp * prompts, "new_tokens": isl}
    else:
        drafted, length = _draft(r, notes)
        old = engine.values.kernel_scale
        floor = old.model_copy(update={"value": old.value * engine.values.decode_only.value})
        values = engine.values.model_copy(update={"kernel_scale": floor})
        engine = engine.model_copy(update={"values": values})
        asked = {"batch": _batch(r, plan, notes), "draft_tokens": drafted,
                 "acceptance_length": length if drafted else None}  # fmt: skip
        if not _text(r, "osl"):
            notes.append("output length not stated: context is the stated length")
        asked["context_tokens"] = _length(r) + _whole(r, "osl") // 2  # the mean of a steady state
    asked = Row(context_tokens=0, precision=precision, engine=engine) | asked
    room = system.memory.capacity
    memory = system.memory.model_copy(
        update={"capacity": room.model_copy(update={"value": math.inf})}
    )
    e = estimate(model, system.model_copy(update={"memory": memory}), plan, **asked)
    if e.memory_bytes > (room.high or room.value):
        notes.append(f"does not fit by our count: {e.memory_bytes / 1e9:.0f} GB a GPU")
    return e


def speculation(table: pd.DataFrame) -> pd.DataFrame:
    """What MTP drafts cost and gain: two lines for each published point with drafts.

    `what` is `tpot_ms` (ms per output token with drafts: is verifying as dear as the step says)
    and `speedup` (TPOT of the plain twin over it; a twin has the same chip, weights, role, lengths
    and concurrency). `basis`: `stated` acceptance; `recipe`, draft tokens of the row or of the
    benchmark's script and acceptance of the card; `assumed`, the same for disaggregated recipes.
    `predicted_low` and `_high`: the slowest and fastest, at the least published acceptance and
    with every draft accepted; `implied_acceptance` is the length that would meet the measured.
    """
    metrics = ["tok_s_per_user", "tpot_ms_median", "decode_tok_s_per_gpu"]
    t = _checked(table)[table["metric"].isin(metrics)]
    plain = t[t["spec_decode"] == "none"].to_dict("records")
    drafts = t["spec_decode"].astype(str).str.contains("MTP", case=False)
    out: list[Row] = []
    for r in t[drafts].to_dict("records"):
        ms, gain = _line(r, "tpot_ms", math.nan), _line(r, "speedup", math.nan)
        out += [ms, gain]
        try:
            ms["measured"] = measured = _measured_ms(r)
            drafted, length, basis = _acceptance(r)
            least = 1 + LOW_ACCEPTANCE * (length - 1)
            now, slow, fast = (_tpot_ms(r, drafted, a) for a in (length, least, drafted + 1.0))
        except (InputError, DoesNotFit) as e:
            ms["reason"] = gain["reason"] = str(e).splitlines()[0]
            continue
        given = {"basis": basis, "draft_tokens": drafted, "acceptance_length": length}
        ms |= given | {"predicted": now, "predicted_low": slow, "predicted_high": fast,
                       "implied_acceptance": length * now / measured}  # fmt: skip
        twin = _twin(r, plain)
        if isinstance(twin, str):
            gain["reason"] = twin
            continue
        base, other = _tpot_ms(twin, 0, 1.0), _engine(twin).id != _engine(r).id
        gain |= given | {"measured": _measured_ms(twin) / measured, "predicted": base / now,
                         "predicted_low": base / slow, "predicted_high": base / fast,
                         "note": f"twin {twin['id']}" + ", another engine" * other}  # fmt: skip
    extra = ["basis", "draft_tokens", "acceptance_length", "predicted_low", "predicted_high"]
    return _tidy(out, [*extra, "implied_acceptance"])


def medians(table: pd.DataFrame) -> pd.DataFrame:
    """TPOT (1000 over tok/s and user) and TTFT, ms, of InferenceX's rows of R1 without drafts.

    The measured are medians over requests, the predicted means of `rows.evaluate`: the first wave
    and a cold start raise a mean and hardly touch a median.
    """
    ours = _checked(table)["metric"].isin(["tok_s_per_user", "ttft_ms_median"])
    ours &= table["id"].astype(str).str.startswith("IXR1-") & (table["spec_decode"] == "none")
    out, asked = [], []
    for r in table[ours].to_dict("records"):
        x, speed = float(r["value"]), r["metric"] == "tok_s_per_user"
        line = _line(r, "tpot_ms" if speed else "ttft_ms", 1000 / x if speed else x)
        line |= {"role": r["role"], "note": "measured median, predicted mean"}
        out.append(line)
        try:
            asked.append((line, _serving_row(r)))
        except InputError as e:
            line["reason"] = str(e)
    got = rows.evaluate(pd.DataFrame([q for _, q in asked])).to_dict("records") if asked else []
    for (line, q), g in zip(asked, got, strict=True):
        line |= {"reason": g["reason"], "engine": q["backend"]}
        line["predicted"] = 1000 * g[line["what"].removesuffix("_ms")]
    return _tidy(out, ["role", "engine"])


def _line(r: Row, what: str, measured: float) -> Row:
    start = dict(what=what, measured=measured, predicted=math.nan, reason="", note="")
    return {k: r[k] for k in TIDY[:4]} | start


def _tidy(lines: list[Row], extra: list[str]) -> pd.DataFrame:
    df = pd.DataFrame(lines, columns=[*TIDY, *extra])
    df.insert(TIDY.index("reason"), "ratio", df["predicted"] / df["measured"])
    return df


def _text(r: Row, field: str) -> str:
    return "" if pd.isna(r[field]) else str(r[field]).strip()


def _whole(r: Row, field: str) -> int:
    """A whole number, or 0 where the row has none."""
    text = _text(r, field)
    return int(float(text)) if re.fullmatch(r"\d+(\.0+)?", text) else 0


def _prefix(r: Row) -> str:
    return str(r["id"]).split("-")[0]


def _cache_key(r: Row) -> tuple[str, ...]:
    return _prefix(r), CARDS.get(_text(r, "model"), ""), _text(r, "system")


def _known(r: Row, field: str) -> str:
    """The card that a row's model or system names."""
    if _text(r, field) not in CARDS:
        raise InputError(f"no card in this ring (of NVIDIA systems): {field} {_text(r, field)!r}")
    return CARDS[_text(r, field)]


def _engine(r: Row) -> Engine:
    found = [card for name, card in ENGINES.items() if name in _text(r, "software")]
    if not found:
        raise InputError(f"no card for the engine {_text(r, 'software').split(' ')[0]!r}")
    return load_engine(found[0])


def _model(r: Row, caches: dict[tuple[str, ...], str], notes: list[str]) -> tuple[Model, str]:
    """The card and a name of its precisions; weights of MIXED are a precision of a copy."""
    model, label = load_model(_known(r, "model")), _text(r, "weights_precision")
    if label in MIXED:
        p, changed = model.precision_named(MIXED[label][0]), MIXED[label][1]
        both = {"weights": p.weights | changed, "activations": p.activations | changed}
        mixed = {**model.precision, "mixed": p.model_copy(update=both)}
        return model.model_copy(update={"precision": mixed}), "mixed"
    cache = _text(r, "kv_precision")
    if not cache and (cache := caches.get(_cache_key(r), "")):
        notes.append(f"{cache} cache as other rows of the source")
    precision = rows.precision_of(model, load_system(_known(r, "system")), [label])
    wide = cache.startswith("BF16") and precision == "native" and "bf16-cache" in model.precision
    return model, "bf16-cache" if wide else precision


def _layout(r: Row, notes: list[str]) -> Plan:
    """The plan of one instance; with attention DP the experts spread over all its ranks."""
    tp, ep, dp = (_whole(r, k) for k in ("tp", "ep", "dp"))
    if not (tp or ep or dp):
        raise InputError("layout not stated")
    if not dp and not tp:
        notes.append("EP stated alone: attention DP over the same ranks")
    if dp or not tp:
        return Plan(tp=tp or 1, dp=dp or ep, ep=(tp or 1) * (dp or ep), etp=1)
    if not ep:
        notes.append("EP not stated: experts split by TP")
    return Plan(tp=tp, ep=ep or 1, etp=tp // (ep or 1))


def _length(r: Row) -> int:
    kv = re.search(r"mean KV (\d+)", _text(r, "isl"))
    if isl := int(kv[1]) if kv else _whole(r, "isl"):
        return isl
    raise InputError("prompt length not stated")


def _batch(r: Row, plan: Plan, notes: list[str]) -> int:
    """Sequences of the instance."""
    text, about = _text(r, "concurrency_or_batch"), _text(r, "notes")
    if per_gpu := re.match(r"(\d+) per GPU", text):
        return int(per_gpu[1]) * plan.gpus
    if text.isdigit():
        return int(text) * (plan.dp if "per EP rank" in about else 1)
    if speed := re.search(r"([\d.]+)-([\d.]+) tok/s/user", about):
        notes.append("batch by Little's law from the stated speed")
        return round(2 * float(r["value"]) / (float(speed[1]) + float(speed[2])) * plan.gpus)
    raise InputError("batch not stated")


def _draft(r: Row, notes: list[str]) -> tuple[int, float]:
    """(draft tokens, acceptance length) as stated; (0, 1) for a row without drafts."""
    spec = _text(r, "spec_decode")
    if stated := re.search(r"MTP-(\d+) \(?AL ([\d.]+)(?:-([\d.]+))?", spec):
        return int(stated[1]), (float(stated[2]) + float(stated[3] or stated[2])) / 2
    if "production" in spec and _prefix(r) == "DSK":
        notes.append("one draft token, 87.5 % accepted (DeepSeek-V3 report)")
        return DEEPSEEK_DRAFT
    if spec and not spec.startswith("none"):
        raise InputError(f"draft tokens and acceptance not stated: {spec!r}")
    return 0, 1.0


def _acceptance(r: Row) -> tuple[int, float, str]:
    """(draft tokens, acceptance length, basis) of a row with drafts; see `speculation`."""
    spec, card = _text(r, "spec_decode"), load_model(_known(r, "model")).draft.get("mtp")
    if card is None:
        raise InputError(f"no MTP draft on the card for {_text(r, 'model')!r}")
    if "relaxed" in spec:
        raise InputError("relaxed acceptance: its length is not stated")
    if depth := re.fullmatch(r"MTP-(\d+)", spec):
        return int(depth[1]), card.acceptance[depth[1]], "recipe"
    if _prefix(r) == "IXR1":
        q = _serving_row(r)
        drafted = RECIPE[q["backend"], q["attention_dp"] > 1]
        basis = "recipe" if q["mode"] == "agg" else "assumed"
        return drafted, card.acceptance[str(drafted)], basis
    return *_draft(r, []), "stated"


def _measured_ms(r: Row) -> float:
    value = float(r["value"])
    if r["metric"] == "decode_tok_s_per_gpu":
        plan = _layout(r, [])
        return 1000 * _batch(r, plan, []) / plan.gpus / value
    return value if r["metric"] == "tpot_ms_median" else 1000 / value


def _tpot_ms(r: Row, drafted: int, length: float) -> float:
    if r["role"] == "decode":
        spec = f"MTP-{drafted} AL {length}" if drafted else "none"
        e = _estimate({**r, "spec_decode": spec}, {}, [])
        return 1000 * e.step_time_s / e.acceptance_length
    asked = _serving_row(r) | {"draft_tokens": drafted, "acceptance_length": length}
    g = rows.evaluate(pd.DataFrame([asked])).iloc[0]
    if g["reason"]:
        raise InputError(g["reason"])
    return float(1000 * g["tpot"])


def _twin(r: Row, plain: list[Row]) -> Row | str:
    """The plain row of the same setting (same engine first, then the one before), or why none."""
    notes = _text(r, "notes")
    if "ladder" in notes and not notes.startswith("batch 1 ladder"):
        return "no twin: other kernels changed in the same step"
    same = ("metric", "system", "weights_precision", "role", "n_gpus", "isl", "osl")
    found = [p for p in plain if _prefix(p) == _prefix(r)]
    for k in (*same, "concurrency_or_batch"):
        found = [p for p in found if _text(p, k) == _text(r, k)]
    if not found:
        return "no plain twin at the same setting"
    own = [p for p in found if _engine(p).id == _engine(r).id] or found
    return max(own, key=lambda p: (p["id"] < r["id"], p["id"]))


def _serving_row(r: Row) -> Row:
    """The row in the columns of `rows.evaluate`; concurrency is that of one decode worker."""
    label = _text(r, "weights_precision")
    out: Row = {
        "model_path": _known(r, "model"), "system": _known(r, "system"), "mode": "agg",
        "backend": _engine(r).id, "isl": _whole(r, "isl"), "osl": _whole(r, "osl"),
        "weights_precision": MIXED[label][0] if label in MIXED else label.lower(),
        "protocol": "inferencex" if _prefix(r).startswith("IX") else "fixed",
        "concurrency": _whole(r, "concurrency_or_batch"),
    }  # fmt: skip
    gpus, tp, ep, dp = (_whole(r, k) for k in ("n_gpus", "tp", "ep", "dp"))
    if r["role"] == "aggregated" and gpus and tp:
        wide = dp or 1
        return out | dict(n_gpus=gpus, attention_tp=gpus // wide, attention_dp=wide, moe_ep=ep or 1)
    pools = re.search(f"prefill {_POOL}; decode {_POOL}", _text(r, "notes"))
    if pools is None:
        raise InputError("layout not stated")
    parts = pools.groups()
    (n_pre, *pre), (n_dec, *dec) = _pool(*parts[:5]), _pool(*parts[5:])
    return out | {
        "mode": "disagg", "n_gpus": dec[0] * dec[1], "attention_tp": dec[0], "moe_ep": dec[2],
        "attention_dp": dec[1], "concurrency": out["concurrency"] / n_dec,
        "prefill_num_workers": n_pre, "decode_num_workers": n_dec, "prefill_tp_size": pre[0],
        "prefill_attention_dp_size": pre[1], "prefill_moe_ep_size": pre[2],
    }  # fmt: skip


def _pool(count: str, tp: str, ep: str, dp_attention: str | None, gpus: str) -> list[int]:
    """[workers, TP, DP, EP of each]; attention DP covers all GPUs of a worker."""
    each = int(gpus) // int(count)
    if not dp_attention and int(tp) != each:
        raise InputError("layout lost: the worker's TP is not its GPU count")
    return [int(count), *((1, each, each) if dp_attention else (each, 1, int(ep)))]
