"""What a frozen model can be put through: modes, dtypes, layouts, copies, compilers and exporters."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from frozen_models import Tapped, Variety, batch, folded, scrambled, small
from torch import nn

from hyperball import nn as C
from hyperball.freeze import freeze


def test_other_modules_keep_their_names_types_and_hooks():
    model = scrambled(small())
    calls = []
    model[2].register_forward_hook(lambda *_: calls.append("relu"))
    frozen = freeze(model)
    kept = {"", "2", "3", "4"}
    types = {name: getattr(part, "plain_class", type(part)) for name, part in frozen.named_modules()}
    assert {name: types[name] for name in kept} == {
        name: type(part) for name, part in model.named_modules() if name in kept
    }
    assert set(types) == {"", "0", "1", "2", "3", "4", "5"}
    frozen(batch(2, 3, 6, 6))
    assert calls == ["relu"]


def test_a_frozen_model_has_nothing_to_train_and_ignores_train_mode():
    model = nn.Sequential(Tapped(), nn.Dropout(0.5), nn.BatchNorm2d(4))
    frozen, x = freeze(scrambled(model)), batch(2, 3, 6, 6)
    before, state = frozen(x), copy.deepcopy(frozen.state_dict())
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    assert not any(buffer.requires_grad for buffer in frozen.buffers())
    assert frozen.train() is frozen
    assert torch.equal(frozen(x), before)
    assert torch.equal(nn.Sequential(frozen).train()(x), before)
    torch.testing.assert_close(frozen.state_dict(), state, rtol=0, atol=0)


def test_gradients_still_reach_the_input(tolerance):
    model, x = scrambled(small(angular="square_cosine")), batch(2, 3, 6, 6).requires_grad_()
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    (got,) = torch.autograd.grad(freeze(model)(x).square().sum(), x)
    torch.testing.assert_close(got, expected, **tolerance(torch.float64))


ONE_TO_ONE = [
    (C.DecoupledConv2d, nn.BatchNorm2d, (1, 1), (2, 1, 1, 1)),
    (C.DecoupledConvTranspose1d, nn.BatchNorm1d, (1,), (2, 1, 1)),
    (C.DecoupledLinear, nn.BatchNorm1d, (), (2, 1)),
]


@pytest.mark.parametrize("angular", ["cosine", "square_cosine"])
@pytest.mark.parametrize("layer, norm, size, shape", ONE_TO_ONE)
def test_a_bias_that_takes_a_large_mean_away_is_not_rounded_to_half_precision(layer, norm, size, shape, angular):
    model = nn.Sequential(layer(1, 1, *([size] if size else []), magnitude="linear", angular=angular), norm(1, eps=0.0))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].running_mean.fill_(256.0)
        model[1].bias.fill_(-0.75)
    model, x = model.eval(), torch.tensor([256.0, 258.0]).reshape(shape).bfloat16()
    expected = torch.tensor([-0.75, 1.25]).reshape(shape).bfloat16()
    for frozen in (freeze(model).bfloat16(), freeze(copy.deepcopy(model).bfloat16())):
        torch.testing.assert_close(frozen(x), expected)


def test_a_plain_filter_in_half_precision_is_rounded_once_with_the_scale_that_it_takes_in():
    layer, norm = C.DecoupledLinear(8, 16, magnitude="linear"), nn.BatchNorm1d(16, eps=0.0)
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    model = nn.Sequential(layer, norm).eval().bfloat16()
    unit = nn.functional.normalize(layer.weight.detach().double())
    expected = (unit * norm.weight.detach().double()[:, None]).bfloat16()
    torch.testing.assert_close(freeze(model)[0].filter, expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("operator", [{}, {"angular": "square_cosine", "weighting": "joint"}], ids=str)
def test_half_precision_stays_as_close_as_the_unfrozen_model(dtype, operator, tolerance):
    model, x = scrambled(small(**operator)[:2], torch.float32), batch(2, 3, 6, 6, dtype=torch.float32)
    expected = model(x)
    narrow = copy.deepcopy(model).to(dtype)
    for frozen in (freeze(narrow), freeze(model).to(dtype)):
        out = frozen(x.to(dtype))
        assert out.dtype == dtype
        assert frozen[0].magnitude_rho.dtype == torch.float32
        torch.testing.assert_close(out.float(), expected, **tolerance(dtype, 8))


def test_a_tiny_scale_is_not_rounded_away_in_float16():
    model = nn.Sequential(C.DecoupledConv2d(3, 8, 3, magnitude="seg"), nn.BatchNorm2d(8, affine=False)).eval()
    model[1].running_var.fill_(1e10)
    x = 1e3 * torch.randn(2, 3, 6, 6)
    expected = model(x)
    model[0].half()
    got = freeze(model)(x.half()).float()
    torch.testing.assert_close(got, expected, rtol=5e-3, atol=5e-3 * expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_gives_the_dtype_and_the_values_of_the_unfrozen_model(dtype, tolerance):
    model, x = scrambled(small(magnitude="ball"), torch.float32), batch(2, 3, 6, 6, dtype=torch.float32)
    frozen = freeze(model)
    with torch.autocast("cpu", dtype):
        out, expected = frozen(x), model(x)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, **tolerance(dtype, 8))


def test_large_inputs_stay_finite_in_float16():
    model = scrambled(small()[:2], torch.float32)
    nn.init.constant_(model[1].weight, 300.0)
    frozen = freeze(model)
    x = torch.full((1, 3, 6, 6), 3e4)
    with torch.autocast("cpu", torch.float16):
        out = frozen(x)
    torch.testing.assert_close(out.float(), model(x), rtol=2e-2, atol=1.0)


@pytest.mark.parametrize("layer", [C.DecoupledConv2d(4, 8, 3, padding=1), C.DecoupledConvTranspose2d(4, 8, 3)])
def test_channels_last_is_kept(layer):
    model = scrambled(nn.Sequential(copy.deepcopy(layer), nn.BatchNorm2d(8)))
    model = model.to(memory_format=torch.channels_last)
    x = batch(2, 4, 6, 6).to(memory_format=torch.channels_last)
    frozen = freeze(model)
    assert frozen[0].filter.stride() == model[0].weight.stride()
    assert frozen(x).stride() == model(x).stride()


def test_copies_and_state_dicts_carry_the_whole_function():
    model, x = scrambled(small()), batch(2, 3, 6, 6)
    frozen = freeze(model)
    for twin in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen)), freeze(frozen)):
        assert twin is not frozen
        assert twin.train() is twin
        assert twin.freeze_report == frozen.freeze_report
        assert torch.equal(twin(x), frozen(x))
    other = freeze(scrambled(small()))
    assert not torch.equal(other(x), frozen(x))
    file = io.BytesIO()
    torch.save(frozen.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file), strict=True)
    assert torch.equal(other(x), frozen(x))


@pytest.mark.parametrize("weighting", ["linear", "joint", "split"])
def test_no_two_buffers_share_memory(weighting):
    state = freeze(small(weighting=weighting, angular="square_cosine")).state_dict()
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)


def test_the_state_of_an_unfrozen_model_is_refused():
    model = small(magnitude="sphere")[:1]
    with pytest.raises(RuntimeError, match="filter"):
        freeze(model).load_state_dict(model.state_dict())


def test_a_frozen_part_of_a_larger_model_is_left_as_it_is(tolerance):
    part = freeze(scrambled(small()[:3]))
    model = nn.Sequential(part, scrambled(nn.Sequential(C.DecoupledConv2d(8, 4, 3), nn.BatchNorm2d(4)))).eval()
    x = batch(2, 3, 6, 6)
    frozen = freeze(model)
    assert folded(frozen) == {"1.0": "1.1"}
    torch.testing.assert_close(frozen(x), model(x), **tolerance(torch.float64))


@pytest.fixture(scope="module", name="variety")
def variety_fixture():
    torch.manual_seed(0)
    model, x = scrambled(Variety(), torch.float32), batch(4, 3, 8, 8, dtype=torch.float32)
    frozen = freeze(model)
    assert sum(layer.folded is not None for layer in frozen.freeze_report.layers) == 3
    return frozen, x, model(x).detach()


def test_frozen_models_compile_as_one_graph(variety):
    frozen, x, expected = variety
    torch.testing.assert_close(torch.compile(frozen, fullgraph=True)(x), expected, rtol=1e-5, atol=1e-5)


def test_frozen_models_can_be_exported(variety):
    frozen, x, expected = variety
    size = torch.export.Dim("size", min=2)
    program = torch.export.export(frozen, (x,), dynamic_shapes=({0: size},))
    torch.testing.assert_close(program.module()(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(program.module()(x[:2]), expected[:2], rtol=1e-5, atol=1e-5)


def test_frozen_models_run_in_onnx(variety, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    frozen, x, expected = variety
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(frozen, (x,), tmp_path / "model.onnx", dynamo=True, verbose=False)
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), expected, rtol=1e-4, atol=1e-4)


def test_a_compiled_model_is_frozen_as_what_it_was_made_from():
    model, x = scrambled(small()), batch(2, 3, 6, 6)
    frozen = freeze(torch.compile(model, backend="eager"))
    assert folded(frozen) == {"0": "1", "5": None}
    torch.testing.assert_close(frozen(x), model(x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_cuda_gives_what_the_cpu_gives(dtype, tolerance):
    model, x = scrambled(Variety(), torch.float32), batch(4, 3, 8, 8, dtype=torch.float32)
    frozen = freeze(model.to("cuda", dtype))
    assert {buffer.device.type for buffer in frozen.buffers()} == {"cuda"}
    expected = freeze(copy.deepcopy(model).to("cpu", torch.float32))(x)
    torch.testing.assert_close(frozen(x.to("cuda", dtype)).float().cpu(), expected, **tolerance(dtype, 10))
