"""A chart whose rows are replaced in place: no new embedding, no flicker, and no network.

The Vega libraries come out of vl-convert, so the page loads nothing from elsewhere.  Python sends
columns as raw float64 buffers; the browser writes them into the chart's named datasets.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets

from perfmodel.charts import vega_lite_version

# In the bundle `vegaEmbed` is in scope but `vega` is null: change sets come from the view.
_SCRIPT = r"""
const rowsOf = (table) => {
  const names = Object.keys(table.columns);
  const columns = names.map((name) => {
    const c = table.columns[name];
    if (Array.isArray(c)) return c;
    const start = c.byteOffset || 0, buffer = c.buffer || c;
    return new Float64Array(buffer.slice(start, start + c.byteLength));
  });
  return Array.from({ length: table.length }, (_, i) =>
    Object.fromEntries(names.map((name, j) => [name, columns[j][i]])));
};

// Text and lines take the page's own colours, so that light and dark themes both can be read.
// They are the body's: at the first drawing the chart itself is not in the page yet.
const themed = (spec) => {
  const style = getComputedStyle(document.body);
  const ink = style.getPropertyValue("--jp-content-font-color1").trim() || style.color || "#444";
  const font = style.getPropertyValue("--jp-ui-font-family").trim() || "sans-serif";
  const config = (spec.config = spec.config || {});
  config.font = font;
  config.background = "transparent";
  config.axis = { ...config.axis, labelColor: ink, titleColor: ink, tickColor: ink,
                  domainColor: ink, gridColor: ink, gridOpacity: 0.15 };
  config.legend = { ...config.legend, labelColor: ink, titleColor: ink };
  config.title = { ...config.title, color: ink };
  config.text = { ...config.text, color: ink };
  return spec;
};

async function render({ model, el }) {
  let view = null, finalize = () => {}, queue = Promise.resolve(), drawn = -1;
  const box = document.createElement("div");
  el.appendChild(box);
  // One after the other: a chart being embedded must not be fed at the same time.
  const enqueue = (work) => {
    queue = queue.then(work).catch((error) => { box.textContent = "Chart: " + error; });
    return queue;
  };
  const done = (n) => {
    drawn = n;
    el.dataset.frame = String(n);
    model.set("shown", n);
    model.save_changes();
  };
  const push = async () => {
    const frame = model.get("frame");
    if (!view || frame.n === drawn) return;
    for (const [name, table] of Object.entries(frame.tables || {}))
      view.change(name, view.changeset().remove(() => true).insert(rowsOf(table)));
    for (const [name, value] of Object.entries(frame.signals || {})) view.signal(name, value);
    await view.runAsync();
    done(frame.n);
  };
  const embed = async () => {
    finalize();
    view = null;
    const spec = themed(structuredClone(model.get("spec"))), first = model.get("frame");
    // The first rows are part of the spec: a log scale over no rows has no finite domain.
    spec.datasets = spec.datasets || {};
    for (const [name, table] of Object.entries(first.tables || {}))
      spec.datasets[name] = rowsOf(table);
    const result = await vegaEmbed(box, spec, { actions: false, renderer: model.get("renderer") });
    view = result.view;
    finalize = result.finalize;
    for (const [name, value] of Object.entries(first.signals || {})) view.signal(name, value);
    await view.runAsync();
    for (const name of model.get("watch"))
      view.addSignalListener(name, (_, value) => {
        const plain = JSON.parse(JSON.stringify(value));
        model.set("selected", { ...model.get("selected"), [name]: plain });
        model.save_changes();
      });
    done(first.n);
  };
  const onSpec = () => enqueue(embed), onFrame = () => enqueue(push);
  model.on("change:spec", onSpec);
  model.on("change:frame", onFrame);
  const theme = new MutationObserver(onSpec);
  theme.observe(document.body, { attributeFilter: ["data-jp-theme-name"] });
  await enqueue(embed);
  return () => {
    theme.disconnect();
    model.off("change:spec", onSpec);
    model.off("change:frame", onFrame);
    finalize();
  };
}
export default { render };
"""


def _cache_folders() -> list[Path]:
    """Return where the bundle may be kept, best first."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    user = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    owner = os.getuid() if hasattr(os, "getuid") else "user"
    return [user / "perfmodel", Path(tempfile.gettempdir()) / f"perfmodel-{owner}"]


def _own(folder: Path) -> bool:
    """Make the folder; say whether it is ours alone, since what is in it runs in the browser."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode):
        return False
    return not hasattr(os, "getuid") or (info.st_uid == os.getuid() and not info.st_mode & 0o022)


@lru_cache(maxsize=1)
def bundle() -> str:
    """Return the browser code with the Vega libraries in it; made once, then read from a cache."""
    import vl_convert as vlc

    made_by = metadata.version("vl-convert-python")
    version = vega_lite_version()
    mark = f"{made_by} {version} {_SCRIPT}"
    name = f"live-{hashlib.sha256(mark.encode()).hexdigest()[:20]}.js"
    usable = []
    for folder in _cache_folders():
        with contextlib.suppress(OSError, RuntimeError):
            if _own(folder):
                usable.append(folder)
                return (folder / name).read_text(encoding="utf-8")
    text = str(vlc.javascript_bundle(_SCRIPT, vl_version=version))
    for folder in usable:
        with contextlib.suppress(OSError):
            _write(folder / name, text)
            break
    return text


def _write(path: Path, text: str) -> None:
    """Write a file so that another process sees all of it or nothing."""
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=".live-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def pack(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of columns as it travels: numbers as float64 bytes, all else as strings.

    Raises ValueError when the columns differ in length.
    """
    columns: dict[str, Any] = {}
    lengths = set()
    for name in table:
        values = np.asarray(table[name])
        lengths.add(len(values))
        if values.dtype.kind in "fiub":
            data = np.ascontiguousarray(values, dtype="<f8")
            columns[str(name)] = memoryview(data.tobytes())
        else:
            columns[str(name)] = [str(x) for x in values]
    if len(lengths) > 1:
        raise ValueError(f"columns of a table differ in length: {sorted(lengths)}")
    return {"length": lengths.pop() if lengths else 0, "columns": columns}


class LiveChart(anywidget.AnyWidget):
    """An Altair chart over `altair.NamedData`, whose rows `update` replaces.

    `watch` names selections of the chart: their state comes back in the trait `selected`.
    `shown` is the number of the frame the browser drew last.
    """

    spec = traitlets.Dict().tag(sync=True)
    frame = traitlets.Dict().tag(sync=True)
    watch = traitlets.List(traitlets.Unicode()).tag(sync=True)
    renderer = traitlets.Unicode("svg").tag(sync=True)
    selected = traitlets.Dict().tag(sync=True)
    shown = traitlets.Int(-1).tag(sync=True)

    def __init__(self, chart: Any, watch: Iterable[str] = (), **keywords: Any) -> None:
        self._esm = bundle()  # of the instance, not the class: importing stays fast
        super().__init__(
            spec=chart.to_dict(),
            watch=list(watch),
            frame={"n": 0, "tables": {}, "signals": {}},
            **keywords,
        )

    def update(
        self, tables: Mapping[str, Mapping[str, Any]], chart: Any = None, **signals: Any
    ) -> None:
        """Replace the rows of datasets and set signals; `chart` also replaces the drawing.

        Pass every dataset each time: a chart shown later starts from the last frame alone.
        """
        frame = {
            "n": self.frame["n"] + 1,
            "tables": {name: pack(t) for name, t in tables.items()},
            "signals": signals,
        }
        with self.hold_sync():
            self.frame = frame
            if chart is not None:
                self.spec = chart.to_dict()
