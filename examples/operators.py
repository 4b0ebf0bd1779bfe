"""Draw every magnitude h(n) and angular function g(θ) of the two tables: python examples/operators.py [file.png]"""

import math
import sys

import torch

import hyperball as hb
from hyperball import rows


def main(path: str = "operators.png") -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 3.8), layout="constrained")
    n, theta = torch.linspace(0, 4, 400), torch.linspace(0, math.pi, 400)
    texts = {"seg": "seg(rho=2)", "barron": "barron(shape=0)", "piecewise": "piecewise(slopes=[0.4, 1.6, 0.2, 0.1])"}
    for index, name in enumerate(hb.radial.names("magnitude")):
        value = rows.fill(hb.radial.parse(texts.get(name, name)), eps=1e-4)
        left.plot(n, n * hb.radial.gain(value, n), label=texts.get(name, name), linestyle=("-", "--")[index >= 7])
    left.set(title="magnitude h(n), radius 1 where none is given", xlabel="n = ‖patch‖", ylim=(0, 3))
    texts = {"power": "power(b=4)", "piecewise": "piecewise(slopes=[0, 0.5, 0.5, 1.5])"}
    for index, name in enumerate(hb.angular.names()):
        value = rows.fill(hb.angular.parse(texts.get(name, name)), eps=1e-4)
        right.plot(
            theta, hb.angular.g(value, theta.cos()), label=texts.get(name, name), linestyle=("-", "--")[index >= 4]
        )
    right.set(title="angular function g(θ)", xlabel="θ between patch and filter", xticks=[0, math.pi / 2, math.pi])
    right.set_xticklabels(["0", "π/2", "π"])
    for axes in (left, right):
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
