"""`hyperball attack` on a small run: a table, a record, and going on after an interruption."""

import json

import pytest

from hyperball.cli.main import main

pytest.importorskip("lightning_fabric")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from hyperball.training import Recipe, train

    folder = tmp_path_factory.mktemp("runs") / "digits"
    train(Recipe(epochs=3).override({"model.options": {"width": 8}}), folder, accelerator="cpu")
    return folder


OPTIONS = ["--eps", "16/255", "--images", "60", "--accelerator", "cpu"]


def test_attack_prints_a_table_with_doubts_and_writes_one_record(run, capsys):
    arguments = ["attack", str(run), *OPTIONS, "--attacks", "fgsm,pgd(steps=5, restarts=2)", "--curve", "bim"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    path = run / "attacks" / "linf-16_255-n60-seed0.json"
    assert "accuracy (linf 16/255, n=60, seed 0)" in printed
    assert "doubts" in printed
    assert f"record: {path}" in printed
    assert "128.0/255" in printed
    record = json.loads(path.read_text())
    assert record["conditions"]["about"]["recipe"]["epochs"] == 3
    assert {entry["attack"] for entry in record["attacks"]} == {"fgsm", "pgd(steps=5, restarts=2)"}
    assert sorted(held.name for held in path.parent.iterdir()) == [f"{path.stem}-curve.json", path.name]
    assert main(["attack", str(run), *OPTIONS, "--attacks", "fgsm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["attacks"]["fgsm"] == record["attacks"][0]["accuracy"]


def test_an_interruption_says_how_to_go_on(run, capsys, monkeypatch, tmp_path):
    from hyperball.cli import attack

    out = tmp_path / "record.json"
    arguments = [
        "attack",
        str(run),
        *OPTIONS,
        "--attacks",
        "fgsm,bim",
        "--no-checks",
        "--out",
        str(out),
        "--batch-size",
        "20",
    ]

    def stop(run_dir, eps, attacks, *, progress, **options):
        def interrupted(text, done, total):
            progress(text, done, total)
            if "bim" in text:
                raise KeyboardInterrupt

        return whole(run_dir, eps, attacks, progress=interrupted, **options)

    whole = attack.run_attacks
    monkeypatch.setattr(attack, "run_attacks", stop)
    assert main(arguments) == 130
    assert "give the same command again to go on" in capsys.readouterr().err
    assert not out.exists()
    monkeypatch.setattr(attack, "run_attacks", whole)
    assert main(arguments) == 0
    assert out.exists()


@pytest.mark.parametrize(
    "options, message",
    [
        (["--eps", "8"], "did you mean 8/255?"),
        (["--eps", "exit()"], "`epsilon` must be a number or a fraction"),
        (["--attacks", "fgms"], "unknown attack 'fgms'; did you mean 'fgsm'?"),
        (["--attacks", "transfer"], "`source` must be given"),
        (["--images", "0"], "`n` must be in 1..360"),
        (["--epsilon", "1"], "unknown option --epsilon"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(run, capsys, options, message):
    assert main(["attack", str(run), "--accelerator", "cpu", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main(["attack", str(tmp_path)]) in (1, 2)
    assert "holds no run" in capsys.readouterr().err
