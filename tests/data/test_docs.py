"""The page about data runs, and importing the data code is cheap."""

import re
import subprocess
import sys
from pathlib import Path

from places import ROOT

from hyperball import data


def test_python_of_the_page_runs_in_order() -> None:
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    for block in blocks:
        exec(compile(block, "docs/data.md", "exec"), names)
    assert len(blocks) == 2
    assert tuple(names["images"].shape) == (128, 1, 8, 8)  # type: ignore[attr-defined]


def test_page_names_every_set() -> None:
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    for name in data.names():
        assert f"`{name}`" in text


def test_importing_the_data_code_imports_no_extra() -> None:
    code = "import sys, hyperball.data; print(*sys.modules)"
    source = str(Path(data.__file__).parents[2])
    environment = {"PYTHONPATH": source, "PATH": ""}
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    for module in ("torchvision", "h5py", "sklearn", "PIL", "matplotlib", "timm"):
        assert module not in loaded.stdout.split()
