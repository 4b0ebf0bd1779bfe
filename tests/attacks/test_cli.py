"""`hyperball attack` on a small run: a table, a record, and going on after an interruption."""

import json
import signal
import threading

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
    assert f"record: {path}" in printed
    assert f"curve: {path.with_name(path.stem + '-curve-bim.json')}" in printed
    assert "128.0/255" in printed
    record = json.loads(path.read_text())
    assert record["doubts"]  # of so small a sample
    assert "\n".join(["doubts:", *(f"  - {doubt}" for doubt in record["doubts"])]) in printed
    assert record["conditions"]["about"]["recipe"]["epochs"] == 3
    assert {entry["attack"] for entry in record["attacks"]} == {"fgsm", "pgd(steps=5, restarts=2)"}
    assert sorted(held.name for held in path.parent.iterdir()) == [f"{path.stem}-curve-bim.json", path.name]
    assert main(["attack", str(run), *OPTIONS, "--attacks", "fgsm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["attacks"]["fgsm"] == record["attacks"][0]["accuracy"]


@pytest.fixture(name="computed")
def _computed(monkeypatch):
    """What is computed and not read from a journal, batch by batch."""
    from hyperball.attacks.journal import Journal

    keys, put = [], Journal.put
    monkeypatch.setattr(Journal, "put", lambda self, key, **values: (keys.append(key), put(self, key, **values))[1])
    return keys


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_says_how_to_go_on_and_what_is_done_is_not_done_again(
    run, capsys, monkeypatch, tmp_path, computed, number, code
):
    from hyperball.cli import attack

    out = tmp_path / "record.json"
    common = [*OPTIONS, "--no-checks", "--out", str(out), "--batch-size", "10"]
    arguments = ["attack", str(run), "--attacks", "fgsm,bim", *common]

    def stop(*given, progress, **options):
        def interrupted(text, done, total):
            progress(text, done, total)
            if "bim" in text and done == 1:
                signal.raise_signal(number)

        return whole(*given, progress=interrupted, **options)

    whole, before = attack.run_attacks, signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(attack, "run_attacks", stop)
    assert main(arguments) == code
    assert "what is done is kept; give the same command again to go on" in capsys.readouterr().err
    assert names_in(tmp_path) == ["record.json.partial.jsonl"]
    assert signal.getsignal(signal.SIGTERM) is before
    done = [key.split()[0] for key in computed]
    assert done == ["clean"] * 6 + ["fgsm"] * done.count("fgsm") + ["bim"]
    computed.clear()
    monkeypatch.setattr(attack, "run_attacks", whole)
    assert main(arguments) == 0
    assert [key.split()[0] for key in computed] == ["bim"] * (done.count("fgsm") - 1)  # all but one batch
    assert len(computed) > 0
    assert names_in(tmp_path) == ["record.json"]


def test_an_attack_in_another_thread_leaves_signals_alone(run, tmp_path, capsys):
    codes, out = [], str(tmp_path / "record.json")
    arguments = ["attack", str(run), *OPTIONS, "--attacks", "fgsm", "--no-checks", "--out", out]
    thread = threading.Thread(target=lambda: codes.append(main(arguments)))
    thread.start()
    thread.join()
    assert codes == [0]
    capsys.readouterr()


def test_the_network_and_the_data_are_loaded_once(run, capsys, monkeypatch, tmp_path):
    from hyperball.experiments import attacking

    calls, load = [], attacking.network_and_images
    monkeypatch.setattr(attacking, "network_and_images", lambda *given: (calls.append(given), load(*given))[1])
    out = ["--out", str(tmp_path / "record.json"), "--no-checks"]
    assert main(["attack", str(run), *OPTIONS, "--attacks", "fgsm", "--curve", "fgsm", *out]) == 0
    assert len(calls) == 1
    capsys.readouterr()


@pytest.mark.parametrize("text, over", [("blur", "blur"), ("corruption:noise", "noise")])
def test_a_curve_may_be_of_a_corruption(run, capsys, tmp_path, text, over):
    from hyperball.attacks import Curve

    out = ["--out", str(tmp_path / "record.json"), "--no-checks"]
    assert main(["attack", str(run), *OPTIONS, "--attacks", "fgsm", "--curve", text, *out]) == 0
    printed = capsys.readouterr().out
    path = tmp_path / f"record-curve-corruption-{over}.json"
    curve = Curve.read(path)
    assert (curve.over, curve.values) == (over, [0, 1, 2, 3, 4, 5])
    assert f"accuracy by severity of {over}" in printed
    for value, accuracy in zip(curve.values, curve.accuracies, strict=True):
        assert f"{value:6.0f}  {100 * accuracy:5.1f} %" in printed
    assert f"curve: {path}" in printed


@pytest.mark.parametrize("eps", ["4/255", " 4 / 255 ", "0.01568627450980392", "8/510"])
def test_one_budget_has_one_record_however_it_is_written(run, capsys, computed, eps):
    common = ["attack", str(run), "--images", "24", "--accelerator", "cpu", "--no-checks", "--attacks", "fgsm"]
    assert main([*common, "--eps", "4/255"]) == 0
    computed.clear()
    assert main([*common, "--eps", eps]) == 0
    printed = capsys.readouterr().out
    assert not computed
    assert printed.count(f"record: {run / 'attacks' / 'linf-4_255-n24-seed0.json'}") == 2


@pytest.mark.parametrize(
    "options, message",
    [
        (["--eps", "8"], "did you mean 8/255?"),
        (["--eps", "exit()"], "`epsilon` must be a number or a fraction"),
        (["--attacks", "fgms"], "unknown attack 'fgms'; did you mean 'fgsm'?"),
        (["--attacks", "transfer"], "`source` must be given"),
        (["--images", "0"], "`images` must be in 1..360"),
        (["--images", "361"], "`images` must be in 1..360"),
        (["--out", ""], "--out must be the name of a file, got ''"),
        (["--out", "/proc/record.json", "--images", "2", "--attacks", "noise"], "/proc/record.json: "),
        (["--curve", "blurr"], "--curve: unknown attack or corruption 'blurr'; did you mean 'blur'?"),
        (["--curve", "corruption:bim"], "--curve: unknown corruption 'bim'; known: noise"),
        (["--epsilon", "1"], "unknown option --epsilon"),
        (["--attacks", "square(share='x')"], "--attacks: "),
        (["--attacks", "pgd(steps=[])"], "--attacks: "),
        (["--curve", "bimm"], "--curve: unknown attack or corruption 'bimm'; did you mean 'bim'?"),
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
    assert main(["attack", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
