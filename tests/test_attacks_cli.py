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


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    from hyperball.training import Recipe, train

    folder = tmp_path_factory.mktemp("runs") / "plain"
    train(Recipe(epochs=1, seed=1).override({"model.options": {"width": 8}}), folder, accelerator="cpu")
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
    assert sorted(held.name for held in path.parent.iterdir()) == [f"{path.stem}-curve-bim.json", path.name]
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
        (["--attacks", "square(share='x')"], "--attacks: "),
        (["--attacks", "pgd(steps=[])"], "--attacks: "),
        (["--curve", "bimm"], "--curve: unknown attack 'bimm'; did you mean 'bim'?"),
        (["--curve", "square(share='x')"], "--curve: "),
        (["--curve", "transfer"], "`source` must be given"),
        (["--curve", "surrogate"], "`model` must have a declarative layer"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(run, capsys, options, message):
    assert main(["attack", str(run), "--accelerator", "cpu", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_a_curve_that_cannot_be_is_refused_before_any_attack(run, capsys, tmp_path):
    out = tmp_path / "record.json"
    arguments = ["attack", str(run), *OPTIONS, "--attacks", "fgsm", "--no-checks", "--out", str(out)]
    assert main([*arguments, "--curve", "transfer"]) == 2
    assert main([*arguments, "--curve", "bimm"]) == 2
    assert list(tmp_path.iterdir()) == []
    capsys.readouterr()


def test_a_gpu_that_is_not_there_is_one_line(run, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["attack", str(run), "--accelerator", "cuda"]) == 2
    error = capsys.readouterr().err
    assert "where torch finds no GPU" in error
    assert len(error.strip().splitlines()) == 1


def names_in(folder):
    return sorted(held.name for held in folder.iterdir())


def test_commands_with_and_without_a_source_and_with_two_curves_go_beside_each_other(run, other, capsys, tmp_path):
    folder = run / "attacks"
    before = set(names_in(folder)) if folder.exists() else set()
    common = ["attack", str(run), "--eps", "4/255", "--images", "20", "--accelerator", "cpu", "--no-checks"]
    assert main([*common, "--attacks", "fgsm"]) == 0
    transferred = ["--attacks", "transfer(attack='fgsm')", "--source", str(other)]
    assert main([*common, *transferred, "--curve", "transfer(attack='fgsm')"]) == 0
    assert main([*common, *transferred, "--curve", "noise"]) == 0
    stem = "linf-4_255-n20-seed0"
    assert sorted(set(names_in(folder)) - before) == [
        f"{stem}-source-plain-curve-noise.json",
        f"{stem}-source-plain-curve-transfer-attack-fgsm.json",
        f"{stem}-source-plain.json",
        f"{stem}.json",
    ]
    assert "fgsm" in capsys.readouterr().out


def test_another_source_at_the_same_path_is_refused_with_the_option_that_helps(run, other, capsys, tmp_path):
    out = ["--out", str(tmp_path / "record.json")]
    common = ["attack", str(run), *OPTIONS, "--attacks", "fgsm", "--no-checks", *out]
    assert main([*common, "--source", str(run)]) == 0
    capsys.readouterr()
    assert main([*common, "--source", str(other)]) == 2
    error = capsys.readouterr().err
    assert "write elsewhere with --out, or give --fresh to begin anew" in error
    assert "resume=False" not in error


def test_a_curve_in_l2_prints_lengths(run, capsys, tmp_path):
    options = ["--norm", "l2", "--eps", "0.5", "--images", "20", "--accelerator", "cpu", "--no-checks"]
    out = ["--out", str(tmp_path / "record.json"), "--curve", "fgsm"]
    assert main(["attack", str(run), *options, "--attacks", "fgsm", *out]) == 0
    printed = capsys.readouterr().out
    assert "/255" not in printed
    assert "0.125" in printed


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main(["attack", str(tmp_path)]) in (1, 2)
    assert "holds no run" in capsys.readouterr().err
