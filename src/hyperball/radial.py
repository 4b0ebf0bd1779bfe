"""Radial functions: one table behind convolution, pooling and projection.

With t a length, a row holds phi(t), the penalty; psi(t) = phi'(t), the influence, which is also the magnitude
h of a decoupled convolution; its curvature psi'(t); and its gain s(t) = psi(t)/t, which multiplies the plain
convolution and is the weight of a pooled sample. Equation numbers are those of Liu et al., Decoupled
Networks, CVPR 2018; barron is the general loss of Barron, CVPR 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from hyperball.rows import AnyValue, Row, Scalar, Sum, Table, Value

TINY = 1e-20  # a length below it, where 1 is the unit, counts as zero
FLOOR = 1e-30  # a length below it counts as zero in any unit
SHAPE_LIMIT = 1e15  # stands for an infinite shape: (1 + q/b)^(-b/2) equals exp(-q/2) to rounding


@dataclass(frozen=True, eq=False, repr=False)
class Radial(Row):
    """A row of the radial table.

    gain(n, **parameters) is s(n); curvature(n, s, **parameters) is h'(n), given s, or `both` gives the two at once;
    partials hold ds/dparameter.
    `degree` is k, 0 or 1, in h(a·n, a·rho) = a^k h(n, rho), from which the radius derivative follows.
    """

    gain: Callable[..., Tensor] | None = None
    curvature: Callable[..., Tensor] | None = None
    both: Callable[..., tuple[Tensor, Tensor]] | None = None
    phi: Callable[..., Tensor] | None = None
    partials: Mapping[str, Callable[..., Tensor]] | None = None
    degree: int = 0
    proportional: bool = False
    magnitude: bool = True
    bounded: bool = False
    convex: bool = True
    smooth: bool = True

    @property
    def composed(self) -> bool:
        return self.curvature is None and self.both is None

    def gain_and_curvature(self, n: Tensor, **parameters: Any) -> tuple[Tensor, Tensor]:
        """s(n) and h'(n)."""
        if self.both is not None:
            return self.both(n, **parameters)
        assert self.gain is not None
        assert self.curvature is not None
        s = self.gain(n, **parameters)
        return s, self.curvature(n, s, **parameters)

    def __reduce__(self) -> tuple[Any, ...]:
        return _row, (self.name,)


TABLE = Table("radial")


def _row(name: str) -> Row:
    """A row by name: how a pickled row finds itself again."""
    return TABLE[name]


def times(x: Tensor, factor: Scalar) -> Tensor:
    """x·factor, and x itself for the number 1."""
    return x if isinstance(factor, float) and factor == 1.0 else x * factor


def hypotenuse(a: Tensor, b: Scalar) -> Tensor:
    """sqrt(a² + b²) without overflow, for b >= 0; at least 1e-20."""
    longest = a.clamp(min=b).clamp(min=TINY)
    return longest * ((a / longest).square() + (b / longest).square()).sqrt()


def log_one_plus_square(r: Tensor) -> tuple[Tensor, Tensor]:
    """log(1 + r²) and r²/(1 + r²) for r >= 0, accurate near 0 and where r² overflows.

    log(1 + x) is log(w) + (x - (w - 1))/w with w = 1 + x rounded: the same as log1p, and faster on a CPU.
    """
    bounded = r.clamp(max=1e18)
    x = bounded.square()
    w = 1.0 + x
    beyond = (r / bounded.clamp(min=1.0)).clamp(min=1.0).log()
    return torch.add(w.log() + (x - (w - 1.0)) / w, beyond, alpha=2.0), x / w


def log1p_gain(n: Tensor) -> Tensor:
    """log(1 + n)/n, which is 1 at 0."""
    n = n.clamp(min=TINY)
    return n.log1p() / n


def sphere_gain(n: Tensor, alpha: Scalar, eps: float) -> Tensor:
    """s = alpha / sqrt(n² + eps) (4)."""
    return alpha / hypotenuse(n, math.sqrt(eps))


def sphere_curvature(n: Tensor, s: Tensor, alpha: Scalar, eps: float) -> Tensor:
    """h' = alpha·eps / (n² + eps)^(3/2)."""
    return s * (math.sqrt(eps) / hypotenuse(n, math.sqrt(eps))).square()


def ball_gain(n: Tensor, alpha: Scalar, rho: Scalar) -> Tensor:
    """s = alpha / max(n, rho) (5)."""
    return alpha / n.clamp(min=rho)


def ball_curvature(n: Tensor, s: Tensor, alpha: Scalar, rho: Scalar) -> Tensor:
    """h' = alpha/rho inside the ball, 0 outside."""
    return s * (n <= rho)


def tanh_gain(n: Tensor, alpha: Scalar, rho: Scalar) -> Tensor:
    """s = alpha·tanh(n/rho)/n, which is alpha/rho at 0 (6)."""
    n = n.clamp(min=FLOOR)
    return times(torch.tanh(n * (1.0 / rho)) / n, alpha)


def tanh_both(n: Tensor, alpha: Scalar, rho: Scalar) -> tuple[Tensor, Tensor]:
    """s, and h' = (alpha/rho)·(1 - tanh²(n/rho))."""
    n = n.clamp(min=FLOOR)
    t = torch.tanh(n * (1.0 / rho))
    return times(t / n, alpha), (1.0 - t * t) * (alpha / rho)


def linear_gain(n: Tensor, alpha: Scalar) -> Tensor:
    """s = alpha (7)."""
    return torch.ones_like(n) * alpha


def linear_curvature(n: Tensor, s: Tensor, alpha: Scalar) -> Tensor:
    """h' = alpha."""
    return s


def seg_gain(n: Tensor, alpha: Scalar, beta: Scalar, rho: Scalar) -> Tensor:
    """s = beta + (alpha - beta)·rho/max(n, rho) (8)."""
    return beta + (alpha - beta) * (rho / n.clamp(min=rho))


def seg_curvature(n: Tensor, s: Tensor, alpha: Scalar, beta: Scalar, rho: Scalar) -> Tensor:
    """h' = alpha inside the radius, beta outside."""
    one = torch.ones_like(s)
    return torch.where(n <= rho, one * alpha, one * beta)


def log_gain(n: Tensor, alpha: Scalar) -> Tensor:
    """s = alpha·log(1+n)/n, which is alpha at 0 (9)."""
    return alpha * log1p_gain(n)


def log_curvature(n: Tensor, s: Tensor, alpha: Scalar) -> Tensor:
    """h' = alpha / (1 + n)."""
    return alpha / (1.0 + n)


def mix_gain(n: Tensor, alpha: Scalar, beta: Scalar) -> Tensor:
    """s = alpha + beta·log(1+n)/n (10)."""
    return alpha + beta * log1p_gain(n)


def mix_curvature(n: Tensor, s: Tensor, alpha: Scalar, beta: Scalar) -> Tensor:
    """h' = alpha + beta/(1 + n)."""
    return alpha + beta / (1.0 + n)


def barron_ratio(n: Tensor, rho: Scalar, shape: Scalar) -> tuple[Tensor, Scalar]:
    """r = n/(rho·sqrt(b)) with b = max(|shape - 2|, 1e-6), so that T = 1 + r²; and the shape, made finite."""
    if isinstance(shape, Tensor):
        shape = shape.clamp(min=-SHAPE_LIMIT, max=SHAPE_LIMIT)
        return n / (rho * (shape - 2.0).abs().clamp(min=1e-6).sqrt()), shape
    shape = min(max(shape, -SHAPE_LIMIT), SHAPE_LIMIT)
    return n / (rho * math.sqrt(max(abs(shape - 2.0), 1e-6))), shape


def barron_gain(n: Tensor, rho: Scalar, shape: Scalar, alpha: Scalar = 1.0) -> Tensor:
    """s = alpha·(1 + n²/(b·rho²))^(shape/2 - 1)."""
    r, shape = barron_ratio(n, rho, shape)
    return times(torch.exp(log_one_plus_square(r)[0] * (shape / 2.0 - 1.0)), alpha)


def barron_both(n: Tensor, rho: Scalar, shape: Scalar, alpha: Scalar = 1.0) -> tuple[Tensor, Tensor]:
    """s, and h' = s·(1 + (shape - 2)·r²/(1 + r²))."""
    r, shape = barron_ratio(n, rho, shape)
    log_t, share = log_one_plus_square(r)
    s = times(torch.exp(log_t * (shape / 2.0 - 1.0)), alpha)
    return s, s * (1.0 + (shape - 2.0) * share)


def barron_shape_partial(n: Tensor, s: Tensor, h1: Tensor, rho: Scalar, shape: Scalar, alpha: Scalar = 1.0) -> Tensor:
    """ds/dshape = s·(log(1 + r²) - r²/(1 + r²))/2; within 1e-6 of 2, where b is held, the last term is absent."""
    r, shape = barron_ratio(n, rho, shape)
    log_t, share = log_one_plus_square(r)
    moving = (torch.as_tensor(shape, device=n.device) - 2.0).abs() > 1e-6
    return s * (log_t - share * moving) / 2.0


def barron_phi(z: Tensor, rho: Scalar, shape: Scalar, alpha: Scalar = 1.0) -> Tensor:
    """phi = c²·(b/shape)·((1 + q/b)^(shape/2) - 1), q = z²/c², in a form that is smooth at shape 0 and 2."""
    r, shape = barron_ratio(z.abs(), rho, shape)
    shape = torch.as_tensor(shape, dtype=z.dtype, device=z.device)
    b = (shape - 2.0).abs().clamp(min=1e-6)
    half_log = log_one_plus_square(r)[0] / 2.0
    omega = shape * half_log
    small = omega.abs() < 1e-6
    quotient = torch.where(small, 1.0 + omega / 2.0, torch.expm1(omega) / torch.where(small, 1.0, omega))
    return alpha * rho * rho * b * half_log * quotient


def ramp(t: Tensor, j: int, pieces: int) -> Tensor:
    """How much of [0, t] lies in piece j of [0, 2], cut into equal pieces; the last piece has no end."""
    width = 2.0 / pieces
    above = (t - j * width).clamp(min=0.0)
    return above if j == pieces - 1 else above.clamp(max=width)


def piecewise_gain(n: Tensor, rho: Scalar, slopes: tuple[Scalar, ...]) -> Tensor:
    """s = H(t)/t, t = n/rho, H piecewise linear from H(0) = 0 with the given slopes on [0, 2] and beyond."""
    t = (n / rho).clamp(min=TINY)
    height = slopes[0] * ramp(t, 0, len(slopes))
    for j, slope in enumerate(slopes[1:], start=1):
        height = height + slope * ramp(t, j, len(slopes))
    return height / t


def piecewise_curvature(n: Tensor, s: Tensor, rho: Scalar, slopes: tuple[Scalar, ...]) -> Tensor:
    """h' = the slope of the piece that holds n/rho."""
    width = 2.0 / len(slopes)
    t = n / rho
    slope = torch.ones_like(s) * slopes[0]
    for j in range(1, len(slopes)):
        slope = torch.where(t > j * width, torch.ones_like(s) * slopes[j], slope)
    return slope


def piecewise_slope_partial(
    n: Tensor, s: Tensor, h1: Tensor, index: int, rho: Scalar, slopes: tuple[Scalar, ...]
) -> Tensor:
    """ds/dslope_j = (the part of [0, t] in piece j)/t."""
    t = (n / rho).clamp(min=TINY)
    return ramp(t, index, len(slopes)) / t


def quadratic_phi(z: Tensor, rho: Scalar) -> Tensor:
    """phi = z²/2; the radius is accepted and ignored."""
    return z.square() / 2.0


def pseudo_huber_gain(n: Tensor, rho: Scalar) -> Tensor:
    """s = 1/sqrt(1 + n²/c²)."""
    return 1.0 / hypotenuse(n / rho, 1.0)


def pseudo_huber_phi(z: Tensor, rho: Scalar) -> Tensor:
    """phi = c²(sqrt(1 + z²/c²) - 1), computed as z²/(1 + sqrt(…))."""
    return z * (z / (1.0 + hypotenuse(z.abs() / rho, 1.0)))


def huber_gain(n: Tensor, rho: Scalar) -> Tensor:
    """s = c/max(n, c)."""
    return rho / n.clamp(min=rho)


def huber_phi(z: Tensor, rho: Scalar) -> Tensor:
    """phi = z²/2 inside c, c(|z| - c/2) outside."""
    inside = z.abs().clamp(max=rho)
    return inside * (z.abs() - inside / 2.0)


def inside_indicator(n: Tensor, s: Tensor, rho: Scalar) -> Tensor:
    """psi' = [n <= c]."""
    return (n <= rho).to(s.dtype)


def welsch_gain(n: Tensor, rho: Scalar) -> Tensor:
    """s = exp(-n²/(2c²))."""
    return torch.exp(-(n / rho).clamp(max=1e4).square() / 2.0)


def welsch_curvature(n: Tensor, s: Tensor, rho: Scalar) -> Tensor:
    """psi' = (1 - n²/c²)·exp(-n²/(2c²))."""
    return (1.0 - (n / rho).clamp(max=1e4).square()) * s


def welsch_phi(z: Tensor, rho: Scalar) -> Tensor:
    """phi = c²(1 - exp(-z²/(2c²)))."""
    return -rho * rho * torch.expm1(-(z.abs() / rho).clamp(max=1e4).square() / 2.0)


def truncated_gain(n: Tensor, rho: Scalar) -> Tensor:
    """s = [n <= c]."""
    return (n <= rho).to(n.dtype)


def truncated_phi(z: Tensor, rho: Scalar) -> Tensor:
    """phi = min(z², c²)/2."""
    return z.abs().clamp(max=rho).square() / 2.0


def absolute_gain(n: Tensor, rho: Scalar) -> Tensor:
    """s = 1/n."""
    return 1.0 / n.clamp(min=TINY)


def absolute_phi(z: Tensor, rho: Scalar) -> Tensor:
    """phi = |z|, whose minimizer is a median; the radius is accepted and ignored."""
    return z.abs()


def _rows() -> Iterator[Radial]:
    one, radius = {"alpha": 1.0}, {"alpha": 1.0, "rho": 1.0}
    yield Radial(
        "sphere",
        "α",
        {**one, "eps": None},
        ("alpha",),
        gain=sphere_gain,
        curvature=sphere_curvature,
        proportional=True,
        bounded=True,
    )
    yield Radial(
        "ball", "α·min(n, ρ)/ρ", radius, ("alpha", "rho"), gain=ball_gain, curvature=ball_curvature, proportional=True,
        bounded=True, smooth=False,
    )  # fmt: skip
    yield Radial(
        "tanh",
        "α·tanh(n/ρ)",
        radius,
        ("alpha", "rho"),
        gain=tanh_gain,
        both=tanh_both,
        proportional=True,
        bounded=True,
    )
    yield Radial("linear", "α·n", one, ("alpha",), gain=linear_gain, curvature=linear_curvature, proportional=True)
    yield Radial(
        "seg", "α·n, beyond ρ: β·n + (α−β)·ρ", {"alpha": 1.0, "beta": 0.5, "rho": 1.0}, ("rho",), gain=seg_gain,
        curvature=seg_curvature, degree=1, smooth=False,
        partials={
            "alpha": lambda n, s, h1, alpha, beta, rho: rho / n.clamp(min=rho),
            "beta": lambda n, s, h1, alpha, beta, rho: 1.0 - rho / n.clamp(min=rho),
        },
    )  # fmt: skip
    yield Radial("log", "α·log(1+n)", one, ("alpha",), gain=log_gain, curvature=log_curvature, proportional=True)
    yield Radial(
        "mix", "α·n + β·log(1+n)", {"alpha": 1.0, "beta": 1.0}, gain=mix_gain, curvature=mix_curvature,
        partials={
            "alpha": lambda n, s, h1, alpha, beta: torch.ones_like(s),
            "beta": lambda n, s, h1, alpha, beta: log1p_gain(n),
        },
    )  # fmt: skip
    yield Radial(
        "barron", "α·n·(1 + n²/(bρ²))^(shape/2−1), b = |shape−2|", {**radius, "shape": 1.0}, ("alpha", "rho"),
        gain=barron_gain, both=barron_both, phi=barron_phi, degree=1, proportional=True,
        partials={"shape": barron_shape_partial},
    )  # fmt: skip
    yield Radial(
        "piecewise", "ρ·H(n/ρ), H monotone and piecewise linear, learned", {"rho": 1.0, "slopes": (1.0,) * 8}, ("rho",),
        {"slopes": 0.0}, gain=piecewise_gain, curvature=piecewise_curvature, degree=1, smooth=False,
        partials={"slopes": piecewise_slope_partial},
    )  # fmt: skip
    yield from _penalties()


def _penalties() -> Iterator[Radial]:
    def penalty(name: str, formula: str, **fields: Any) -> Radial:
        return Radial(name, formula, {"rho": 1.0}, ("rho",), degree=1, magnitude=False, **fields)

    yield penalty(
        "quadratic", "z²/2", gain=lambda n, rho: torch.ones_like(n), curvature=lambda n, s, rho: s, phi=quadratic_phi
    )
    yield penalty(
        "pseudo_huber", "c²(√(1+z²/c²) − 1)", gain=pseudo_huber_gain, curvature=lambda n, s, rho: s**3,
        phi=pseudo_huber_phi, bounded=True,
    )  # fmt: skip
    yield penalty(
        "huber", "z²/2, beyond c: c(|z| − c/2)", gain=huber_gain, curvature=inside_indicator, phi=huber_phi,
        bounded=True, smooth=False,
    )  # fmt: skip
    yield penalty(
        "welsch", "c²(1 − exp(−z²/2c²))", gain=welsch_gain, curvature=welsch_curvature, phi=welsch_phi, bounded=True,
        convex=False,
    )  # fmt: skip
    yield penalty(
        "truncated_quadratic", "min(z², c²)/2", gain=truncated_gain, curvature=inside_indicator, phi=truncated_phi,
        bounded=True, convex=False, smooth=False,
    )  # fmt: skip
    yield penalty(
        "absolute", "|z|", gain=absolute_gain, curvature=lambda n, s, rho: torch.zeros_like(s), phi=absolute_phi,
        bounded=True, smooth=False,
    )  # fmt: skip


for _one in _rows():
    TABLE.add(_one)


def names(kind: Literal["magnitude", "penalty"] | None = None) -> list[str]:
    """The rows of the table: all, or those that serve as a magnitude or as a penalty."""
    if kind not in (None, "magnitude", "penalty"):
        raise ValueError(f"`kind` must be 'magnitude', 'penalty' or None, got {kind!r}")
    rows = [row for row in TABLE.rows.values() if isinstance(row, Radial)]
    if kind == "magnitude":
        return [row.name for row in rows if row.magnitude]
    return [row.name for row in rows if kind is None or row.phi is not None]


def parse(given: str | AnyValue | Row, kind: Literal["magnitude", "penalty"] = "magnitude") -> AnyValue:
    """A text, a row or a value as a value of the given kind."""
    if isinstance(given, Row):
        given = given()
    value = TABLE.parse(given) if isinstance(given, str) else given
    if not isinstance(value, Value | Sum) or not all(isinstance(term.row, Radial) for term in value.terms):
        raise TypeError(
            f"`{kind}` must be a text such as 'tanh(rho=2)' or a value from hyperball.radial, got {given!r}"
        )
    for term in value.terms:
        if term.name not in names(kind):
            raise ValueError(f"{term.name!r} is not a {kind}; known: {', '.join(names(kind))}")
    return value


def add(*terms: str | AnyValue | Row) -> AnyValue:
    """The sum of several magnitudes, ``add("linear", "tanh(rho=2)")``: h(n) = h_1(n) + h_2(n) + …"""
    if not terms:
        raise ValueError("`terms` must name at least one radial function")
    values = tuple(value for term in terms for value in parse(term).terms)
    return values[0] if len(values) == 1 else Sum(values)


def register(
    name: str,
    *,
    gain: Callable[..., Tensor] | None = None,
    magnitude: Callable[..., Tensor] | None = None,
    penalty: Callable[..., Tensor] | None = None,
    parameters: Mapping[str, float] | None = None,
    formula: str = "user-defined",
    bounded: bool = False,
    replace: bool = False,
) -> Radial:
    """Add a radial function written in plain torch; it runs eagerly, with autograd's derivatives.

    Give `gain`, s(n, **parameters) = h/n, or `magnitude`, h(n, **parameters), from which the gain is formed.
    A `penalty`, phi(z, **parameters), makes it a penalty too. The row is then known to texts and by attribute:

    >>> import hyperball as hb, torch
    >>> row = hb.radial.register("root", magnitude=lambda n, rho: rho * (n / rho).sqrt(), parameters={"rho": 1.0})
    >>> layer = hb.nn.DecoupledConv2d(3, 8, 3, magnitude="root(rho=2)")
    """
    if (gain is None) == (magnitude is None):
        raise ValueError("give either `gain` or `magnitude`, a function of n and the parameters")
    if magnitude is not None:
        influence = magnitude

        def gain(n: Tensor, **held: Any) -> Tensor:
            return influence(n.clamp(min=TINY), **held) / n.clamp(min=TINY)

    held = dict(parameters or {})
    positive = tuple(key for key in held if key == "rho")
    row = Radial(name, formula, held, positive, gain=gain, phi=penalty, bounded=bounded, convex=False)
    TABLE.add(row, replace=replace)
    return row


def __getattr__(name: str) -> Row:
    if name in TABLE.rows:
        return TABLE.rows[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *TABLE.rows]


def gain(value: AnyValue, n: Tensor) -> Tensor:
    """s(n) = h(n)/n of a value or a sum of values."""
    total = None
    for term in value.terms:
        part = term.row.gain(n, **term.parameters)
        total = part if total is None else total + part
    assert total is not None
    return total


def gains_and_curvatures(value: AnyValue, n: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(s_i(n), h_i'(n)) of every term."""
    return [term.row.gain_and_curvature(n, **term.parameters) for term in value.terms]


def partials(
    value: AnyValue, n: Tensor, pairs: list[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Callable[[], Tensor], Tensor | None]]:
    """For every tensor parameter, in the order of `rows.flatten`: ds/dparameter as a function, and a factor to it."""
    for term, (s, h1) in zip(value.terms, pairs, strict=True):
        for key, held in term.parameters.items():
            if isinstance(held, Tensor):
                yield _partial(term, key, n, s, h1)
            elif isinstance(held, tuple):
                for index, item in enumerate(held):
                    if isinstance(item, Tensor):
                        yield partial(term.row.partials[key], n, s, h1, index, **term.parameters), None


def _partial(term: Value, key: str, n: Tensor, s: Tensor, h1: Tensor) -> tuple[Callable[[], Tensor], Tensor | None]:
    """ds/dkey: given by the row; (k·s - h')/rho for a radius (Euler); s/alpha where h is proportional to alpha."""
    row = term.row
    if row.partials and key in row.partials:
        return partial(row.partials[key], n, s, h1, **term.parameters), None
    held: Any = term.parameters[key]
    if key == "rho":
        return (lambda: s - h1, 1.0 / held) if row.degree else (lambda: h1, -1.0 / held)
    assert key == "alpha"
    return lambda: s, 1.0 / held


def unit_alpha(value: AnyValue) -> AnyValue:
    """The value with alpha = 1, for `split` weighting, which h must be proportional to alpha for."""
    return replace(value, parameters={**value.parameters, "alpha": 1.0}) if isinstance(value, Value) else value


def needs_norm(value: AnyValue) -> bool:
    """Whether s depends on n at all."""
    return any(term.name != "linear" for term in value.terms)


def composed(value: AnyValue) -> bool:
    """Whether any term is user-defined, so that autograd must derive it."""
    return any(term.row.composed for term in value.terms)
