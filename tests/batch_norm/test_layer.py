"""RobustBatchNorm1d and 2d: nn.BatchNorm as a limit, state, dtypes, compilation, several processes, bad input."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hyperball
from hyperball import radial
from hyperball.functional.batch_norm import robust_batch_norm
from hyperball.nn.batch_norm import RobustBatchNorm1d, RobustBatchNorm2d

LAYERS = (
    (RobustBatchNorm1d, nn.BatchNorm1d, (9, 4)),
    (RobustBatchNorm1d, nn.BatchNorm1d, (5, 4, 7)),
    (RobustBatchNorm2d, nn.BatchNorm2d, (5, 4, 6, 3)),
)
PENALTIES = (
    "quadratic",
    "huber",
    "pseudo_huber",
    "barron(shape=1.6)",
    "welsch",
    "truncated_quadratic",
    "barron(shape=0)",
)


def with_radius(penalty: str, c: object) -> radial.Value:
    return radial.parse(penalty, "penalty").with_parameters(rho=c)


def with_outliers(count: int, share: float, channels: int = 40, at: float = 30.0) -> Tensor:
    x = torch.randn(count, channels)
    x[torch.randperm(count)[: int(share * count)]] = at + 3 * torch.randn(int(share * count), channels)
    return x


@pytest.mark.parametrize("layer, plain, shape", LAYERS)
@pytest.mark.parametrize(
    "penalty",
    [
        "quadratic",
        "huber(c=1e6)",
        "pseudo_huber(c=1e5)",
        "welsch(c=1e5)",
        "truncated_quadratic(c=1e4)",
        "barron(c=1e5)",
    ],
)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_infinite_radius_is_batch_norm(
    layer: type, plain: type, shape: tuple[int, ...], penalty: str, momentum: float | None
) -> None:
    robust, reference = layer(4, penalty=penalty, momentum=momentum), plain(4, momentum=momentum)
    with torch.no_grad():
        reference.weight.uniform_(0.5, 2.0)
        reference.bias.normal_()
    robust.load_state_dict(reference.state_dict())
    upstream = torch.randn(shape)
    for _ in range(3):
        results = []
        x = 3 * torch.randn(shape) + torch.arange(4.0).reshape(-1, *(1,) * (len(shape) - 2))
        for module in (robust, reference):
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            results.append([y, *torch.autograd.grad((y * upstream).sum(), [leaf, module.weight, module.bias])])
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted, rtol=2e-6, atol=4e-6)
    for key, wanted in reference.state_dict().items():
        torch.testing.assert_close(robust.state_dict()[key], wanted, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(robust.eval()(x), reference.eval()(x), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_float32_inside(dtype: torch.dtype) -> None:
    x = with_outliers(200, 0.1, channels=5, at=3000.0).to(dtype)
    layer = RobustBatchNorm1d(5)
    leaf, wide = x.clone().requires_grad_(), x.float().requires_grad_()
    y, wanted = layer(leaf), layer(wide)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), wanted, rtol=1e-2, atol=1e-2)
    upstream = torch.randn(200, 5)
    (g,) = torch.autograd.grad((y * upstream).sum(), leaf)
    (wanted_g,) = torch.autograd.grad((wanted * upstream.to(dtype).float()).sum(), wide)
    assert g.dtype == dtype
    torch.testing.assert_close(g.float(), wanted_g, rtol=2e-2, atol=2e-2)
    assert layer.running_mean.dtype == torch.float32
    assert RobustBatchNorm1d(5, penalty="huber(learn_c=True)").to(dtype)(x).dtype == dtype


def test_autocast_gives_batch_norms_dtype() -> None:
    robust, plain = RobustBatchNorm2d(3), nn.BatchNorm2d(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(4, 3, 5, 5, dtype=dtype)
            assert robust(x).dtype == plain(x).dtype


def test_channels_last_is_kept_in_both_directions() -> None:
    x = torch.randn(4, 6, 5, 7).to(memory_format=torch.channels_last).requires_grad_()
    layer = RobustBatchNorm2d(6)
    y = layer(x)
    (g,) = torch.autograd.grad(y.square().sum(), x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert g.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, layer(x.detach().contiguous()), rtol=1e-5, atol=1e-5)


def test_backward_keeps_the_input_and_numbers_per_channel() -> None:
    x = torch.randn(32, 4, 8, 8, requires_grad=True)
    kept: list[Tensor] = []
    layer = RobustBatchNorm2d(4, penalty="huber(learn_c=True)")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    others = [t for t in kept if t.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()]
    assert sum(t.numel() for t in others) <= 30 * 4


def test_state_dict_has_batch_norms_keys_and_the_radius() -> None:
    plain = nn.BatchNorm2d(5)
    assert list(RobustBatchNorm2d(5).state_dict()) == list(plain.state_dict())
    learned = RobustBatchNorm2d(5, penalty="huber(c=2, learn_c=True)")
    assert set(learned.state_dict()) == {*plain.state_dict(), "log_c"}
    plain(torch.randn(3, 5, 4, 4))
    assert learned.load_state_dict(plain.state_dict(), strict=True).missing_keys == []
    torch.testing.assert_close(learned.radius, torch.full((5,), 2.0))
    torch.testing.assert_close(learned.running_var, plain.running_var)
    again = RobustBatchNorm2d(5, penalty="huber(learn_c=True)")
    again.load_state_dict(learned.state_dict())
    torch.testing.assert_close(again.radius, learned.radius)
    with pytest.raises(RuntimeError, match="Missing key"):
        learned.load_state_dict({"log_c": torch.zeros(5)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        RobustBatchNorm2d(5).load_state_dict(learned.state_dict())


@pytest.mark.parametrize(
    "text, shape", [("huber(c=2, learn_c=True)", (6,)), ('huber(c=2, learn_c=True, per="layer")', ())]
)
def test_radius_learns_per_channel_or_per_layer(text: str, shape: tuple[int, ...]) -> None:
    layer = RobustBatchNorm1d(6, penalty=text)
    assert layer.log_c.shape == shape
    x = with_outliers(200, 0.1, channels=6)
    optimizer = torch.optim.SGD([layer.log_c], lr=0.05)
    losses = []
    for _ in range(20):
        loss = layer(x)[x < 10].square().mean().sub(1.0).square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    layer.reset_parameters()
    torch.testing.assert_close(layer.radius, torch.full(shape, 2.0))


def test_radius_may_be_a_fixed_tensor() -> None:
    c = torch.tensor([1.0, 2.0, 1e6])
    layer = RobustBatchNorm1d(3, penalty=radial.huber(c=c))
    assert layer.state_dict()["fixed_c"].tolist() == c.tolist()
    x = with_outliers(80, 0.1, channels=3)
    y = layer(x)
    for k in range(3):
        alone = robust_batch_norm(x[:, k : k + 1], None, None, training=True, penalty=radial.huber(c=c[k].item()))
        torch.testing.assert_close(y[:, k : k + 1], alone, rtol=1e-5, atol=1e-5)


def test_layer_is_an_ordinary_module() -> None:
    layer = RobustBatchNorm2d(3, eps=1e-3, penalty="pseudo_huber(c=1.5, learn_c=True)", dtype=torch.float64)
    assert "pseudo_huber(c=1.5" in repr(layer)
    assert "eps=0.001" in repr(layer)
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(other.eval()(x), layer.eval()(x), rtol=0, atol=0)
    assert RobustBatchNorm2d(3, device="meta", penalty="huber(learn_c=True)").log_c.is_meta
    bare = RobustBatchNorm2d(3, affine=False, track_running_stats=False)
    assert list(bare.state_dict()) == []
    torch.testing.assert_close(bare.eval()(x), bare.train()(x))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("penalty", ["pseudo_huber(learn_c=True)", pytest.param("welsch(c=3)", marks=pytest.mark.slow)])
def test_training_step_compiles_without_graph_breaks(penalty: str, backend: str) -> None:
    torch.compiler.reset()
    layer = RobustBatchNorm2d(4, penalty=penalty)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=True, backend=backend)
    x, upstream = torch.randn(6, 4, 9, 9), torch.randn(6, 4, 9, 9)
    results = []
    for module, owner in ((layer, layer), (compiled, twin)):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        results.append([y, *torch.autograd.grad((y * upstream).sum(), [leaf, *owner.parameters()]), owner.running_var])
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)


def test_exported_evaluation_equals_eager() -> None:
    layer = RobustBatchNorm2d(3, penalty="huber(learn_c=True)")
    x = torch.randn(4, 3, 5, 5)
    layer(x)
    layer.eval()
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), layer(x))


ONE_RANK = """
import os, sys, torch, torch.distributed as dist
from hyperball.nn.batch_norm import RobustBatchNorm1d
from hyperball.training.process.distributed import synchronize
rank, folder, penalty = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
given = torch.load(f"{folder}/given.pt")
layer = RobustBatchNorm1d(3, penalty=penalty, dtype=torch.float64, sync=False)
synchronize(layer, torch.device("cpu"))
part = slice(0, 30) if rank == 0 else slice(30, None)
x = given["x"][part].requires_grad_()
y = layer(x)
(y * given["upstream"][part]).sum().backward()
grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
torch.save({"y": y.detach(), "x": x.grad, "grads": grads, "state": layer.state_dict()}, f"{folder}/{rank}.pt")
dist.barrier()
os._exit(0)  # gloo's threads may still drop a tensor, which aborts an interpreter that is shutting down
"""


def run_ranks(code: str, world: int, *arguments: str) -> list[str]:
    """What each of so many processes prints, whose first argument is its rank."""
    environment = {**os.environ, "PYTHONPATH": str(Path(hyperball.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), *arguments],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    texts = []
    for process in ranks:
        text, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        texts.append(text)
    return texts


@pytest.mark.parametrize(
    "penalty", ["huber(c=1.3, learn_c=True)", pytest.param("welsch(c=3, learn_c=True)", marks=pytest.mark.slow)]
)
def test_two_processes_agree_with_one_over_the_joint_batch(penalty: str, tmp_path: Path) -> None:
    x = with_outliers(75, 0.15, channels=3).double()
    upstream = torch.randn(75, 3, dtype=torch.float64)
    torch.save({"x": x, "upstream": upstream}, tmp_path / "given.pt")
    run_ranks(ONE_RANK, 2, str(tmp_path), penalty)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    layer = RobustBatchNorm1d(3, penalty=penalty, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    (y * upstream).sum().backward()
    torch.testing.assert_close(torch.cat([first["y"], second["y"]]), y.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.cat([first["x"], second["x"]]), leaf.grad, rtol=1e-7, atol=1e-9)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(first["grads"][name] + second["grads"][name], parameter.grad, rtol=1e-7, atol=1e-9)
    for name, wanted in layer.state_dict().items():
        torch.testing.assert_close(first["state"][name], wanted, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(second["state"][name], wanted, rtol=1e-9, atol=1e-9)


TRAINING = """
import os, sys, torch, torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from hyperball.nn.batch_norm import RobustBatchNorm2d
rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
if world > 1:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-training", rank=rank, world_size=world)
torch.manual_seed(0)
layers = [nn.Conv2d(1, 8, 3, padding=1), RobustBatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 10)]
model = nn.Sequential(*layers).double()
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
losses = []
for step in range(20):
    x, labels = torch.randn(32, 1, 8, 8).double(), torch.randint(10, (32,))
    part = slice(rank * 32 // world, (rank + 1) * 32 // world)
    loss = F.cross_entropy(model(x[part]), labels[part])
    optimizer.zero_grad()
    loss.backward()
    shared = [loss.detach(), *(p.grad for p in model.parameters())]
    for tensor in shared if world > 1 else []:
        dist.all_reduce(tensor.div_(world))
    optimizer.step()
    losses.append(shared[0].item())
if rank == 0:
    print(*losses, flush=True)
if world > 1:
    dist.barrier()
    os._exit(0)  # as above
"""


def training_losses(world: int, folder: Path) -> list[float]:
    return [float(word) for word in run_ranks(TRAINING, world, str(world), str(folder))[0].split()]


def test_training_in_two_processes_has_the_losses_of_one(tmp_path: Path) -> None:
    one, two = training_losses(1, tmp_path), training_losses(2, tmp_path)
    assert len(one) == 20
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-10, atol=0.0)


@pytest.mark.parametrize(
    "layer, shape, message",
    [
        (RobustBatchNorm1d, (1, 4), "Expected more than 1 value per channel when training"),
        (RobustBatchNorm2d, (1, 4, 1, 1), "Expected more than 1 value per channel when training"),
        (RobustBatchNorm1d, (0, 4), "Expected more than 1 value per channel when training"),
        (RobustBatchNorm1d, (2, 4, 3, 3), r"expected 2D or 3D input \(got 4D input\)"),
        (RobustBatchNorm2d, (2, 4, 3), r"expected 4D input \(got 3D input\)"),
        (RobustBatchNorm1d, (8, 5), "`input` must have 4 channels"),
    ],
)
def test_wrong_inputs_are_refused(layer: type, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(4)(torch.randn(shape))


@pytest.mark.parametrize(
    "penalty, message",
    [
        ("absolute", "must be one of quadratic"),
        ("huber(c=-1)", "`c` must be > 0"),
        ("barron(shape=3)", "`shape` of barron in a robust batch norm must be <= 2"),
        ("huber(relative=True)", "`relative` has no effect"),
        ("barron(learn_shape=True)", "`learn_shape` is not offered"),
        ("truncated_quadratic(learn_c=True)", "`learn_c` is not offered with truncated_quadratic"),
        (radial.huber(c=torch.ones(3)), "`c` must be a number or 4 of them"),
        (radial.huber(c=-torch.ones(4)), "must be > 0 everywhere"),
        (radial.huber(c=torch.ones(4), learn_c=True, per="layer"), "must be one number where it is learned per layer"),
        ("tanh", "'tanh' is not a penalty"),
    ],
)
def test_wrong_penalties_are_refused_by_name(penalty: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RobustBatchNorm1d(4, penalty=penalty)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "penalty, shape", [*((penalty, (8, 16, 12, 12)) for penalty in PENALTIES), ("huber", (64, 32, 16, 16))]
)
def test_cuda_equals_cpu(penalty: str, shape: tuple[int, ...]) -> None:
    """Gradients in float64: they jump where a sample crosses huber's c, and in float32 some lie that near."""
    x, upstream = torch.randn(shape), torch.randn(shape)
    for dtype, bound in ((torch.float32, 2e-3), (torch.float64, 1e-9)):
        results = []
        for device in ("cpu", "cuda"):
            leaf = x.to(device, dtype).requires_grad_()
            c = torch.full((shape[1],), 1.7, device=device, dtype=dtype, requires_grad=True)
            y = robust_batch_norm(leaf, None, None, training=True, penalty=with_radius(penalty, c))
            gradients = torch.autograd.grad((y * upstream.to(y)).sum(), (leaf, c), allow_unused=True)
            results.append([item.cpu() for item in (y, *gradients) if item is not None])
        for cpu, cuda in list(zip(*results, strict=True))[: None if dtype == torch.float64 else 1]:
            torch.testing.assert_close(cuda, cpu, rtol=bound, atol=bound)


@pytest.mark.parametrize("learned", [True, False])
def test_a_layer_made_on_the_meta_device_is_whole_after_a_reset(learned):
    value = radial.huber(c=torch.tensor([1.0, 2.0]), learn_c=learned)
    with torch.device("meta"):
        layer = RobustBatchNorm2d(2, penalty=value)
    layer = layer.to_empty(device="cpu")
    for tensor in layer.state_dict().values():
        tensor.fill_(7)
    layer.reset_parameters()
    torch.testing.assert_close(layer.radius, torch.tensor([1.0, 2.0]))
    assert layer(torch.randn(4, 2, 3, 3)).dtype == torch.float32


@pytest.mark.parametrize("eps", [0.0, -1.0, float("inf"), float("nan")])
def test_an_eps_that_is_not_positive_is_refused_at_construction(eps: float) -> None:
    with pytest.raises(ValueError, match="`eps` must be > 0"):
        RobustBatchNorm1d(4, eps=eps)
