"""Odd places in a results folder and odd places for a page: links, pipes, depths, closed folders, huge files."""

import os
import subprocess
import sys

import pytest
from places import ROOT
from report_cases import make_run, metrics, words_of

from hyperball.cli import main
from hyperball.report import read_folder, read_runs

pytest.importorskip("jinja2")


def test_links_pipes_and_huge_files_are_left_out(tmp_path, monkeypatch):
    make_run(tmp_path / "good")
    (tmp_path / "loop.json").symlink_to("loop.json")
    (tmp_path / "round").symlink_to(tmp_path)
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "piped").mkdir()
    os.mkfifo(tmp_path / "piped" / "record.json")
    monkeypatch.setattr("hyperball.report.files.MOST_BYTES", 50_000)
    (tmp_path / "huge.json").write_text('{"a": "' + "x" * 60_000 + '"}')
    found = read_folder(tmp_path)
    reasons = {entry.path: entry.reason for entry in found.left_out}
    assert set(reasons) == {"loop.json", "pipe.json", "piped", "huge.json", "round"}
    assert reasons["round"] == "a link to a folder: links are not followed"
    assert "no regular file" in reasons["pipe.json"]
    assert "MiB" in reasons["huge.json"]
    assert [run.name for run in found.runs] == ["good"]


def test_metrics_that_cannot_be_read_are_named_and_the_run_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("hyperball.report.files.MOST_BYTES", 50_000)
    long, odd, unfinished = (make_run(tmp_path / name, seed=seed) for seed, name in enumerate(("long", "odd", "un")))
    (long / "metrics.jsonl").write_text(metrics() * 500)
    for folder in (odd, unfinished):
        (folder / "metrics.jsonl").unlink()
        (folder / "metrics.jsonl").mkdir()
    (unfinished / "record.json").unlink()
    found = read_folder(tmp_path)
    assert [run.name for run in found.runs] == ["long", "odd", "un"]
    reasons = {entry.path: entry.reason for entry in found.left_out}
    assert set(reasons) == {f"{name}/metrics.jsonl" for name in ("long", "odd", "un")}
    assert "MiB" in reasons["long/metrics.jsonl"]
    assert "90.00 ± 0.00" in words_of(tmp_path)


def test_folders_may_be_deeper_than_python_recurses(tmp_path):
    make_run(tmp_path / "good")
    place = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("a", dir_fd=place)
        below = os.open("a", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = below
    os.close(place)
    assert [run.name for run in read_folder(tmp_path).runs] == ["good"]
    os.rename(tmp_path / "a", tmp_path / "b")  # what is left can be removed only step by step
    while (below := tmp_path / "b" / "a").exists():
        os.rename(below, tmp_path / "c")
        (tmp_path / "b").rmdir()
        os.rename(tmp_path / "c", tmp_path / "b")


def test_a_folder_that_cannot_be_entered_is_named(tmp_path, monkeypatch):
    make_run(tmp_path / "good")
    make_run(tmp_path / "closed" / "run")
    enter = os.scandir

    def refuse(folder):
        if os.path.basename(folder) == "closed":
            raise PermissionError(13, "Permission denied")
        return enter(folder)

    monkeypatch.setattr("os.scandir", refuse)
    for found in (read_folder(tmp_path), read_runs(tmp_path)):
        assert [(entry.path, entry.reason) for entry in found.left_out] == [
            ("closed", "cannot be read: Permission denied")
        ]
        assert [run.name for run in found.runs] == ["good"]


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_a_folder_without_permission_is_named_whoever_reads(mode, tmp_path):
    make_run(tmp_path / "good")
    closed = make_run(tmp_path / "closed")
    closed.chmod(mode)
    tmp_path.chmod(0o755)
    code = """
import os, sys
from hyperball.report import read_folder
os.chdir(sys.argv[1])
if os.getuid() == 0:  # whom permissions do not stop
    read_folder(".")  # imports what it needs
    os.setuid(65534)
found = read_folder(".")
print([run.name for run in found.runs], [entry.path for entry in found.left_out])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    closed.chmod(0o755)
    assert done.stdout == "['good'] ['closed']\n", done.stderr


def test_a_record_may_begin_with_a_byte_order_mark(tmp_path):
    for path in make_run(tmp_path / "a").iterdir():
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    found = read_folder(tmp_path)
    assert not found.left_out
    assert [len(run.evaluations) for run in found.runs] == [2]


def test_a_page_replaces_no_pipe_and_keeps_a_link(tmp_path, capsys):
    make_run(tmp_path / "runs" / "a")
    os.mkfifo(tmp_path / "pipe")
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "pipe")]) == 2
    assert "is no regular file" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link.html").symlink_to(tmp_path / "elsewhere" / "page.html")
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "link.html")]) == 0
    assert (tmp_path / "link.html").is_symlink()
    assert "90.00" in (tmp_path / "elsewhere" / "page.html").read_text()
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "pipe" / "page.html")]) == 2
    assert "pipe is no folder" in capsys.readouterr().err
