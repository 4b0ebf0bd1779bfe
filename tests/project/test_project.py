"""What the project promises around its code: light one-way imports, pinned versions, no machine paths."""

import ast
import math
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from places import ROOT

PACKAGE = ROOT / "src" / "hyperball"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

# A package imports itself and those before it. Modules that are not listed (freeze.py, explain.py) stand
# between `convert` and `models`; those with a leading underscore stand below all.
ORDER = (
    "rows",
    "radial_functions",
    "radial",
    "angular",
    "kernels",
    "functional",
    "implicit",
    "nn",
    "optim",
    "convert",
    "models",
    "data",
    "attacks",
    "training",
    "experiments",
    "report",
    "bench",
    "cli",
    "__main__",
)
WITHIN = {"experiments": ("table", "tables", "records", "jobs", "results")}  # the same for parts of a package
LABORATORY = ORDER[ORDER.index("data") :]
HEAVY = {"triton", "torchvision", "timm", "matplotlib", "scipy"}


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def seconds_added_to_import_torch() -> float:
    """Processor time of `import hyperball`, with all that it imports, where torch is already there."""
    clock = "time.process_time()"  # what other processes take of the machine does not count
    return float(run_python("-c", f"import time, torch; t = {clock}; import hyperball; print({clock} - t)").stdout)


def test_import_adds_less_than_300_ms_to_torch():
    best = math.inf
    for _ in range(3):
        best = min(best, seconds_added_to_import_torch())
        if best < 0.3:
            break
    assert best < 0.3


def test_import_leaves_heavy_packages_alone():
    code = """
import sys, torch
before = set(sys.modules)
import hyperball
print(*(set(sys.modules) - before))
"""
    added = {name.partition(".")[0] for name in run_python("-c", code).stdout.split()}
    assert "hyperball" in added
    assert not added & HEAVY


def top_level_name(file: str) -> str:
    return file.removesuffix(".py").partition("/")[0]


def floor(name: str) -> float:
    """Position of a top-level name of the package in the order of imports."""
    if name in ORDER:
        return ORDER.index(name)
    if name == "hyperball":  # the package as a whole is complete only when all of it is imported
        return math.inf
    return -1 if name.startswith("_") else ORDER.index("convert") + 0.5


def imported_modules(nodes: Iterator[ast.AST], file: str) -> Iterator[str]:
    """Absolute dotted names imported by the nodes of `file`, whose path is relative to the package."""
    package = ("hyperball", *Path(file).parts[:-1])
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = (*base, node.module) if node.module else base
            yield from (".".join((*base, alias.name)) for alias in node.names)


def imports_pointing_down(source: str, file: str) -> list[str]:
    """Top-level names of the package that `file` imports although they stand below it in the order."""
    dotted = [module.split(".") for module in imported_modules(ast.walk(ast.parse(source)), file)]
    names = {module[1] if module[1:] else module[0] for module in dotted if module[0] == "hyperball"}
    return sorted(name for name in names if floor(name) > floor(top_level_name(file)))


def parts_pointing_down(source: str, file: str) -> list[str]:
    """Parts of a package that `file`, in another part of it, imports although they stand below it."""
    package, part = (*file.removesuffix(".py").split("/"), "")[:2]
    order = WITHIN.get(package, ())
    dotted = [module.split(".") for module in imported_modules(ast.walk(ast.parse(source)), file)]
    names = {module[2] for module in dotted if module[:2] == ["hyperball", package] and module[2:]}
    return sorted(name for name in names & set(order) if part in order and order.index(name) > order.index(part))


@pytest.mark.parametrize("file", [file for file in FILES if file != "__init__.py"])
def test_imports_point_one_way(file):
    source = (PACKAGE / file).read_text()
    assert imports_pointing_down(source, file) == []
    assert parts_pointing_down(source, file) == []


@pytest.mark.parametrize(
    "file, source, expected",
    [
        ("experiments/jobs/crew.py", "from hyperball.experiments.results.found import Found", ["results"]),
        ("experiments/jobs/crew.py", "from hyperball.experiments.records.broken import damage", []),
        ("experiments/jobs/crew.py", "from hyperball.experiments import results", ["results"]),
        ("experiments/records/broken.py", "from ..jobs import job", ["jobs"]),
        ("experiments/table.py", "from hyperball.experiments.jobs.job import Job", ["jobs"]),
        ("experiments/demo.py", "from hyperball.experiments.jobs.job import Job", []),
    ],
)
def test_imports_pointing_down_within_a_package_are_found(file, source, expected):
    assert parts_pointing_down(source, file) == expected


@pytest.mark.parametrize(
    "file, source, expected",
    [
        ("nn/conv.py", "from ..functional import decoupled_conv2d", []),
        ("nn/conv.py", "from hyperball.radial import tanh", []),
        ("nn/conv.py", "from . import linear", []),
        ("freeze.py", "from .convert import convert_model", []),
        ("freeze.py", "from . import models", ["models"]),
        ("radial.py", "from ._text import parse", []),
        ("_text.py", "from .radial import tanh", ["radial"]),
        ("kernels/eager.py", "def f():\n    from ..nn import conv", ["nn"]),
        ("functional/conv.py", "import hyperball as hb", ["hyperball"]),
        ("optim/projection.py", "import hyperball.cli.main, hyperball.nn", ["cli"]),
    ],
)
def test_imports_pointing_down_are_found(file, source, expected):
    assert imports_pointing_down(source, file) == expected


def test_every_package_has_its_place_in_the_order():
    assert {Path(file).parts[0] for file in FILES if "/" in file} <= set(ORDER)


def run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when a module is imported: not function bodies, not blocks for type checkers."""
    for node in ast.iter_child_nodes(tree):
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if not for_types and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from run_at_import(node)


@pytest.mark.parametrize("file", [file for file in FILES if top_level_name(file) not in LABORATORY])
def test_library_needs_torch_and_numpy_alone(file):
    nodes = run_at_import(ast.parse((PACKAGE / file).read_text()))
    roots = {module.partition(".")[0] for module in imported_modules(nodes, file)}
    allowed = {"hyperball", "torch", "numpy"} | ({"triton"} if file.startswith("kernels/") else set())
    assert roots - sys.stdlib_module_names <= allowed


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(*extras: str) -> Iterator[Requirement]:
    """Requirements of the extras (of the core without any), where an extra that names others is expanded."""
    texts = [text for extra in extras for text in project()["optional-dependencies"][extra]]
    for requirement in map(Requirement, texts if extras else project()["dependencies"]):
        if requirement.name == "hyperball":
            yield from requirements(*requirement.extras)
        else:
            yield requirement


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("extra", [None, *project()["optional-dependencies"]])
def test_constraints_pin_every_requirement_within_its_range(extra):
    pinned = pins()
    wanted = list(requirements(*[extra] if extra else []))
    assert wanted
    assert [str(r) for r in wanted if pinned.get(r.name) not in r.specifier] == []


def test_version_is_the_same_everywhere():
    version = project()["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def project_files() -> list[Path]:
    """Files that are committed or would be; none where there is no git checkout."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="lists the files of a git checkout")
def test_no_file_names_a_path_of_one_machine():
    machine_path = re.compile(rb"(?<![\w.\-}])/(work|root|home|Users)/")
    files = project_files()
    assert Path(__file__) in files
    contents = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in files}
    texts = {name: content for name, content in contents.items() if b"\0" not in content}
    assert [name for name, content in texts.items() if machine_path.search(content)] == []
