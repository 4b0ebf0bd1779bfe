"""Files of weights: what is damaged or hostile is refused by name, and nothing of others is overwritten."""

import json
import os

import pytest
import torch
from convert_cases import small_net
from torch import nn

import hyperball as hb
from hyperball.convert import storage

files = pytest.importorskip("safetensors.torch")


def digits():
    return hb.models.create("digits", width=4, magnitude="tanh")


def stored(folder, described, model=None):
    """A file whose metadata are this text, written by another tool."""
    path = folder / "m.safetensors"
    state = {name: tensor.clone() for name, tensor in (model or nn.Linear(2, 2)).state_dict().items()}
    path.write_bytes(files.save(state, metadata={"hyperball": described}))
    return path


@pytest.mark.parametrize("text", ["[1]", "null", "3", '"x"', "{not json", "[" * 100_000, '{"a": ' * 100_000])
@pytest.mark.parametrize("place", ["inside", "beside"])
def test_damaged_metadata_are_refused_by_the_name_of_their_file(text, place, tmp_path):
    path = stored(tmp_path, text if place == "inside" else "{}")
    if place == "beside":
        path.with_suffix(".json").write_text(text)
    for load in (hb.convert.read, hb.models.load, lambda path: hb.convert.load(nn.Linear(2, 2), path)):
        with pytest.raises(ValueError, match=r"m\.(safetensors|json) is damaged"):
            load(path)


@pytest.mark.parametrize(
    "model",
    [
        {"name": 5},
        {"name": "digits", "options": [1]},
        {"name": "digits", "options": None},
        {"name": "digits", "options": {"name": "x"}},
        {"name": "digits", "options": {"width": {"a": 1}}},
        {"name": "digits", "options": {"width": "x"}},
        {"name": "digits", "options": {"widht": 4}},
        {"name": "digits", "num_classes": "many"},
        {"name": "digits", "num_classes": True},
        {"name": "nonsense"},
        {"name": "../digits"},
        {"name": "timm/hf-hub:someone/something"},
        {"name": "timm/local-dir:/somewhere"},
    ],
)
def test_a_model_that_metadata_do_not_make_is_refused_with_the_file(model, tmp_path):
    path = stored(tmp_path, json.dumps({"model": model}))
    with pytest.raises(ValueError, match=r"m\.safetensors holds a model that cannot be made from its metadata"):
        hb.models.load(path)


class Unpickled:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize(
    "option", ["checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "weights"]
)
@pytest.mark.parametrize("source", ["timm/test_resnet", "torchvision/resnet18", "digits"])
def test_no_file_makes_a_library_read_another_one(option, source, tmp_path):
    pytest.importorskip("timm")
    trap, trace = tmp_path / "trap.pth", tmp_path / "unpickled"
    torch.save({"state_dict": Unpickled(trace)}, trap)
    value = str(trap) if option != "pretrained_cfg" else {"file": str(trap)}
    path = stored(tmp_path, json.dumps({"model": {"name": source, "options": {option: value}}}))
    with pytest.raises(ValueError, match=f"the option '{option}'"):
        hb.models.load(path)
    assert not trace.exists()


@pytest.mark.parametrize("options", [{"checkpoint_path": "x.pth"}, {"scriptable": True}, {"act_layer": {"a": 1}}])
def test_what_could_not_be_loaded_is_not_saved(options, tmp_path):
    with pytest.raises(ValueError, match=f"option '{next(iter(options))}'"):
        hb.models.save(nn.Linear(2, 2), tmp_path / "m.safetensors", name="timm/test_resnet", options=options)
    with pytest.raises(ValueError, match="unknown model 'digit'; did you mean 'digits'"):
        hb.models.save(nn.Linear(2, 2), tmp_path / "m.safetensors", name="digit")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "magnitude",
    [
        hb.radial.tanh,
        hb.radial.tanh(rho=1.0 / 3.0, alpha=2.0),
        hb.radial.ball(rho=torch.tensor(0.123456789), relative=False),
    ],
)
def test_values_of_tables_are_stored_as_texts_to_the_last_digit(magnitude, tmp_path):
    options = {"width": 4, "magnitude": magnitude}
    model = hb.models.create("digits", **options).eval()
    path = hb.models.save(model, tmp_path / "m.safetensors", name="digits", options=options)
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(hb.models.load(path).eval()(x), model(x))


def test_how_a_model_was_made_is_not_stored(tmp_path):
    path = hb.models.save(
        digits(), tmp_path / "m.safetensors", name="digits",
        options={"width": 4, "magnitude": "tanh", "pretrained": True, "batch": torch.ones(2)},
    )  # fmt: skip
    assert hb.convert.read(path)[1]["model"]["options"] == {"width": 4, "magnitude": "tanh"}


def test_a_value_per_channel_has_no_text_and_is_refused(tmp_path):
    options = {"magnitude": hb.radial.tanh(rho=torch.ones(4))}
    with pytest.raises(ValueError, match=r"a parameter per channel cannot be stored, got shape \(4,\)"):
        hb.models.save(digits(), tmp_path / "m.safetensors", name="digits", options=options)
    with pytest.raises(TypeError, match="`metadata` must hold texts, numbers, lists and mappings, got Tensor"):
        hb.convert.save(digits(), tmp_path / "m.safetensors", metadata={"a": torch.ones(1)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ['{"mine": 1}', "[1]", "notes"])
def test_a_json_file_of_someone_else_is_not_overwritten(text, tmp_path):
    theirs = tmp_path / "record.json"
    theirs.write_text(text)
    with pytest.raises(FileExistsError, match=r"record\.json was not written by"):
        hb.convert.save(small_net(), tmp_path / "record.safetensors")
    assert theirs.read_text() == text
    assert list(tmp_path.iterdir()) == [theirs]


@pytest.mark.parametrize("renames", [0, 1])
def test_a_crash_between_the_two_files_leaves_what_can_be_read(renames, tmp_path, monkeypatch):
    path = hb.convert.save(nn.Linear(2, 2), tmp_path / "m.safetensors", metadata={"version": 1})
    left, rename = [None] * renames, storage.Path.replace

    def crash(self, target):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return rename(self, target)

    monkeypatch.setattr(storage.Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        hb.convert.save(nn.Linear(2, 2), path, metadata={"version": 2})
    assert hb.convert.read(path)[1]["version"] == 1 + renames
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: {**state, "bias": 3}, r"1 are no tensors \(bias is int\)"),
        (lambda state: {**state, "bias": state["bias"].int()}, r"1 hold other numbers \(bias is torch.int32, not"),
        (lambda state: {**state, "bias": state["bias"] > 0}, "1 hold other numbers"),
        (lambda state: [1], "`state` must be a mapping"),
    ],
)
def test_states_of_other_kinds_are_refused_and_the_model_stays(change, message):
    model = nn.Linear(2, 2)
    before = model.bias.detach().clone()
    with pytest.raises((TypeError, ValueError), match=message):
        hb.convert.load_state(model, change({name: tensor + 1 for name, tensor in model.state_dict().items()}))
    assert torch.equal(model.bias, before)


def test_another_precision_still_loads():
    model = nn.Linear(2, 2)
    hb.convert.load_state(model, {name: tensor.double() for name, tensor in model.state_dict().items()})
    assert model.weight.dtype == torch.float32
