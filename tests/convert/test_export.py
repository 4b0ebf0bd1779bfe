"""torch.export, ONNX and safetensors: what comes back computes what went in."""

import json
import math

import pytest
import torch
from convert_cases import images, small_net
from torch import nn

import hyperball as hb


def converted_net():
    model, _ = hb.convert_model(small_net(), magnitude="tanh", projection="l2_ball(radius=2)")
    hb.convert.calibrate(model, [images(8)])
    return model.eval()


@pytest.mark.parametrize("frozen", [False, True])
def test_an_exported_program_takes_any_batch_size(frozen):
    model = hb.freeze(converted_net()) if frozen else converted_net()
    program = hb.convert.export_program(model, images(3)).module()
    for batch in (1, 3, 7):
        x = images(batch)
        torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)


def test_exporting_leaves_the_mode_alone():
    model = converted_net().train()
    hb.convert.export_program(model, images(3))
    assert model.training
    assert model[0].training


@pytest.mark.parametrize("frozen", [False, True])
def test_onnx_gives_the_same_outputs_for_any_batch_size(frozen, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = hb.freeze(converted_net()) if frozen else converted_net()
    path = tmp_path / "model.onnx"
    gap = hb.convert.export_onnx(model, images(3), path)
    assert gap.absolute < 1e-4
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for batch in (1, 5):
        x = images(batch)
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), model(x).detach(), rtol=1e-4, atol=1e-4)


class AlwaysDrops(nn.Module):
    def forward(self, x):
        return x + nn.functional.dropout(torch.ones_like(x), 0.5, True)


class DividesByZero(nn.Module):
    def forward(self, x):
        return (x - x) / (x - x)


@pytest.mark.parametrize("layer", [AlwaysDrops(), DividesByZero()])
def test_onnx_that_does_not_give_what_torch_gives_is_refused_and_not_written(layer, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    (tmp_path / "m.onnx").write_text("an older one")
    with pytest.raises(ValueError, match=r"m\.onnx was not written: onnxruntime and torch differ by"):
        hb.convert.export_onnx(nn.Sequential(nn.Flatten(), layer), images(2, 4), tmp_path / "m.onnx")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["an older one"]


def test_a_model_with_other_weights_is_not_what_the_file_holds(tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    model, x, path = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), images(2, 2), tmp_path / "m.onnx"
    hb.convert.export_onnx(model, x, path)
    for bad in (math.nan, math.inf):
        with torch.no_grad():
            model[1].bias[1] = bad
        gap = hb.convert.check_onnx(path, model, x)
        assert not gap.absolute < 1e3
        assert not gap.relative < 1e3


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"magnitude": "ball", "angular": "square_cosine"}, {"pool": "huber(c=1)"}])
def test_more_operators_and_robust_pooling_reach_onnx(options, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    model = hb.models.create("digits", **options).eval()
    gap = hb.convert.export_onnx(model, torch.randn(2, 1, 8, 8), tmp_path / "model.onnx")
    assert gap.absolute < 1e-4


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda m, p: hb.convert.export_program(m, "x"), TypeError, "`example` must be a tensor"),
        (
            lambda m, p: hb.convert.export_program("m", images(2)),
            TypeError,
            "`model` must be a torch.nn.Module, got str",
        ),
        (
            lambda m, p: hb.convert.export_onnx("m", images(2), p / "m.onnx"),
            TypeError,
            "`model` must be a torch.nn.Mod",
        ),
        (lambda m, p: hb.convert.export_onnx(m, (images(),), p / "m.onnx"), TypeError, "`example` must be a tensor"),
        (
            lambda m, p: hb.convert.export_onnx(m, images(), p / "m.onnx", tolerance=-1),
            ValueError,
            "`tolerance` must be",
        ),
        (lambda m, p: hb.convert.save("m", p / "m.safetensors"), TypeError, "`model` must be a torch.nn.Module"),
        (lambda m, p: hb.convert.export_program(m, images(1)), ValueError, "a batch of at least 2"),
        (lambda m, p: hb.convert.export_onnx(m, images(2), p / "m.bin"), ValueError, "must end in .onnx"),
        (lambda m, p: hb.convert.export_onnx(m, images(2), p / "no" / "m.onnx"), FileNotFoundError, "no folder"),
        (lambda m, p: hb.convert.save(m, p / "m.pt"), ValueError, "must end in .safetensors"),
        (lambda m, p: hb.convert.save(m, p / "no" / "m.safetensors"), FileNotFoundError, "no folder"),
        (lambda m, p: hb.convert.load(m, p / "m.safetensors"), FileNotFoundError, "no file"),
    ],
)
def test_wrong_exports_and_files_are_refused(call, error, message, tmp_path):
    with pytest.raises(error, match=message):
        call(small_net(), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("frozen", [False, True])
def test_safetensors_give_back_the_same_function_and_the_metadata(frozen, tmp_path):
    pytest.importorskip("safetensors")
    model = hb.freeze(converted_net()) if frozen else converted_net()
    path = hb.convert.save(model, tmp_path / "model.safetensors", metadata={"name": "small", "steps": 3})
    described = json.loads((tmp_path / "model.json").read_text())
    assert described["name"] == "small"
    assert len(described["sha256"]) == 64
    other = hb.freeze(converted_net()) if frozen else converted_net()
    for tensor in other.state_dict().values():
        tensor.zero_()
    metadata = hb.convert.load(other, path)
    assert metadata["steps"] == 3
    x = images()
    assert torch.equal(other(x), model(x))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.json", "model.safetensors"]


def test_shared_weights_can_be_stored(tmp_path):
    pytest.importorskip("safetensors")
    conv = nn.Conv2d(3, 3, 3)
    model = nn.ModuleDict({"a": conv, "b": conv})
    path = hb.convert.save(model, tmp_path / "m.safetensors")
    tensors, _ = hb.convert.read(path)
    assert torch.equal(tensors["a.weight"], tensors["b.weight"])


def test_a_plain_networks_state_loads_into_the_converted_one_and_radii_keep_their_values():
    plain = small_net()
    options = {"magnitude": "tanh", "projection": "l2_ball", "pool": "huber(learn_c=True)"}
    converted, _ = hb.convert_model(small_net(), **options)
    with torch.no_grad():
        converted[0].magnitude.ratio.fill_(1.5)
    hb.convert.load_state(converted, plain.state_dict())
    assert torch.equal(converted[0].weight, plain[0].weight)
    assert torch.equal(converted[8].weight, plain[8].weight)
    assert bool((converted[0].magnitude.ratio == 1.5).all())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3)), "are missing .* have another shape"),
        (lambda: small_net(classes=7), r"8.weight is \(7, 12\), not \(5, 12\)"),
        (lambda: nn.Sequential(*small_net(), nn.Linear(5, 5)), r"2 are unknown \(9.bias, 9.weight\)"),
    ],
)
def test_the_state_of_another_architecture_is_refused_and_the_model_stays(make, message, tmp_path):
    pytest.importorskip("safetensors")
    path = hb.convert.save(make(), tmp_path / "other.safetensors")
    model = small_net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"the state dict is not of this Sequential: .*{message}"):
        hb.convert.load(model, path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_damaged_file_is_refused(tmp_path):
    pytest.importorskip("safetensors")
    path = hb.convert.save(small_net(), tmp_path / "m.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="the SHA-256 differs"):
        hb.convert.read(path)
    (tmp_path / "m.json").unlink()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        hb.convert.read(path)
