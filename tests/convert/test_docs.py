"""The code in the documents about models and the converter runs."""

import re

import pytest
from places import DOCS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["models.md", "convert.md"])
def test_the_code_of_a_document_runs(name, tmp_path, monkeypatch):
    for package in ("timm", "torchvision", "safetensors", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, name, "exec"), names)
