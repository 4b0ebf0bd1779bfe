"""Radial functions: one table behind convolution, pooling and projection.

With t a length, a row holds phi(t), the penalty; psi(t) = phi'(t), the influence, which is also the magnitude
h of a decoupled convolution; its curvature psi'(t); and its gain s(t) = psi(t)/t, which multiplies the plain
convolution and is the weight of a pooled sample. The formulas are in `radial_functions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from hyperball import radial_functions as f
from hyperball.rows import AnyValue, Row, Sum, Table, Value


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


def _rows() -> Iterator[Radial]:
    one, radius = {"alpha": 1.0}, {"alpha": 1.0, "rho": 1.0}
    yield Radial(
        "sphere",
        "α",
        {**one, "eps": None},
        ("alpha",),
        {"eps": 0.0},
        gain=f.sphere_gain,
        curvature=f.sphere_curvature,
        proportional=True,
        bounded=True,
    )
    yield Radial(
        "ball", "α·min(n, ρ)/ρ", radius, ("alpha", "rho"), gain=f.ball_gain, curvature=f.ball_curvature,
        proportional=True, bounded=True, smooth=False,
    )  # fmt: skip
    yield Radial(
        "tanh",
        "α·tanh(n/ρ)",
        radius,
        ("alpha", "rho"),
        gain=f.tanh_gain,
        both=f.tanh_both,
        proportional=True,
        bounded=True,
    )
    yield Radial("linear", "α·n", one, ("alpha",), gain=f.linear_gain, curvature=f.linear_curvature, proportional=True)
    yield Radial(
        "seg", "α·n, beyond ρ: β·n + (α−β)·ρ", {"alpha": 1.0, "beta": 0.5, "rho": 1.0}, ("rho",), gain=f.seg_gain,
        curvature=f.seg_curvature, degree=1, smooth=False,
        partials={
            "alpha": lambda n, s, h1, alpha, beta, rho: rho / n.clamp(min=rho),
            "beta": lambda n, s, h1, alpha, beta, rho: 1.0 - rho / n.clamp(min=rho),
        },
    )  # fmt: skip
    yield Radial("log", "α·log(1+n)", one, ("alpha",), gain=f.log_gain, curvature=f.log_curvature, proportional=True)
    yield Radial(
        "mix", "α·n + β·log(1+n)", {"alpha": 1.0, "beta": 1.0}, gain=f.mix_gain, curvature=f.mix_curvature,
        partials={
            "alpha": lambda n, s, h1, alpha, beta: torch.ones_like(s),
            "beta": lambda n, s, h1, alpha, beta: f.log1p_gain(n),
        },
    )  # fmt: skip
    yield Radial(
        "barron", "α·n·(1 + n²/(bρ²))^(shape/2−1), b = |shape−2|", {**radius, "shape": 1.0}, ("alpha", "rho"),
        gain=f.barron_gain, both=f.barron_both, phi=f.barron_phi, degree=1, proportional=True,
        partials={"shape": f.barron_shape_partial},
    )  # fmt: skip
    yield Radial(
        "piecewise", "ρ·H(n/ρ), H monotone and piecewise linear, learned", {"rho": 1.0, "slopes": (1.0,) * 8}, ("rho",),
        {"slopes": 0.0}, gain=f.piecewise_gain, curvature=f.piecewise_curvature, degree=1, smooth=False,
        partials={"slopes": f.piecewise_slope_partial},
    )  # fmt: skip
    yield from _penalties()


def _penalties() -> Iterator[Radial]:
    def penalty(name: str, formula: str, **fields: Any) -> Radial:
        return Radial(name, formula, {"rho": 1.0}, ("rho",), degree=1, magnitude=False, **fields)

    yield penalty(
        "quadratic", "z²/2", gain=lambda n, rho: torch.ones_like(n), curvature=lambda n, s, rho: s, phi=f.quadratic_phi
    )
    yield penalty(
        "pseudo_huber", "c²(√(1+z²/c²) − 1)", gain=f.pseudo_huber_gain, curvature=lambda n, s, rho: s**3,
        phi=f.pseudo_huber_phi, bounded=True,
    )  # fmt: skip
    yield penalty(
        "huber", "z²/2, beyond c: c(|z| − c/2)", gain=f.huber_gain, curvature=f.inside_indicator, phi=f.huber_phi,
        bounded=True, smooth=False,
    )  # fmt: skip
    yield penalty(
        "welsch", "c²(1 − exp(−z²/2c²))", gain=f.welsch_gain, curvature=f.welsch_curvature, phi=f.welsch_phi,
        bounded=True, convex=False,
    )  # fmt: skip
    yield penalty(
        "truncated_quadratic", "min(z², c²)/2", gain=f.truncated_gain, curvature=f.inside_indicator,
        phi=f.truncated_phi, bounded=True, convex=False, smooth=False,
    )  # fmt: skip
    yield penalty(
        "absolute", "|z|", gain=f.absolute_gain, curvature=lambda n, s, rho: torch.zeros_like(s), phi=f.absolute_phi,
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
    if not isinstance(value, (Value, Sum)) or not all(isinstance(term.row, Radial) for term in value.terms):
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
    if (gain is None) == (magnitude is None) or not callable(gain or magnitude):
        raise ValueError("give either `gain` or `magnitude`, a function of n and the parameters")
    if name in globals():
        raise ValueError(f"`name` must not be that of a function of hyperball.radial, got {name!r}")
    if magnitude is not None:
        influence = magnitude

        def gain(n: Tensor, **held: Any) -> Tensor:
            return influence(n.clamp(min=f.TINY), **held) / n.clamp(min=f.TINY)

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
    return any(term.name != "linear" or term.row.composed for term in value.terms)


def composed(value: AnyValue) -> bool:
    """Whether any term is user-defined, so that autograd must derive it."""
    return any(term.row.composed for term in value.terms)
