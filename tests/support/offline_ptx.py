"""Sizes of kernels as they are launched, compiled for a GPU of compute capability 9.0 that need not be there.

A process of its own runs `python offline_ptx.py batch_norm` or `rows`, since Triton's driver is replaced in it; it
prints {launch: lines of PTX}, or why Triton cannot compile here, with exit status 3.
"""

import json
import sys
from pathlib import Path

import case_files
import pytest
import torch

UNABLE = 3
Sizes = dict[str, int]


class Driver:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, _device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


def recording() -> Sizes:
    """A dictionary that fills with the lines of every kernel as it is launched; nothing runs."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    sizes: Sizes = {}
    original = JITFunction.run

    def compiled(self, *arguments, grid, warmup, **options):
        made = original(self, *arguments, grid=grid, warmup=True, **options)
        sizes[f"{self.fn.__name__} {len(sizes)}"] = made.asm["ptx"].count("\n")
        return made

    driver.set_active(Driver())
    JITFunction.run = compiled
    return sizes


def launch_batch_norm() -> None:
    """Channels that lie last, of few samples, of as many as registers hold, and of a spread of more."""
    from hyperball.kernels.triton.batch_norm import launch as launches

    x, f = torch.empty(64), torch.empty(64)
    for samples in (400, 8192, 524288):
        setup = launches.Setup(
            samples, 64, 1, True, "pseudo_huber", 1.0, 1e-5, 1.3, 0, True, True, 0.1, torch.device("cpu")
        )
        solve, _writes = launches.solve_launch(setup)
        solve.kernel[solve.grid](x, f, f, f, f, f, f, f, x, *solve.rest, num_warps=solve.warps)


def launch_rows() -> None:
    """The shapes of global pooling that are measured."""
    from hyperball.kernels.triton.pooling import launch as launches

    for n in (49, 2048):
        launches.pool(torch.empty(8, 16, n), None, "welsch", 1.0, 1.0, 1)


def compiles() -> str:
    """Why Triton cannot compile here, or nothing."""
    try:
        from hyperball.kernels.triton.pooling import launch as launches

        launches.pool(torch.empty(8, 16, 64), None, "quadratic", 1.0, 1.0, 1)
    except Exception as error:  # whatever a Triton without its compiler, or another one, raises
        return f"Triton does not compile here: {type(error).__name__}: {error}"
    return ""


def check(which: str, count: int) -> None:
    """Let launches compile in a process of its own: so many, each to so few lines that ptxas takes seconds."""
    pytest.importorskip("triton")
    done = case_files.run_python(str(Path(__file__)), which, TRITON_INTERPRET="0")
    if done.returncode == UNABLE:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert len(sizes) == count
    assert max(sizes.values()) < 12_000, sizes


def main(which: str) -> int:
    sizes = recording()
    reason = compiles()
    if reason:
        print(reason)
        return UNABLE
    {"batch_norm": launch_batch_norm, "rows": launch_rows}[which]()
    print(json.dumps(sizes))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
