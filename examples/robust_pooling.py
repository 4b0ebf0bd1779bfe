"""Mean, median, max and robust pools against a growing share of outliers: python examples/robust_pooling.py [file.png]

Rows of 49 samples, normal around 0; a share of each is replaced by samples around 12. The picture shows the mean error
|pooled − 0| of 400 rows, and one row with its pools.
"""

import sys

import torch

import hyperball as hb

POOLS = {
    "mean": lambda x: x.mean(-1),
    "max": lambda x: x.amax(-1),
    "median": lambda x: hb.functional.robust_pool(x, penalty="absolute"),
    "huber": lambda x: hb.functional.robust_pool(x, penalty="huber(c=1)"),
    "pseudo_huber": lambda x: hb.functional.robust_pool(x, penalty="pseudo_huber(c=1)"),
    "barron(shape=0)": lambda x: hb.functional.robust_pool(x, penalty="barron(shape=0, c=1)"),
    "welsch": lambda x: hb.functional.robust_pool(x, penalty="welsch(c=1.5)"),
    "truncated_quadratic": lambda x: hb.functional.robust_pool(x, penalty="truncated_quadratic(c=3)"),
}
SHARES = [0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6]


def rows(share: float, count: int = 400, n: int = 49) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, n, generator=generator)
    far = 12.0 + 2.0 * torch.randn(count, n, generator=generator)
    return torch.where(torch.arange(n) < round(share * n), far, x)


def errors() -> dict[str, list[float]]:
    return {name: [pool(rows(share)).abs().mean().item() for share in SHARES] for name, pool in POOLS.items()}


def draw(table: dict[str, list[float]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.8), layout="constrained", width_ratios=[3, 2])
    row = rows(0.3)[:1]
    right.plot(row[0], [-1.0] * row.shape[1], "|", color="gray", markersize=14)
    for index, (name, values) in enumerate(table.items()):
        style = "--" if name in ("mean", "median", "max") else "-"
        left.plot([100 * share for share in SHARES], values, style, color=f"C{index}", lw=2)
        right.plot(POOLS[name](row), [index], "o", color=f"C{index}", markersize=9)
    left.set(title="mean error of 400 pooled rows; the true center is 0", xlabel="outliers, %", yscale="log")
    left.axvline(50, color="lightgray", zorder=0)
    right.set(title="one row of 49 samples, 30 % of them outliers", xlabel="sample", ylim=(-1.6, len(table) - 0.4))
    right.set_yticks(range(-1, len(table)), ["samples", *table])
    for index, label in enumerate(right.get_yticklabels()[1:]):
        label.set(color=f"C{index}", weight="bold")
    right.axvline(0, color="lightgray", zorder=0)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main(path: str = "robust_pooling.png") -> None:
    table = errors()
    shown = [0, 4, 8, 12]
    print(f"{'error at outliers of':<22}" + "".join(f"{100 * SHARES[i]:>7.0f} %" for i in shown))
    for name, values in table.items():
        print(f"{name:<22}" + "".join(f"{values[i]:>9.3f}" for i in shown))
    draw(table, path)
    print(f"wrote {path}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
