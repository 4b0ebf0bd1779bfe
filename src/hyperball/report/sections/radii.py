"""Learned radii of networks: over the steps of training, and layer by layer where they were measured once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hyperball.report.charts import COLORS, Chart, Series
from hyperball.report.drawing.axes import is_wide
from hyperball.report.page import Gallery
from hyperball.report.records import Point, Run
from hyperball.report.sections.lines import MOST_LINES, Points, colors, first_of
from hyperball.report.tables import family

MOST_CHARTS = 12


@dataclass(frozen=True)
class Network:
    """A run under the name that a chart gives it; `operator` is what the page's filter knows it by."""

    name: str
    operator: str
    run: Run

    @property
    def measured(self) -> list[Point]:
        """The evaluations that tell radii."""
        return [point for point in self.run.evaluations if point.radii]

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(layer for point in self.measured for layer in point.radii))

    @property
    def moved(self) -> bool:
        """Whether some radius changed, as far as can be told: one that is fixed never does."""
        return len(self.measured) == 1 or any(point.radii != self.measured[0].radii for point in self.measured)

    def over_steps(self, layer: str) -> Points:
        return tuple((point.step, point.radii[layer]) for point in self.measured if layer in point.radii)


def radii_gallery(networks: Sequence[Network]) -> Gallery:
    """The radii of the first network of each operator that training moved; others are counted."""
    held = [network for network in networks if network.measured]
    moved = [network for network in held if network.moved]
    firsts: dict[str, Network] = {}
    for network in moved:
        firsts.setdefault(network.operator or network.name, network)
    often = [network for network in firsts.values() if len(network.measured) > 1]
    once = [network for network in firsts.values() if len(network.measured) == 1]
    charts = [*step_charts(often), *layer_charts(once)]
    shown, cut = first_of(charts, MOST_CHARTS, "pictures")
    still = len(held) - len(moved)
    said = (
        "The first network of each operator." if len(firsts) < len(moved) else "",
        f"{cut}." if cut else "",
        f"Not drawn: {still} network{'' if still == 1 else 's'} whose radii stayed as they began." if still else "",
    )
    return Gallery("Learned radii", tuple(shown), " ".join(filter(None, said)))


def step_charts(networks: Sequence[Network]) -> list[Chart]:
    """A chart a network with a line a layer; one for all that have one layer each and begin with radii that compare."""
    single = [network for network in networks if len(network.layers) == 1]
    lines = [network.over_steps(network.layers[0]) for network in single]
    if len(single) < 2 or is_wide([points[0][1] for points in lines]):
        return [steps_chart(network) for network in networks]
    layers = dict.fromkeys(network.layers[0] for network in single)
    together = network_chart("Radii", "step", single, lines, f"the mean of {' or '.join(layers)}")
    return [together, *(steps_chart(network) for network in networks if len(network.layers) > 1)]


def steps_chart(network: Network) -> Chart:
    """The mean radius of every layer over the steps of one run."""
    layers, cut = first_of(network.layers, MOST_LINES, "layers")
    series = tuple(
        Series(layer, network.over_steps(layer), 1 + number % (COLORS - 1)) for number, layer in enumerate(layers)
    )
    note = f"the mean of each layer, seed {network.run.seed}{'; ' if cut else ''}{cut}"
    operator = network.operator or family(network.run.recipe)
    return Chart(f"Radii: {network.name}", "step", "", series, note=note, operator=operator)


def layer_charts(networks: Sequence[Network]) -> list[Chart]:
    """Radii from the first layer to the last, networks of the same layers and step in one chart."""
    alike: dict[tuple[float, tuple[str, ...]], list[Network]] = {}
    for network in networks:
        alike.setdefault((network.measured[0].step, network.layers), []).append(network)
    charts = []
    for (step, layers), members in alike.items():
        note = f"the mean of each layer after {step:,.0f} steps, from {layers[0]} to {layers[-1]}"
        charts.append(network_chart("Radii, layer by layer", "layer", members, list(map(over_layers, members)), note))
    return charts


def over_layers(network: Network) -> Points:
    return tuple((float(depth), mean) for depth, mean in enumerate(network.measured[0].radii.values(), 1))


def network_chart(title: str, over: str, networks: Sequence[Network], lines: Sequence[Points], note: str) -> Chart:
    """A line a network."""
    drawn, cut = first_of(networks, MOST_LINES, "lines")
    chosen = colors([network.operator or network.name for network in drawn])
    series = tuple(
        Series(network.name, points, color, operator=network.operator)
        for network, points, color in zip(drawn, lines, chosen)
    )
    seeds = ", ".join(dict.fromkeys(f"seed {network.run.seed}" for network in drawn))
    return Chart(title, over, "", series, note="; ".join(filter(None, (note, seeds, cut))), log=True)
