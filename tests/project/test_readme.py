"""The README's code runs, and prints what it promises."""

import contextlib
import io
import re

import pytest
from places import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS)
def test_every_python_block_of_the_readme_runs(code):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert "largest response" in printed.getvalue()
    assert "hand-written backward" in printed.getvalue()


def test_files_that_the_readme_names_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names = re.findall(r"\]\(([^)#]+)\)", text)
    assert names
    for name in names:
        assert (ROOT / name).exists(), name


def test_differences_that_the_readme_explains_are_those_of_its_table():
    """The sentence behind the table is written by hand, the table from the records."""
    table, behind = (
        (ROOT / "README.md")
        .read_text(encoding="utf-8")
        .split("<!-- results: summary -->")[1]
        .split("<!-- /results -->")
    )
    explained = re.findall(r"[+-]\d+\.\d\d", behind.split("\n## ")[0])
    largest = [line.split("|")[-2].strip() for line in table.splitlines() if line.startswith("|")]
    assert set(explained) <= set(largest)
    far = {word for word in largest if re.fullmatch(r"[+-]\d+\.\d\d", word) and abs(float(word)) > 5}
    assert set(explained) == far  # none that is large is passed over
