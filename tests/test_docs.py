"""The documentation is run: each python block and each `$ perfmodel` line prints what it shows.

    python tests/test_docs.py    # put today's output into the pages

A ```python block is followed by a ```text block with its whole output (none: it prints nothing).
A ```console block is one `$ perfmodel ...` line and its whole output.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<out>.*?)^```\n)?"
    r"|^```console\n\$ perfmodel (?P<args>[^\n]*)\n(?P<shown>.*?)^```\n",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)[^)]*\)")


def printed(block: re.Match[str]) -> str:
    """What the block prints today."""
    if block["code"] is not None:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block["code"], "<documentation>", "exec"), {"__name__": "__main__"})
        return out.getvalue()
    command = [sys.executable, "-m", "perfmodel", *shlex.split(block["args"])]
    env = dict(os.environ, COLUMNS="90", PYTHONIOENCODING="utf-8")
    done = subprocess.run(
        command, cwd=ROOT, env=env, check=True, capture_output=True, encoding="utf-8"
    )
    return done.stdout


def shown(block: re.Match[str]) -> str:
    return (block["out"] if block["code"] is not None else block["shown"]) or ""


BLOCKS = [
    pytest.param(b, id=f"{page.name}-{i}")
    for page in PAGES
    for i, b in enumerate(BLOCK.finditer(page.read_text("utf-8")))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_prints_what_it_shows(block):
    assert printed(block) == shown(block)


def test_every_fenced_block_is_found():
    """A block that the pattern misses would never be run."""
    for page in PAGES:
        fences = re.findall(r"^```(?:python|console)$", page.read_text("utf-8"), re.MULTILINE)
        assert len(fences) == len(list(BLOCK.finditer(page.read_text("utf-8")))), page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    missing = [x for x in LINK.findall(page.read_text("utf-8")) if not (page.parent / x).exists()]
    assert not missing


def rewrite(block: re.Match[str]) -> str:
    out = printed(block)
    if block["code"] is None:
        return f"```console\n$ perfmodel {block['args']}\n{out}```\n"
    return f"```python\n{block['code']}```\n" + (f"\n```text\n{out}```\n" if out else "")


if __name__ == "__main__":
    for path in PAGES:
        old = path.read_text("utf-8")
        new = BLOCK.sub(rewrite, old)
        if new != old:
            path.write_text(new, "utf-8")
            print(f"{path.relative_to(ROOT)}: written")
