"""The project's hygiene: style, types, lock, notebooks, and a wheel that works on its own."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import perfmodel
from perfmodel import errors, paths

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Run and return stdout; a failure shows both streams."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def python_m(*args: str) -> str:
    return run(sys.executable, "-m", *args)


def tracked() -> list[Path]:
    """The files a commit would hold: tracked and new ones, ignored ones left out."""
    try:
        out = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    except (FileNotFoundError, AssertionError) as error:
        pytest.skip(f"not a git checkout: {error}")
    return [ROOT / name for name in out.split("\0") if name and (ROOT / name).is_file()]


def test_ruff_check() -> None:
    python_m("ruff", "check", ".")


def test_ruff_format() -> None:
    python_m("ruff", "format", "--check", ".")


@pytest.mark.slow
def test_mypy() -> None:
    python_m("mypy")


def test_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == perfmodel.__version__
    assert f"## {perfmodel.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_lock_is_hashed_and_names_no_place() -> None:
    """Every pin has a hash, and nothing says where packages come from."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    joined = "\n".join(lines).replace("\\\n", "")
    pins = [line for line in joined.splitlines() if line.strip()]
    assert len(pins) > 50
    for pin in pins:
        assert re.match(r"[a-z0-9][a-z0-9._-]*==\S+ .*--hash=sha256:[0-9a-f]{64}", pin), pin
    assert "://" not in joined
    assert not re.search(r"^\s*-", joined, re.MULTILINE), "an option line such as --index-url"


def test_lock_has_every_direct_dependency() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = data["project"]["dependencies"] + data["dependency-groups"]["dev"]
    pinned = set(re.findall(r"^([a-z0-9._-]+)==", (ROOT / "requirements.lock").read_text(), re.M))
    for requirement in named:
        name = re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower()
        assert re.sub(r"[-_.]+", "-", name) in pinned, f"{name}: make requirements.lock again"


def test_notebooks_are_stored_without_outputs() -> None:
    notebooks = [str(path) for path in tracked() if path.suffix == ".ipynb"]
    assert notebooks
    # A failure: run nbstripout on the notebook it names.
    python_m("nbstripout", "--verify", *notebooks)


def test_no_machine_path_in_tracked_files() -> None:
    """A path of one machine breaks on every other, and tells who built it."""
    # Written so that this file passes its own test.
    private = re.compile(r"(?<![\w.}])/(?:home|root|work|Users)/")
    for path in tracked():
        text = path.read_bytes().decode("utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), start=1):
            found = private.search(line)
            assert not found, f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def load_run_py():
    spec = importlib.util.spec_from_file_location("run_py", ROOT / "run.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run_py(tmp_path, monkeypatch):
    """run.py working on an empty checkout of its own, with installing replaced by a record."""
    module = load_run_py()
    for name in ("requirements.lock", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "PY", tmp_path / ".venv" / "bin" / "python")
    monkeypatch.setattr(module, "LOCK", tmp_path / "requirements.lock")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / ".stamp")
    monkeypatch.setattr(module, "MUTEX", tmp_path / ".venv.lock")
    module.done = []

    def fake_venv() -> None:
        module.done.append("venv")
        module.PY.parent.mkdir(parents=True, exist_ok=True)
        module.PY.touch()

    monkeypatch.setattr(module, "new_venv", fake_venv)
    monkeypatch.setattr(module, "install", lambda: module.done.append("install"))
    return module


def test_set_up_happens_once(run_py) -> None:
    run_py.setup()
    run_py.setup()
    assert run_py.done == ["venv", "install"]


def test_new_lock_installs_into_the_same_venv(run_py) -> None:
    run_py.setup()
    run_py.LOCK.write_text("changed\n")
    run_py.setup()
    assert run_py.done == ["venv", "install", "install"]


def test_interrupted_set_up_starts_afresh(run_py, monkeypatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_py, "install", interrupted)
        run_py.setup()
    run_py.setup()
    assert run_py.done == ["venv", "venv", "install"]


def test_moved_checkout_gets_a_new_venv(run_py, monkeypatch) -> None:
    run_py.setup()
    monkeypatch.setattr(run_py, "base", lambda: "another place")
    run_py.setup()
    assert run_py.done == ["venv", "install", "venv", "install"]


def test_failed_install_is_one_clear_message(run_py, monkeypatch) -> None:
    def fail() -> None:
        raise subprocess.CalledProcessError(1, ["python", "-m", "pip", "install"])

    monkeypatch.setattr(run_py, "install", fail)
    with pytest.raises(SystemExit, match="set-up failed in: -m pip install"):
        run_py.setup()
    assert not run_py.ready()


def test_missing_ensurepip_names_the_remedy(monkeypatch) -> None:
    module = load_run_py()
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="apt-get install python3-venv"):
        module.new_venv()


def test_uv_itself_is_installed_with_hashes() -> None:
    lines = load_run_py().pinned_uv().splitlines()
    assert lines[0].startswith("uv==")
    assert len(lines) > 1
    assert all("--hash=sha256:" in line for line in lines[1:])


def test_children_get_a_clean_environment(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    env = load_run_py().child_env()
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert "PYTHONPATH" not in env
    assert env["PATH"].startswith(str(ROOT / ".venv" / "bin"))


def test_run_py_imports_the_standard_library_only() -> None:
    tree = ast.parse((ROOT / "run.py").read_text())
    imported = {
        name.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
    }
    assert imported <= sys.stdlib_module_names


def test_unknown_command_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "run.py", "tset"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1
    assert "unknown command 'tset': expected report, test, lab or setup" in done.stderr


def test_data_dir() -> None:
    for name in paths.NAMES:
        assert paths.data_dir(name).is_dir()
    with pytest.raises(errors.InputError, match="'hardwear' is unknown, expected one of hardware"):
        paths.data_dir("hardwear")


PROBE = """
import perfmodel
from perfmodel import api, paths
assert paths.checkout() is None, paths.checkout()
print(perfmodel.__file__)
print(*api.list_systems())
print(*api.list_models())
for system in api.list_systems():
    api.load_system(system)
for model in api.list_models():
    api.load_model(model)
for name in ("reports", "notebooks"):
    folder = paths.data_dir(name)
    print(*sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()))
"""


@pytest.mark.slow
def test_wheel_works_outside_the_checkout(tmp_path) -> None:
    from perfmodel import api

    dist, target, elsewhere = tmp_path / "dist", tmp_path / "target", tmp_path / "elsewhere"
    elsewhere.mkdir()
    uv = (sys.executable, "-m", "uv", "--offline", "--quiet")
    run(*uv, "build", "--wheel", "--no-build-isolation", "--python", sys.executable,
        "--out-dir", str(dist), str(ROOT))  # fmt: skip
    (wheel,) = dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [n for n in names if ".venv" in n or "checkpoint" in n or n.startswith("tests")]
    run(*uv, "pip", "install", "--no-deps", "--python", sys.executable,
        "--target", str(target), str(wheel))  # fmt: skip

    env = dict(os.environ, PYTHONPATH=str(target))
    # PYTHONPATH comes before site-packages, where the checkout itself is installed in place.
    out = run(sys.executable, "-c", PROBE, cwd=elsewhere, env=env).splitlines()
    file, systems, models, reports, notebooks = out
    assert Path(file).is_relative_to(target)
    assert systems.split() == api.list_systems()
    assert models.split() == api.list_models()
    stored = {
        name: {
            str(path.relative_to(ROOT / name))
            for path in tracked()
            if path.is_relative_to(ROOT / name)
        }
        for name in ("reports", "notebooks")
    }
    assert "deployment.ipynb" in reports.split()
    assert stored["reports"] <= set(reports.split())
    assert stored["notebooks"] <= set(notebooks.split())
