"""Reports: parameterised notebooks, executed and printed as PDF or HTML, offline.

A report is `reports/NAME.ipynb` with a cell tagged `parameters`.  papermill runs it in a folder
of its own, nbconvert makes Markdown of the outputs, pandoc Typst or HTML, and Typst the PDF; all of
that comes from Python packages.  Parameters are checked before anything runs, and a file appears
only when it is complete.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import perfmodel
from perfmodel import catalog
from perfmodel.errors import InputError, PerfModelError
from perfmodel.paths import PACKAGE, data_dir

FORMATS = ("pdf", "html", "ipynb")
KERNEL = "perfmodel-report"
_OURS = {"CardError", "InputError", "DoesNotFit", "PerfModelError"}
_MARKDOWN = (
    "markdown+raw_attribute+table_captions+link_attributes-implicit_figures-citations"
    "+tex_math_dollars+footnotes+autolink_bare_uris"
)


class ReportError(PerfModelError):
    """A report that can't be made: a cell failed or the output can't be written."""


# ---- reports and their parameters


def list_reports() -> list[str]:
    """Return the names of the reports."""
    return sorted(p.stem for p in data_dir("reports").glob("*.ipynb"))


def _notebook(name: str) -> dict[str, Any]:
    if name not in list_reports():
        raise InputError(
            f"report: {name!r} is unknown, expected one of {', '.join(list_reports())}"
        )
    path = data_dir("reports") / f"{name}.ipynb"
    return json.loads(path.read_text(encoding="utf-8"))


def _source(cell: Mapping[str, Any]) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def _tags(cell: Mapping[str, Any]) -> list[str]:
    return list(cell.get("metadata", {}).get("tags", []))


def _declared(name: str) -> dict[str, tuple[Any, str]]:
    """Return parameter -> (default, type as written, or that of the default)."""
    cells = [c for c in _notebook(name)["cells"] if "parameters" in _tags(c)]
    if len(cells) != 1:
        raise ReportError(f"report {name}: {len(cells)} cells tagged parameters, expected one")
    out: dict[str, tuple[Any, str]] = {}
    for node in ast.parse(_source(cells[0])).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            value = ast.literal_eval(node.value)
            out[node.target.id] = (value, ast.unparse(node.annotation))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = ast.literal_eval(node.value)
            out[node.targets[0].id] = (value, type(value).__name__)
    return out


def parameters(name: str) -> dict[str, Any]:
    """Return the parameters of a report with their defaults, in order."""
    return {k: default for k, (default, _) in _declared(name).items()}


def _nearest(word: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {match[0]}?" if match else ""


def _typed(name: str, value: Any, kind: str) -> Any:
    """Return value as the type written in the notebook, or raise InputError."""
    options = [k.strip() for k in kind.split("|")]
    for option in options:
        if option == "None" and value is None:
            return None
        if option == "str" and isinstance(value, str):
            return value
        if option == "bool" and isinstance(value, bool):
            return value
        if isinstance(value, bool):
            continue
        if option == "int" and isinstance(value, (int, float)) and value == int(value):
            return int(value)
        if option == "float" and isinstance(value, (int, float)):
            return float(value)
        if option.startswith("list"):
            if isinstance(value, str):  # systems=a,b is easier to type than JSON
                value = [v.strip() for v in value.split(",") if v.strip()]
            if isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value):
                return list(value)
    words = {"str": "text", "int": "a whole number", "float": "a number", "None": "null",
             "bool": "true or false"}  # fmt: skip
    wanted = " or ".join(words.get(o, "a list of text") for o in options)
    raise InputError(f"{name}: {value!r} ({type(value).__name__}), expected {wanted}")


def resolve(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return all parameters of a report: params checked, the others at their defaults.

    Raises InputError for an unknown name, a wrong type, or a value the report can't take.
    """
    declared = _declared(name)
    for key in params:
        if key not in declared:
            raise InputError(
                f"parameter {key!r} is unknown to report {name}{_nearest(key, declared)}; "
                f"allowed: {', '.join(declared)}"
            )
    out = {}
    for key, (default, kind) in declared.items():
        try:
            out[key] = _typed(key, params[key], kind) if key in params else default
        except (OverflowError, ValueError) as error:  # int(inf), int(nan)
            if isinstance(error, InputError):
                raise
            raise InputError(f"{key}: {params[key]!r} is not a finite number") from None
    for file, module in ((f"{name}.py", name), (f"{name}/report.py", f"{name}.report")):
        if (PACKAGE / file).is_file():
            check = getattr(importlib.import_module(f"perfmodel.{module}"), "check", None)
            if check is not None:
                check(out)
    return out


def parse_params(pairs: Iterable[str] = (), file: str | Path | None = None) -> dict[str, Any]:
    """Return parameters from a YAML, TOML or JSON file and "key=value" texts; the texts win.

    A value is read as JSON where it is JSON, else as text.
    """
    out = dict(_params_file(Path(file))) if file is not None else {}
    for pair in pairs:
        key, sep, value = pair.partition("=")
        key = key.strip()
        if not sep or not key:
            raise InputError(f"parameter: {pair!r}, expected NAME=VALUE")
        try:
            out[key] = json.loads(value)
        except json.JSONDecodeError:
            out[key] = value
    return out


def _params_file(path: Path) -> Mapping[str, Any]:
    kinds = {".json", ".toml", ".yaml", ".yml"}
    if path.suffix.lower() not in kinds:
        raise InputError(f"parameter file {path}: expected a name ending in .yaml, .toml or .json")
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix.lower() == ".json":
            data = json.loads(text)
        elif path.suffix.lower() == ".toml":
            import tomllib

            data = tomllib.loads(text)
        else:
            import yaml

            data = yaml.safe_load(text)
    except OSError as error:
        raise InputError(f"parameter file {path}: {error.strerror or error}") from None
    except Exception as error:  # each reader has an error class of its own
        why = " ".join(str(error).split())
        raise InputError(f"parameter file {path}: can't be read: {why}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise InputError(f"parameter file {path}: {type(data).__name__}, expected names and values")
    return data


# ---- rendering


def render(
    name: str,
    params: Mapping[str, Any],
    out: str | Path,
    fmt: str = "pdf",
    progress: bool = True,
) -> Path:
    """Execute a report and write it; returns the path written.

    `fmt` is "pdf", "html" (one file) or "ipynb" (executed).  `progress` draws a bar over the cells
    on stderr.  Missing folders are made.  Raises InputError for bad parameters, before anything
    runs, and ReportError when a cell fails or the output can't be written; an output that was
    there before is then still whole.
    """
    if fmt not in FORMATS:
        raise InputError(f"format: {fmt!r} is unknown, expected one of {', '.join(FORMATS)}")
    values = resolve(name, params)
    with _replacing(Path(out)) as part, tempfile.TemporaryDirectory(prefix="perfmodel-") as temp:
        work = Path(temp)
        notebook = execute(name, values, work, progress=progress)
        if fmt == "ipynb":
            part.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
        else:
            meta = _meta(name, values)
            body = _markdown(notebook, work, fmt)
            (work / "body.md").write_text(body, "utf-8")
            (_pdf if fmt == "pdf" else _html_page)(work, meta, part)
    return Path(out)


@contextlib.contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """Give a new file beside `out` to write to; it takes out's place if the body succeeds."""
    if out.is_dir():
        raise ReportError(f"output {out}: is a folder, expected the name of a file")
    if out.exists() and not out.is_file():
        raise ReportError(f"output {out}: is not a regular file")
    target = out.resolve()  # a link stays a link
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temp = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise ReportError(f"output {out}: can't be written: {error.strerror or error}") from None
    part = Path(temp)
    try:
        yield part
        umask = os.umask(0)
        os.umask(umask)
        part.chmod(0o666 & ~umask)  # mkstemp makes files for their owner only
        os.replace(part, target)
    except OSError as error:
        raise ReportError(f"output {out}: can't be written: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _environment(work: Path) -> Iterator[None]:
    """Point Jupyter and IPython at a folder of ours: this Python as kernel, nothing in HOME."""
    spec = work / "jupyter" / "kernels" / KERNEL
    spec.mkdir(parents=True)
    paths = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    (spec / "kernel.json").write_text(
        json.dumps(
            {
                "argv": [
                    sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher",
                    "--log-level=40", "-f", "{connection_file}",
                ],
                "display_name": "Python",
                "language": "python",
                "env": {"PYTHONPATH": os.pathsep.join(p for p in paths if p)},
            }
        )
    )  # fmt: skip
    ours = {
        "JUPYTER_PATH": str(work / "jupyter"),
        "JUPYTER_CONFIG_DIR": str(work / "config"),
        "JUPYTER_DATA_DIR": str(work / "data"),
        "JUPYTER_RUNTIME_DIR": str(work / "runtime"),
        "IPYTHONDIR": str(work / "ipython"),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    if cards := catalog.user_folder():  # a relative path means something else in the kernel
        ours[catalog.CARDS_VARIABLE] = str(cards.resolve())
    before = {k: os.environ.get(k) for k in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def execute(
    name: str, params: Mapping[str, Any], work: Path, *, progress: bool = True
) -> dict[str, Any]:
    """Return the report's notebook, executed with `params`; writes only into the folder `work`."""
    import logging
    import warnings

    logging.getLogger("papermill").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the Jupyter packages, about each other
        import papermill
        from papermill.exceptions import PapermillExecutionError

        source, result = work / "source.ipynb", work / "result.ipynb"
        source.write_text(json.dumps(_notebook(name)), "utf-8")
        with _environment(work):
            try:
                papermill.execute_notebook(
                    str(source), str(result), parameters=dict(params), kernel_name=KERNEL,
                    cwd=str(work), progress_bar={"desc": name, "unit": "cell"} if progress else False,
                )  # fmt: skip
            except PapermillExecutionError as error:
                raise ReportError(_failure(name, error)) from None
            except RuntimeError as error:  # of jupyter_client: no answer from the kernel
                raise ReportError(
                    f"report {name}: {error} (it needs the loopback network, 127.0.0.1)"
                ) from None
    notebook: dict[str, Any] = json.loads(result.read_text("utf-8"))
    return _cleaned(notebook)


def _failure(name: str, error: Any) -> str:
    lines = [line for line in error.source.strip().splitlines() if line.strip()]
    last = lines[-1].strip() if lines else ""
    why = error.evalue if error.ename in _OURS else f"{error.ename}: {error.evalue}"
    return f"report {name}: cell {error.exec_count} failed: {why}\n  at: {last}"


def _cleaned(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook without machine paths, times and warnings; runs are then alike."""
    notebook["metadata"].pop("papermill", None)
    notebook["metadata"]["kernelspec"] = {
        "display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3",
    }  # fmt: skip
    for n, cell in enumerate(notebook["cells"]):
        for key in ("papermill", "execution"):
            cell["metadata"].pop(key, None)
        if "injected-parameters" in _tags(cell):
            cell["id"] = f"injected-{n}"
        if "outputs" in cell:
            # A widget's text, "IntSlider(value=3)", is no reading matter.
            cell["outputs"] = [
                o for o in cell["outputs"]
                if o.get("name") != "stderr"
                and "application/vnd.jupyter.widget-view+json" not in o.get("data", {})
            ]  # fmt: skip
    return notebook


def _markdown(notebook: dict[str, Any], work: Path, fmt: str) -> str:
    """Return the outputs as Markdown and write the pictures into `work`."""
    import nbformat
    from nbconvert import MarkdownExporter
    from traitlets.config import Config

    vector = ["application/pdf", "image/svg+xml"]
    if fmt == "html":
        vector.reverse()
    config = Config()
    config.TagRemovePreprocessor.enabled = True
    config.TagRemovePreprocessor.remove_cell_tags = {
        "remove_cell", "parameters", "injected-parameters",
    }  # fmt: skip
    config.ExtractOutputPreprocessor.extract_output_types = {"image/png", *vector}
    config.ExtractOutputPreprocessor.output_filename_template = (
        "out_{cell_index}_{index}{extension}"
    )
    config.NbConvertBase.display_data_priority = [
        *vector, "image/png", "text/markdown", "text/latex", "text/html", "text/plain",
    ]  # fmt: skip
    exporter = MarkdownExporter(
        config=config,
        exclude_input=True,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        extra_template_basedirs=[str(data_dir("reports"))],
        template_name="report_md",
    )
    with _environment(work / "convert"):
        body, resources = exporter.from_notebook_node(nbformat.reads(json.dumps(notebook), 4))
    for file, data in (resources.get("outputs") or {}).items():
        (work / file).write_bytes(data)
    return str(body)


def _meta(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    notebook = _notebook(name)
    headings = (
        re.match(r"#\s+(.+)", _source(c)) for c in notebook["cells"] if c["cell_type"] == "markdown"
    )
    title = next((m.group(1).strip() for m in headings if m), name)
    day = _today()
    shown = {k: _words(v) for k, v in params.items()}
    subtitle = notebook["metadata"].get("subtitle", "").format(**shown)
    return {
        "title": title,
        "subtitle": subtitle,
        "author": "perfmodel",
        "date": day.date().isoformat(),
        "year": day.year,
        "month": day.month,
        "day": day.day,
        "version": perfmodel.__version__,
    }


def _words(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(str(v) for v in value)
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def _today() -> datetime:
    """Return the report's date (UTC); SOURCE_DATE_EPOCH fixes it for reproducible builds."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if epoch.isdigit():
        return datetime.fromtimestamp(int(epoch), UTC)
    return datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


def _pandoc(work: Path, *options: str) -> None:
    import pypandoc

    done = subprocess.run(
        [pypandoc.get_pandoc_path(), "body.md", "-f", _MARKDOWN, "--wrap=none", "--columns=10000",
         "--shift-heading-level-by=-1", f"--lua-filter={data_dir('reports') / 'refs.lua'}",
         *options],
        cwd=work, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ReportError(f"pandoc failed:\n{done.stderr.strip()}")


def _pdf(work: Path, meta: Mapping[str, Any], out: Path) -> None:
    import typst

    _pandoc(work, "-t", "typst", "-o", "body.typ")
    (work / "meta.json").write_text(json.dumps(meta), "utf-8")
    template = (data_dir("reports") / "report.typ").read_text("utf-8")
    body = (work / "body.typ").read_text("utf-8")
    main = work / "main.typ"
    main.write_text(f'{template}\n#show: report.with(..json("meta.json"))\n{body}', "utf-8")
    stamp = int(datetime(meta["year"], meta["month"], meta["day"], tzinfo=UTC).timestamp())
    try:
        # The package's own fonts only: the PDF is then the same on every machine.
        data = typst.compile(
            str(main), root=str(work), ignore_system_fonts=True, timestamp=stamp, format="pdf"
        )
    except Exception as error:  # typst's own error class
        raise ReportError(f"typst failed: {error}") from None
    out.write_bytes(data)


def _html_page(work: Path, meta: Mapping[str, Any], out: Path) -> None:
    _pandoc(
        work, "-t", "html5", "--standalone", "--embed-resources", "--mathml", "--number-sections",
        "--css", str(data_dir("reports") / "report.css"),
        "--metadata", f"title={meta['title']}", "--metadata", f"subtitle={meta['subtitle']}",
        "--metadata", f"date={meta['date']}, version {meta['version']}",
        "--metadata", f"author={meta['author']}", "--metadata", "lang=en", "-o", "body.html",
    )  # fmt: skip
    out.write_bytes((work / "body.html").read_bytes())
