"""A JupyterLab on loopback with no settings of the user's, and a Chromium to look at it."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
START_S = 90


def chromium() -> str | None:
    """Return the path of the machine's own Chromium, or None."""
    return next((p for n in ("chromium", "chromium-browser") if (p := shutil.which(n))), None)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def jupyterlab(root: Path, folder: Path) -> Iterator[str]:
    """Serve a copy of the notebooks of `root`, made in `folder`; yields the address.

    A copy, since JupyterLab saves what it ran; its settings and logs go into `folder` too.
    """
    served = folder / "served"
    shutil.copytree(root / "notebooks", served / "notebooks")
    port = _free_port()
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
        f"--port={port}", f"--ServerApp.root_dir={served}", "--IdentityProvider.token=",
        "--ServerApp.password=", "--LabApp.expose_app_in_browser=True",
        f"--LabApp.app_settings_dir={root / 'lab_settings'}",
    ]  # fmt: skip
    env = os.environ | {
        f"JUPYTER_{n}_DIR": str(folder / n.lower()) for n in ("CONFIG", "DATA", "RUNTIME")
    }
    env |= {"IPYTHONDIR": str(folder / "ipython"), "JUPYTERLAB_SETTINGS_DIR": str(folder / "lab")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # else every kernel compiles its imports again
    with open(folder / "server.log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=served)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, server, folder / "server.log")
            yield url
        finally:
            server.terminate()
            try:
                server.wait(15)
            except subprocess.TimeoutExpired:
                server.kill()


def _wait(url: str, server: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(url + "/api", timeout=1).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


def open_and_run(page, url: str, notebook: str, timeout_s: int = 120) -> None:
    """Open a notebook, wait for its kernel, run every cell."""
    page.goto(f"{url}/lab/tree/{notebook}?reset")
    page.wait_for_function(
        "window.jupyterapp && document.querySelector('.jp-Notebook')", timeout=60_000
    )
    # The toolbar says "idle" before there is a kernel: wait for the kernel's own reply.
    page.evaluate(
        """(async () => { const w = window.jupyterapp.shell.currentWidget;
        await w.context.ready; await w.sessionContext.ready;
        await w.sessionContext.session.kernel.info; return 1 })()"""
    )
    # "&& 1": the command's own result can't be serialised, and evaluate() would hang on it.
    page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells') && 1")
    page.wait_for_function(
        """window.jupyterapp.shell.currentWidget.content.widgets
        .filter(w => w.model.type === 'code')
        .every(w => w.model.executionCount !== null && w.model.executionState !== 'running')""",
        timeout=timeout_s * 1000, polling=100,
    )  # fmt: skip


@contextlib.contextmanager
def opened(root: Path, folder: Path, notebook: str) -> Iterator[Any]:
    """A page with the notebook run in JupyterLab; what goes wrong is listed in `page.problems`.

    Without a browser the test is skipped, or fails where PERFMODEL_REQUIRE_BROWSER=1.
    """
    path = chromium()
    if path is None:
        if os.environ.get("PERFMODEL_REQUIRE_BROWSER") == "1":
            pytest.fail("no chromium, and PERFMODEL_REQUIRE_BROWSER=1: apt-get install chromium")
        pytest.skip("NO BROWSER TEST: chromium is not installed (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with jupyterlab(root, folder) as url, sync_playwright() as pw:
        browser = pw.chromium.launch(executable_path=path, args=FLAGS)
        page: Any = browser.new_page(viewport={"width": 1440, "height": 1500})
        page.problems = []
        page.on("pageerror", lambda e: page.problems.append(f"error: {e}"))
        page.on(
            "console",
            lambda m: m.type == "error" and page.problems.append(f"console: {m.text} {m.location}"),
        )
        page.on("requestfailed", lambda r: page.problems.append(f"failed: {r.url} {r.failure}"))
        page.on(
            "response",
            lambda r: r.status >= 400 and page.problems.append(f"{r.status}: {r.url}"),
        )
        page.on("request", lambda r: _check_loopback(page, r.url))
        open_and_run(page, url, notebook)
        yield page
        browser.close()


def _check_loopback(page: Any, url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme in ("http", "https", "ws", "wss") and parts.hostname != "127.0.0.1":
        page.problems.append(f"request to elsewhere: {url}")


def shot(page: Any, root: Path, name: str) -> None:
    """Keep a picture of the page in out/shots."""
    folder = root / "out" / "shots"
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(folder / f"{name}.png"))
