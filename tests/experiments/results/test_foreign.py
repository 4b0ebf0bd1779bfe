"""Foreign and damaged files beside the records: named or passed over, never the end of a page or a table."""

import json

import pytest
from report_cases import make_run, number, table_tree, write

from hyperball.experiments.claims import read_claims
from hyperball.experiments.results.collecting import kept_table
from hyperball.experiments.results.evidence import outdated
from hyperball.files import FileError
from hyperball.report import read_folder
from hyperball.report.kinds import Published
from hyperball.report.results import counted
from hyperball.training import Record


def claims(table, told, **where):
    entry = {
        "claim": "it holds", "verdict": "holds", "found": f"{told} %", "table": table, "scale": "quarter",
        "numbers": {told: where},
    }  # fmt: skip
    return read_claims({"kind": "claims", "claims": [entry]})[0]


@pytest.mark.parametrize("protocol", [["a"], True, {}, 3])
def test_a_table_with_a_protocol_that_is_no_text_is_shown_without_one(protocol, tmp_path):
    write(tmp_path / "t/table.json", {**table_tree("t", [number("a", "x", 1.0, [2.0])]), "protocol": protocol})
    (found,) = read_folder(tmp_path).of(Published)
    assert isinstance(found.protocol, str)


@pytest.mark.parametrize("tree", [[], 3, {"numbers": 3}, {}])
def test_a_claim_whose_table_is_none_has_no_such_number(tree, tmp_path):
    write(tmp_path / "dcnet-table2-quarter/table.json", tree)
    claim = claims("dcnet-table2", "4.0", rows=["baseline"], columns=["cosine"])
    (said,) = outdated(claim, tmp_path)
    assert "has no such number" in said


@pytest.mark.parametrize(
    "name, path",
    [
        ("dcnet-table2", "dcnet-table2-quarter/table.json"),
        ("dcnet-table7", "dcnet-robustness-quarter/dcnet-table7.json"),
        ("dcnet-figure4", "dcnet-table4-quarter/dcnet-figure4.json"),
        ("of-nobody", "of-nobody-quarter/table.json"),
    ],
)
def test_a_claim_looks_where_its_table_is_kept(name, path, tmp_path):
    assert kept_table(tmp_path, name, "quarter") == tmp_path / path
    claim = claims(name, "4.0", rows=["baseline"], columns=["cosine"])
    (said,) = outdated(claim, tmp_path)
    assert path in said
    write(tmp_path / path, {"numbers": [{"row": "baseline", "column": "cosine", "mean": 3.96}]})
    assert outdated(claim, tmp_path) == []
    write(tmp_path / path, {"numbers": [{"row": "baseline", "column": "cosine", "mean": 5.0}]})
    assert len(outdated(claim, tmp_path)) == 1


@pytest.mark.parametrize(
    "field, value",
    [
        ("timing", {"seconds": "long"}), ("timing", None), ("notes", None), ("notes", "x"), ("conditions", []),
        ("results", {"last": {"top1": 0.5}, "best": 3}), ("recipe", 3), ("curve", {}), ("status", 1),
    ],
)  # fmt: skip
def test_a_record_of_another_form_is_refused_by_name(field, value, tmp_path):
    folder = make_run(tmp_path / "run", seed=0)
    assert Record.read(folder)
    tree = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps({**tree, field: value}))
    with pytest.raises(FileError, match=field):
        Record.read(folder)


def test_claims_are_no_figure(tmp_path):
    tree = {"kind": "claims", "claims": []}
    write(tmp_path / "claims.json", tree)
    assert counted(read_folder(tmp_path)).startswith("No record")
    write(tmp_path / "t/table.json", table_tree("t", [number("a", "x", 1.0, [2.0])]))
    assert counted(read_folder(tmp_path)) == "1 published table."
