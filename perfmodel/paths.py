"""Where the data files are: beside the package in a checkout, inside it in an installed wheel."""

from pathlib import Path

from perfmodel.errors import InputError

PACKAGE = Path(__file__).resolve().parent
INSIDE = ("models", "engines", "protocols", "workloads")  # part of the package in both cases
NAMES = ("hardware", *INSIDE, "notebooks", "reports")


def checkout() -> Path | None:
    """Return the root of the source checkout this package runs from, or None if installed."""
    root = PACKAGE.parent
    # Both files together: a pyproject.toml alone may be that of another project around us.
    if (root / "pyproject.toml").is_file() and (root / "run.py").is_file():
        return root
    return None


def data_dir(name: str) -> Path:
    """Return the folder of the data called name (one of NAMES).

    Raises InputError for another name.
    """
    if name not in NAMES:
        raise InputError(f"data folder: {name!r} is unknown, expected one of {', '.join(NAMES)}")
    if name in INSIDE:
        return PACKAGE / name
    root = checkout()
    return root / name if root else PACKAGE / "_data" / name
