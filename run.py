#!/usr/bin/env python3
"""The one entry point; it sets up what a command needs, then runs it.

    python3 run.py report [options]   write the deployment report (default: deployment.pdf here)
    python3 run.py test [options]     run the tests; options go to pytest
    python3 run.py lab [options]      open the explorer in JupyterLab
    python3 run.py setup              only set up

Standard library only.  Makes .venv, installs exactly requirements.lock with uv (hashes checked),
then this project in place.  When nothing changed since the last run that costs milliseconds.
PERFMODEL_NO_BROWSER=1 keeps `test` from installing a browser.
"""

from __future__ import annotations  # so that an older Python gets as far as our message

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PY = VENV / "bin" / "python"
LOCK = ROOT / "requirements.lock"
STAMP = VENV / ".stamp"  # written last: what the finished environment was made from
# Beside .venv, which may be removed while this is held; .venv/.lock would be uv's own.
MUTEX = ROOT / ".venv.lock"


def log(text: str) -> None:
    print(f"run.py: {text}", file=sys.stderr, flush=True)


def child_env() -> dict[str, str]:
    """The environment of everything started here: .venv first, none of the caller's Python."""
    env = dict(os.environ, VIRTUAL_ENV=str(VENV), UV_NO_PROGRESS="1")
    env["PATH"] = f"{VENV / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
    # Without .pyc files every kernel start compiles its imports again (4 s each).
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "JUPYTER_PATH"):
        env.pop(name, None)
    return env


def base() -> str:
    """What a .venv is bound to: this Python and this place; a change of either needs a new one."""
    return f"{sys.version}|{sys.base_prefix}|{ROOT}"


def wanted() -> str:
    """The text of STAMP when .venv is up to date."""
    files = LOCK.read_bytes() + (ROOT / "pyproject.toml").read_bytes()
    return f"{base()}\n{hashlib.sha256(files).hexdigest()}\n"


def stamp() -> str:
    try:
        return STAMP.read_text()
    except OSError:
        return ""


def ready() -> bool:
    return stamp() == wanted() and PY.exists()


@contextlib.contextmanager
def mutex():
    """Let one set-up run at a time; the system frees the lock if we are killed."""
    with open(MUTEX, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("another set-up of this checkout is running, waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def new_venv() -> None:
    if importlib.util.find_spec("ensurepip") is None:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        sys.exit(
            f"run.py: {sys.executable} can't make virtual environments: ensurepip is missing.\n"
            f"On Debian or Ubuntu: apt-get install python3-venv (or {version}-venv), "
            "then run this again."
        )
    if VENV.is_symlink() or VENV.is_file():
        VENV.unlink()
    elif VENV.exists():
        shutil.rmtree(VENV)
    venv.create(VENV, with_pip=True, symlinks=True)


def pinned_uv() -> str:
    """The lock's entry for uv with its hashes, so that pip checks it too."""
    found = re.search(r"^uv==.*(?:\n +.*)*", LOCK.read_text(), re.MULTILINE)
    if not found:
        sys.exit(f"run.py: {LOCK.name} has no line uv==...; make it again (see CHANGELOG.md)")
    return found.group() + "\n"


def python_m(*args: str) -> None:
    subprocess.run([str(PY), "-m", *args], check=True, env=child_env(), cwd=ROOT)


def install() -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(pinned_uv())
        file.flush()
        python_m("pip", "install", "-q", "--disable-pip-version-check",
                 "--require-hashes", "-r", file.name)  # fmt: skip
    uv = ("uv", "pip", "install", "-q")
    python_m(*uv, "--require-hashes", "-r", LOCK.name)
    # hatchling is in the lock: building needs nothing that isn't checked.
    python_m(*uv, "--no-deps", "--no-build-isolation", "-e", ".")


def setup() -> None:
    """Bring .venv up to date; anything but a finished one of this place is made again."""
    if ready():
        return
    with mutex():
        if ready():  # made while we waited
            return
        log("setting up .venv (about half a minute the first time)")
        try:
            if stamp().startswith(base() + "\n") and PY.exists():
                STAMP.unlink()  # from here to the end this is an unfinished one
            else:
                new_venv()
            install()
            STAMP.write_text(wanted())
        except subprocess.CalledProcessError as error:
            sys.exit(
                f"run.py: set-up failed in: {' '.join(error.cmd[1:])}\n"
                "The messages above say why; it needs a package registry. "
                "Run it again to start afresh."
            )


def browser() -> None:
    """The browser tests need Chromium; as root on Debian that is one apt-get away."""
    if shutil.which("chromium") or os.environ.get("PERFMODEL_NO_BROWSER"):
        return
    if shutil.which("apt-get") and os.geteuid() == 0:
        log("installing Debian's chromium for the browser tests")
        env = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
        for command in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
            subprocess.run(["apt-get", "-qq", *command], env=env, stdout=subprocess.DEVNULL)
    if not shutil.which("chromium"):
        log("no chromium: the browser tests will be skipped (apt-get install chromium)")


def command_line(command: str, args: list[str]) -> list[str]:
    if command == "report":
        return ["-m", "perfmodel", "report", "deployment", *args]
    if command == "test":
        return ["-m", "pytest", *args]
    settings = ROOT / "lab_settings"  # no questions about news and updates
    notebook = ROOT / "notebooks" / "explorer.ipynb"
    # In a container everything is root's; JupyterLab still listens on this machine only.
    root = ["--allow-root"] if os.geteuid() == 0 else []
    options = [f"--LabApp.app_settings_dir={settings}", *root]
    return ["-m", "jupyterlab", *options, str(notebook), *args]


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 (this file may be started with any)
        sys.exit(f"run.py: Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    command, args = (sys.argv[1:2] or ["report"])[0], sys.argv[2:]
    if command in ("-h", "--help", "help"):
        print(__doc__)
        return
    if command not in ("report", "test", "lab", "setup"):
        sys.exit(f"run.py: unknown command {command!r}: expected report, test, lab or setup")
    setup()
    if command == "setup":
        return
    if command == "test":
        browser()
        os.chdir(ROOT)
    sys.stdout.flush()
    os.execve(PY, [str(PY), *command_line(command, args)], child_env())


if __name__ == "__main__":
    main()
