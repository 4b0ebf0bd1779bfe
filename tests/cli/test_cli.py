"""The command line: help, names, mistakes, exit codes."""

import importlib
import os
import signal
import subprocess
import sys
import tomllib

import pytest
from places import SOURCE

from hyperball._errors import exit_code, report
from hyperball.cli import main
from hyperball.cli.commands import COMMANDS

pytest.importorskip("jsonargparse")


def call(capsys, *arguments):
    """Exit code, output and errors of a command."""
    capsys.readouterr()
    try:
        code = main(list(arguments))
    except SystemExit as stop:  # argparse's own --help
        code = stop.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys, *arguments):
    """The one line with which a command refuses."""
    code, _, errors = call(capsys, *arguments)
    assert code == 2
    assert errors.count("\n") == 1, errors
    return errors.strip()


def test_help_lists_every_command(capsys):
    code, text, _ = call(capsys, "--help")
    assert code == 0
    for name, command in COMMANDS.items():
        assert f"  {name} " in text
        assert command.about in text


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "attack"])
def test_help_of_a_command_says_what_it_does_and_shows_an_example(name, capsys):
    code, text, _ = call(capsys, name, "--help")
    assert code == 0
    assert COMMANDS[name].about in text
    assert COMMANDS[name].example in text


@pytest.mark.parametrize("name, command", COMMANDS.items())
def test_examples_call_their_own_command(name, command):
    assert command.example.split()[:2] == ["hyperball", name]


def test_nothing_heavy_is_imported_for_help_or_a_report():
    code = f"""
import sys, types
package = types.ModuleType("hyperball")
package.__path__ = [{str(SOURCE / "hyperball")!r}]
sys.modules["hyperball"] = package
from hyperball.cli import main
assert main(["--help"]) == 0
import hyperball.report, hyperball.cli.report, hyperball.cli.bench
print(sorted({{"torch", "numpy", "jsonargparse", "rich", "sklearn"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


SAYS_WHAT_CTRL_C_DOES = """
import signal
def main():
    print(getattr(signal.getsignal(signal.SIGINT), "__name__", "ignored"))
"""


def console_script(package, folder):
    """What comes of the console script where the package's own module is this text."""
    (folder / "hyperball").mkdir()
    (folder / "hyperball" / "__init__.py").write_text(package)
    (folder / "hyperball" / "cli.py").write_text(SAYS_WHAT_CTRL_C_DOES)
    pyproject = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())
    module, _, function = pyproject["project"]["scripts"]["hyperball"].partition(":")
    script = f"import sys; from {module} import {function}; sys.exit({function}())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(SOURCE)))}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)


def test_ctrl_c_while_the_package_is_imported_ends_with_one_line(tmp_path):
    package = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:  # as an extension may
    raise ImportError
"""
    done = console_script(package, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "hyperball: interrupted\n")


def test_ctrl_c_that_is_ignored_stays_so_while_the_package_is_imported(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a child inherits it
    try:
        done = console_script("import signal; signal.raise_signal(signal.SIGINT)", tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ignored\n", "")


def test_the_command_itself_hears_ctrl_c_as_python_does(tmp_path):
    assert console_script("", tmp_path).stdout == "default_int_handler\n"


@pytest.mark.slow
def test_python_m_hyperball_is_the_command_line():
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "hyperball"]
    helped = subprocess.run([*command, "--help"], env=environment, capture_output=True, text=True, check=True)
    assert "usage: hyperball COMMAND" in helped.stdout
    wrong = subprocess.run([*command, "trian"], env=environment, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert wrong.stderr == "hyperball: unknown command 'trian'; did you mean train?\n"


MISTAKES = {
    "an unknown command": (["trian"], "did you mean train?"),
    "an option without a command": (["--epochs=3"], "give a command before --epochs=3"),
    "an unknown option": (["data", "digits", "--rot=x"], "unknown option --rot; did you mean --root?"),
    "an unknown field": (["train", "--model.magnitud=log"], "did you mean --model.magnitude?"),
    "an abbreviated field": (["train", "--epo=3"], "unknown option --epo; did you mean --epochs?"),
    "a wrong type": (["train", "--epochs=2.5"], "`epochs` must be a whole number or null, got '2.5'"),
    "a wrong choice": (["train", "--optimizer.name=adm"], "did you mean 'adam'?"),
    "an impossible value": (["train", "--optimizer.lr=-1"], "`optimizer.lr` must be > 0, got -1.0"),
    "an impossible combination": (["train", "--projection.every=5"], "needs a `model.magnitude`"),
    "an unknown magnitude": (["train", "--model.magnitude=tnh"], "did you mean 'tanh'?"),
    "a nameless folder to keep in": (
        ["reproduce", "dcnet-table3", "--missing", "--collect", ""],
        "--collect must name a folder",
    ),
    "a missing recipe": (["train", "nothing.yaml"], "nothing.yaml: no such file"),
    "an unknown recipe": (["train", "digts"], "unknown recipe 'digts'; did you mean digits?"),
    "an unknown model": (["train", "--model.name=cnn99"], "did you mean"),
    "an unknown data set": (["data", "cifar11"], "did you mean 'cifar10'?"),
    "a missing data folder": (["data", "cifar10", "--root", "nowhere"], "nowhere"),
    "a folder that is no run": (["resume", "nowhere"], "nowhere holds no run"),
    "evaluating what is no run": (["evaluate", "nowhere"], "nowhere holds no run"),
    "exporting what is no run": (["export", "nowhere", "--onnx", "x.onnx"], "nowhere holds no run"),
    "a report on no folder": (["report", "nowhere"], "nowhere is no folder"),
    "an unknown kind of names": (["list", "modles"], "did you mean models?"),
    "an unknown layer": (["explain", "con(3, 4, 3)"], "unknown layer 'con'; did you mean conv?"),
    "an unknown argument of a layer": (["explain", "conv(3, 4, 3, magntude=1)"], "cannot be built"),
    "code in a layer": (["explain", "conv(3, 4, 3, bias=[x for x in y])"], "is not a plain value"),
    "a mapping that is none": (["explain", "conv({[]: 1}, 3)"], "is not a plain value"),
    "a call in place of a number": (["explain", "conv(__import__('os'), 4, 3)"], "`in_channels` must be a number, got"),
    "a name in place of a size": (["explain", "conv(3, 4, kernel_size=big)"], "`kernel_size` must be a number, got"),
    "a value for print_config": (["train", "--print_config=foo"], "--print_config takes no value, got 'foo'"),
    "both lengths": (["train", "--epochs=2", "--steps=9"], "`epochs` and `steps` exclude each other, got 2 and 9"),
    "half a layer": (["explain", "conv(3, 4"], "neither a model nor a call"),
    "a plain model to explain": (["explain", "digits"], "no hyperball layer"),
    "nothing to convert to": (["convert", "digits"], "give a `magnitude`"),
    "a wrong suffix": (["convert", "digits", "--magnitude", "tanh", "--out", "x.pt"], "must end in .safetensors"),
    "a missing grid": (["grid", "nothing.yaml"], "nothing.yaml: no such file"),
    "no jobs": (["grid", "nothing.yaml", "--jobs", "0"], "--jobs must be >= 1, got 0"),
    "a demo without seeds": (["demo", "--seeds", "0"], "`seeds` must be a whole number >= 1, got 0"),
    "a demo into a folder": (["demo", "-o", "."], "is a folder"),
    "no devices": (["train", "--devices=0"], "`devices` must be"),
    "less than no devices": (["train", "--devices=--5"], "`devices` must be"),
}


@pytest.mark.parametrize("arguments, message", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_refused_with_one_line_that_helps(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, *arguments)
    assert message in line
    assert line.startswith("hyperball")
    assert list(tmp_path.rglob("*.json")) == []


def test_an_empty_mapping_takes_the_place_of_what_a_recipe_has(capsys):
    code, shown, _ = call(capsys, "train", "cifar10", "--model.options={}", "--print_config")
    assert code == 0
    assert "options: {}" in shown
    assert "norm_eps" in call(capsys, "train", "cifar10", "--print_config")[1]


@pytest.mark.parametrize("closing", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_output_ends_no_command(closing, tmp_path):
    line = f"{sys.executable} -m hyperball data digits {closing}; echo $? > code"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert (tmp_path / "code").read_text() == "0\n"
    assert "Traceback" not in done.stderr


def test_what_an_encoding_lacks_is_a_question_mark(tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "hyperball", "list", "magnitudes"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "?" in done.stdout
    assert done.stdout.isascii()


def test_debug_adds_the_traceback(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, errors = call(capsys, "train", "nothing.yaml", "--debug")
    assert code == 2
    assert "Traceback" in errors
    assert call(capsys, "--debug", "train", "nothing.yaml")[2].endswith("nothing.yaml: no such file\n")


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


def test_a_value_error_from_outside_the_package_is_no_mistake_of_the_users():
    assert exit_code(raised(ValueError("x"))) is None
    assert exit_code(raised(OSError(28, "No space left on device"))) == 2
    assert exit_code(raised(KeyboardInterrupt())) == 130


def test_exit_codes_of_our_own_errors():
    from hyperball.training import CheckpointError, Interrupted, NonFiniteError

    assert exit_code(raised(CheckpointError("damaged"))) == 2
    assert exit_code(raised(NonFiniteError(3, "layer conv"))) == 1
    assert exit_code(raised(Interrupted(3, "hyperball resume x", 2))) == 130
    assert exit_code(raised(Interrupted(3, "hyperball resume x", 15))) == 143


@pytest.mark.parametrize("rank, lines", [("0", 1), ("1", 0)])
def test_of_several_processes_the_first_says_how_to_resume(rank, lines, monkeypatch, capsys):
    from hyperball.training import Interrupted

    monkeypatch.setenv("LOCAL_RANK", rank)
    stop = Interrupted(3, "hyperball resume x", signal.SIGTERM)
    assert report(raised(stop), "hyperball train") == 143
    errors = capsys.readouterr().err
    assert errors.count("\n") == errors.count("hyperball resume x") == lines


def test_a_missing_extra_is_named(capsys, monkeypatch):
    def without(name, *rest):
        raise ModuleNotFoundError("No module named 'jsonargparse'", name="jsonargparse")

    monkeypatch.setattr(importlib, "import_module", without)
    assert refused(capsys, "train").endswith("pip install 'hyperball[train]'")


@pytest.mark.parametrize("kind", ["models", "magnitudes", "angulars", "penalties", "data", "recipes"])
def test_list_gives_every_name_with_a_line_about_it(kind, capsys):
    from hyperball import angular, data, models, radial
    from hyperball.experiments.catalog import RECIPES

    names = {
        "models": models.names(),
        "magnitudes": radial.names("magnitude"),
        "angulars": angular.names(),
        "penalties": radial.names("penalty"),
        "data": data.names(),
        "recipes": tuple(RECIPES),
    }[kind]
    _, text, _ = call(capsys, "list", kind)
    rows = [line.split(maxsplit=1) for line in text.splitlines()]
    assert {row[0] for row in rows} >= set(names)
    assert all(len(row) == 2 for row in rows)


def test_list_without_a_kind_gives_all_of_them(capsys):
    _, text, _ = call(capsys, "list")
    assert [line for line in text.splitlines() if line and not line.startswith(" ")] == [
        "models", "magnitudes", "angulars", "penalties", "data", "recipes", "tables",
    ]  # fmt: skip


def test_data_prints_counts(capsys):
    code, text, _ = call(capsys, "data", "digits")
    assert code == 0
    assert "1,437" in text
    assert "360" in text


@pytest.mark.parametrize(
    "text, expected",
    [
        ("conv(3, 8, 3, magnitude=tanh)", "α·tanh(n/ρ)"),
        ("conv(3, 8, kernel_size=(3, 1), magnitude='ball(rho=2)')", "α·min(n, ρ)/ρ"),
        ("linear(4, 2, magnitude=tanh(rho=2, relative=False))", "α·tanh(n/ρ)"),
        ("DecoupledConv1d(3, 8, 3, magnitude=linear + tanh, angular=square_cosine)", "α·n + α·tanh(n/ρ)"),
    ],
)
def test_explain_reads_a_layer_as_literals(text, expected, capsys):
    code, printed, errors = call(capsys, "explain", text)
    assert code == 0, errors
    assert expected in printed
    assert "kernel" in printed


def test_explain_never_evaluates(capsys, tmp_path):
    target = tmp_path / "made"
    line = refused(capsys, "explain", f"conv(3, open({str(target)!r}, 'w'), 3)")
    assert "cannot be built" in line
    assert not target.exists()


def test_explain_a_model_names_its_layers(capsys):
    _, text, _ = call(capsys, "explain", "digits", "--magnitude", "tanh", "--activation", "none")
    assert "stages.0.0" in text


def test_convert_reports_and_writes(capsys, tmp_path):
    target = tmp_path / "model.safetensors"
    code, text, errors = call(capsys, "convert", "digits", "--magnitude", "tanh", "--out", str(target))
    assert code == 0, errors
    assert "3 layers replaced" in text
    assert target.exists()

    import hyperball as hb

    loaded = hb.models.create("digits", magnitude="tanh")
    assert hb.convert.load(loaded, target)["magnitude"] == "tanh"
