"""Bounds of forwards made of random calls, and of single calls that invite a wrong bound, are never exceeded."""

import copy
import math
import random
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

import hyperball as hb


def joined(model):
    """The model with everything it returns in one row, for an input it may write to."""

    def f(x):
        out = model(x.clone())
        return torch.cat([one.flatten() for one in (out if isinstance(out, tuple | list) else (out,))])

    return f


def steepest(f, x, rounds=8):
    """A lower bound of the norm of the derivative of f at x, by power iteration."""
    v, best = torch.randn_like(x), 0.0
    try:
        _, pull = torch.func.vjp(f, x)
        for _ in range(rounds):
            v = v / v.norm().clamp(min=1e-30)
            up = torch.func.jvp(f, (x,), (v,))[1].detach()
            best = max(best, float(up.norm()))
            v = pull(up)[0].detach()
    except RuntimeError:  # autograd needs a value that was overwritten: short random steps do without it
        steps = (1e-4 * one / one.norm() for one in torch.randn(20 * rounds, *x.shape, dtype=x.dtype))
        return max(float((f(x + step) - f(x)).detach().norm()) for step in steps) / 1e-4 * (1 - 1e-7)
    return best


def check(model, shape, rounds=8, scales=(1e-3, 0.3, 3.0)):
    """Assert that random points keep the bounds; the bounds."""
    model = model.double().eval()
    bound = hb.bounds(model)
    limited = hb.bounds(model, input_bound=0.7)
    assert math.isfinite(bound.lipschitz) or bound.unbounded
    f = joined(model)
    if math.isfinite(bound.lipschitz):
        for scale in scales:
            x = scale * torch.randn(1, *shape, dtype=torch.float64)
            assert steepest(f, x, rounds) <= bound.lipschitz * (1 + 1e-6)
            other = x + scale * torch.randn_like(x)
            assert float((f(x) - f(other)).detach().norm() / (x - other).norm()) <= bound.lipschitz * (1 + 1e-6)
    for x in (0.7 * torch.randn(4, 1, *shape).sign(), 0.7 * torch.rand(4, 1, *shape)):
        for one in x.double():
            assert float(f(one).detach().abs().max()) <= limited.output * (1 + 1e-6)
    return bound


def some_module(draw, x):
    """A random module for a value of this shape; it may refuse the value."""
    channels = x.shape[1] if x.dim() > 1 else 1
    k, s, d, p = draw.choice([1, 2, 3]), draw.choice([1, 1, 2]), draw.choice([1, 1, 2]), draw.choice([0, 1, 1, 2])
    mode = draw.choice(["zeros", "zeros", "circular", "replicate", "reflect"])
    groups = draw.choice([1, 1, channels])
    out = groups * draw.choice([1, 2])
    geometry = {"stride": s, "dilation": d, "padding": p, "groups": groups}
    norm = nn.BatchNorm2d(channels)
    norm.running_var.uniform_(0.3, 2.0)
    norm.running_mean.normal_()
    make = [
        lambda: nn.Conv2d(channels, out, k, padding_mode=mode, **geometry),
        lambda: nn.Conv2d(channels, channels, 3, padding=1),
        lambda: nn.Conv2d(channels, draw.choice([1, channels]), 1),
        lambda: hb.nn.DecoupledConv2d(channels, out, k, padding_mode=mode, magnitude="tanh", **geometry),
        lambda: hb.nn.DecoupledConv2d(channels, channels, 3, padding=1, magnitude="linear", weighting="linear"),
        lambda: nn.ConvTranspose2d(channels, 2, k, stride=s),
        lambda: nn.Linear(x.shape[-1], draw.choice([1, x.shape[-1]])),
        lambda: norm,
        lambda: nn.ReLU(inplace=draw.random() < 0.5),
        lambda: nn.SiLU(inplace=draw.random() < 0.7),
        lambda: nn.LeakyReLU(1.5, inplace=draw.random() < 0.7),
        lambda: nn.ELU(3.0, inplace=draw.random() < 0.7),
        lambda: nn.Hardtanh(draw.choice([-1.0, 0.5]), 2.0, inplace=draw.random() < 0.5),
        lambda: nn.GELU(),
        lambda: nn.Softplus(beta=draw.choice([0.3, 2.0])),
        lambda: nn.Sigmoid(),
        lambda: nn.PReLU(channels, init=1.5),
        lambda: nn.MaxPool2d(k, draw.choice([1, 2]), 0, dilation=d, ceil_mode=draw.random() < 0.3),
        lambda: nn.AvgPool2d(k, draw.choice([1, 2]), ceil_mode=draw.random() < 0.3),
        lambda: nn.AdaptiveAvgPool2d(draw.choice([1, 2])),
        lambda: nn.Flatten(),
        lambda: nn.Identity(),
        lambda: hb.nn.Projection(draw.choice([1, 2, math.inf]), radius=1.0),
    ]
    return draw.choice(make)()


def some_constant(draw, x):
    """A parameter that broadcasts with the value, perhaps beyond it."""
    shape = [draw.choice([1, size]) for size in x.shape]
    return torch.randn(draw.choice([[], shape, shape[1:], [3, *shape]]))


def halves(a):
    one, two = a.chunk(2, 1)
    return one + two


def multiplied_in_place(a):
    a *= 3.0
    return a


def added_in_place(a, b):
    a += b
    return a


def doubled(a):
    b = a
    b += 0.5 * a
    return a + b


ONE = [
    torch.tanh, torch.relu, F.relu6, lambda a: 2 * a, lambda a: a / 3, lambda a: 1 - a, lambda a: a + a,
    lambda a: a.amax(1, keepdim=True), lambda a: a.mean((2, 3), keepdim=True), lambda a: a.amax((2, 3)),
    lambda a: a.mean(-1), lambda a: a[:, :1], lambda a: a[:, None], lambda a: a[..., ::2], lambda a: a.transpose(1, 2),
    lambda a: a.flatten(1), lambda a: a.view(a.size(0), -1), lambda a: a.unsqueeze(2), lambda a: a.squeeze(),
    lambda a: torch.cat(a.chunk(2, 1), 1), halves, lambda a: torch.cat([a, a, -1 * a], 1),
    lambda a: torch.cat(tensors=[a, a], dim=1), lambda a: F.max_pool2d(a, 2, 1), lambda a: F.max_pool2d(a, 2, 2, 0, 2),
    lambda a: F.hardtanh(a, 0.5, 2.0), lambda a: F.dropout(a, 0.5, False), lambda a: F.adaptive_avg_pool2d(a, 2),
    lambda a: a * a, lambda a: a.exp(), multiplied_in_place, doubled, lambda a: a.relu_(), lambda a: a.mul_(2.0),
]  # fmt: skip
TWO = [
    lambda a, b: a + b, lambda a, b: a - b, lambda a, b: torch.cat([a, b], 1), lambda a, b: torch.cat([a, b], -1),
    added_in_place, lambda a, b: torch.add(a, b, alpha=3), lambda a, b: torch.add(a, b), lambda a, b: a * b,
]  # fmt: skip


class Program(nn.Module):
    """Steps, each of which makes a value of earlier ones by a module or a function, perhaps with a parameter."""

    def __init__(self, draw, x, length):
        super().__init__()
        self.parts, self.steps, self.returned = nn.ModuleList(), [], 1
        self.constants = nn.ParameterList()
        values = [x]
        while len(self.steps) < length:
            step = self.some_step(draw, values)
            try:
                made = self.carry_out(step, [one.clone() for one in values])
            except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
                continue
            if made.numel() == 0 or made.numel() > 400:
                continue
            self.steps.append(step)
            values.append(made.detach())
        self.returned = draw.choice([1, 1, 2])

    def some_step(self, draw, values):
        near = draw.choice([len(values) - 1] * 3 + list(range(len(values))))
        kind = draw.choice(["module"] * 4 + ["one"] * 3 + ["two"] * 3 + ["constant"])
        if kind == "module":
            self.parts.append(some_module(draw, values[near]).double().eval())
            return "module", len(self.parts) - 1, near, None
        if kind == "constant":
            self.constants.append(nn.Parameter(some_constant(draw, values[near]).double()))
            return "constant", draw.choice([TWO[0], TWO[-1], TWO[2]]), near, len(self.constants) - 1
        table = ONE if kind == "one" else TWO
        return kind, draw.choice(table), near, draw.randrange(len(values))

    def carry_out(self, step, values):
        kind, what, near, other = step
        if kind == "module":
            return self.parts[what](values[near])
        if kind == "one":
            return what(values[near])
        return what(values[near], values[other] if kind == "two" else self.constants[other])

    def forward(self, x):
        values = [x]
        for step in self.steps:
            values.append(self.carry_out(step, values))
        return values[-1] if self.returned == 1 else (values[-1], values[len(values) // 2])


@pytest.mark.parametrize("seed", range(12))
def test_no_random_program_exceeds_its_bounds(seed):
    torch.manual_seed(seed)
    draw, bounded = random.Random(seed), 0
    for _ in range(25):
        shape = draw.choice([(4, 5, 5), (2, 3, 3), (3, 1, 4)])
        model = Program(draw, torch.randn(1, *shape, dtype=torch.float64), draw.choice([1, 2, 3, 4, 6]))
        bound = check(model, shape, rounds=6, scales=(1e-2, 1.0))
        bounded += math.isfinite(bound.lipschitz)
    assert bounded >= 5  # it is no test if hardly any has a bound


class Call(nn.Module):
    """A forward that is one function, with parameters and modules by name."""

    def __init__(self, function, **held):
        super().__init__()
        self.function = function
        for name, one in held.items():
            setattr(self, name, one)

    def forward(self, x):
        return self.function(self, x)


def parameter(*shape, value=1.0):
    return nn.Parameter(torch.full(shape, value))


def residual_in_place(m, x):
    y = x
    y += m.c(x)
    return x + y


def hidden_in_place(m, x):
    h = m.c(x)
    h.mul_(100.0)
    return h


def written_twice(m, x):
    h = m.c(x)
    y = m.act(h)
    h += h
    return y


BOUNDED = {
    "one channel on sixteen": (Call(lambda m, x: x + m.c(x), c=nn.Conv2d(16, 1, 1)), (16, 4, 4)),
    "a circle wound twice": (nn.Conv2d(4, 4, 1, padding=2, padding_mode="circular"), (4, 2, 2)),
    "a circle beyond same": (nn.Conv2d(4, 4, 3, padding=2, padding_mode="circular"), (4, 3, 3)),
    "a decoupled circle": (
        hb.nn.DecoupledConv2d(2, 4, 3, padding=3, padding_mode="circular", magnitude="linear", weighting="linear"),
        (2, 3, 3),
    ),
    "one entry replicated": (nn.Conv1d(4, 4, 1, padding=3, padding_mode="replicate"), (4, 1)),
    "dilated pooling": (Call(lambda m, x: F.max_pool2d(x, 2, 2, dilation=2)), (1, 9, 9)),
    "a large constant beside": (Call(lambda m, x: torch.cat([x, m.p], 1), p=parameter(1, 4, value=100.0)), (4,)),
    "a constant made in forward": (
        Call(lambda m, x: torch.cat([x, torch.full((1, 4), 100.0, dtype=x.dtype)], 1)),
        (4,),
    ),
    "hardtanh off zero": (nn.Sequential(nn.Hardtanh(5, 10)), (4,)),
    "hardtanh as a function": (Call(lambda m, x: F.hardtanh(x, 5.0, 10.0)), (4,)),
    "a flat softplus": (nn.Sequential(nn.Softplus(beta=0.1)), (4,)),
    "twice the same": (Call(lambda m, x: (x, x)), (4,)),
    "tensors by name": (Call(lambda m, x: torch.cat(tensors=[x, x], dim=1)), (4,)),
    "rows on a perceptron": (Call(lambda m, x: x + m.b(m.a(x).relu()), a=nn.Linear(4, 9), b=nn.Linear(9, 4)), (4,)),
    "scaled by a parameter": (Call(lambda m, x: m.c(x) * m.g, c=nn.Conv2d(3, 4, 1), g=parameter(4, 1, 1)), (3, 2, 2)),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_calls_that_invite_a_wrong_bound_have_one_that_holds(name):
    model, shape = BOUNDED[name]
    bound = check(copy.deepcopy(model), shape, rounds=60)
    assert bound.unbounded == ()
    if "pooling" in name:
        x = torch.zeros(1, *shape, dtype=torch.float64)
        x[..., 4, 4] = 10.0
        assert steepest(joined(model), x) == pytest.approx(2.0)


UNBOUNDED = {
    "a maximum on all positions": (Call(lambda m, x: x + x.amax((2, 3), keepdim=True)), "may repeat one operand"),
    "a row on sixteen": (Call(lambda m, x: x[:, None] + m.p, p=parameter(1, 16, 4)), "may repeat one operand"),
    "dropout that stays on": (Call(lambda m, x: F.dropout(x, 0.5)), "training=self.training"),
    "pieces as a tuple": (Call(lambda m, x: torch.cat(x.chunk(2, 1), 1)), "cat is given arguments"),
    "uneven pieces": (Call(lambda m, x: halves(x)), "may repeat one operand"),
    "a term times five": (Call(lambda m, x: torch.add(x, x, alpha=5)), "arguments of which no bound is known"),
    "a residual written in place": (Call(residual_in_place, c=nn.Linear(4, 4)), "was changed in place before"),
    "a method that writes": (Call(hidden_in_place, c=nn.Linear(4, 4)), "changed in place|mul_"),
    "a random factor": (Call(lambda m, x: x * torch.rand(())), "mul of activations has no known bound"),
    "another dtype's bits": (Call(lambda m, x: x.view(torch.float32)), "arguments of which no bound is known"),
    "an activation kept and overwritten": (
        Call(lambda m, x: (lambda h: m.act(h) + h)(m.c(x)), c=nn.Linear(4, 4), act=nn.SiLU(inplace=True)),
        "changed in place",
    ),
    "an activation overwritten twice": (
        Call(written_twice, c=nn.Linear(4, 4), act=nn.ELU(3.0, inplace=True)),
        "changed in place",
    ),
    "indices too": (nn.Sequential(nn.MaxPool2d(2, return_indices=True)), "gives indices"),
    "a softplus that jumps": (nn.Sequential(nn.Softplus(threshold=0.1)), "jumps at its threshold"),
    "weights to come": (nn.Sequential(nn.LazyLinear(3)), "no values yet"),
    "weights on the meta device": (nn.Sequential(nn.Linear(3, 3, device="meta")), "no values yet"),
    "a pruned layer": (nn.Sequential(prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)), "has hooks"),
    "a parametrized layer": (nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))), "forward of its own"),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_calls_without_a_bound_are_named(name):
    model, words = UNBOUNDED[name]
    bound = hb.bounds(model)
    assert math.isinf(bound.lipschitz)
    assert any(re.search(words, text) for text in bound.unbounded), bound.unbounded


class Doubled(hb.nn.Projection):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_subclass_of_our_layers_is_not_taken_for_them():
    bound = hb.bounds(nn.Sequential(Doubled(2, radius=1.0)))
    assert math.isinf(bound.lipschitz)
    assert bound.unbounded


@pytest.mark.parametrize("layer", [nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh")])
def test_rounded_constants_are_not_called_exact_and_are_no_less_than_the_slope(layer):
    bound = hb.bounds(layer)
    x = torch.linspace(-6, 6, 200_001, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    assert not bound.layers[0].exact
    assert float(x.grad.abs().max()) <= bound.lipschitz


def test_residual_networks_keep_their_bound_because_sizes_are_followed():
    model = hb.models.create("resnet18", 5, magnitude="tanh", width=4)
    assert hb.bounds(model).unbounded == ()
    timm = pytest.importorskip("timm")
    assert hb.bounds(timm.create_model("resnet10t", num_classes=3)).unbounded == ()


def test_bounding_leaves_no_trace_in_the_model():
    model = Call(lambda m, x: torch.cat([x, torch.ones(1, 4)], 1)).train()
    before = set(vars(model))
    hb.bounds(model)
    assert set(vars(model)) == before
    assert model.training
