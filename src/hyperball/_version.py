"""The version, for those who may not import the whole package, and those of what it runs with."""

import importlib.metadata
import platform
from collections.abc import Iterable

__version__ = "0.1.0"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Those of Python, of hyperball, and of these packages as far as they are installed."""
    found = {"python": platform.python_version(), "hyperball": __version__}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
