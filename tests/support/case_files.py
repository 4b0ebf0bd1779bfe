"""Processes of their own for what depends on Triton: it reads TRITON_INTERPRET when it is imported, if it ever is."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from packaging.version import Version


def run_python(*arguments: str, **settings: str) -> "subprocess.CompletedProcess[str]":
    """Python with the modules of this process, and with such environment variables."""
    search = os.pathsep.join(folder for folder in sys.path if folder)
    environment = {**os.environ, "PYTHONPATH": search, **settings}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def run(path: Path, interpret: str, *options: str) -> "subprocess.CompletedProcess[str]":
    pytest_alone = ("-m", "pytest", "-q", "--tb=short", "--show-capture=no", "-p", "no:cacheprovider")
    return run_python(*pytest_alone, *options, str(path), TRITON_INTERPRET=interpret)


def check_without_triton(code: str) -> None:
    """Running the code, after torch and hyperball as hb, imports no Triton."""
    end = "assert not any(name.split('.')[0] == 'triton' for name in sys.modules)"
    done = run_python("-c", f"import sys, torch, hyperball as hb; {code}; {end}")
    assert done.returncode == 0, done.stderr


def check_in_the_interpreter(path: Path) -> None:
    """All cases pass on the CPU."""
    triton = pytest.importorskip("triton")
    if Version(np.__version__) >= Version("2.4") and Version(triton.__version__) < Version("3.8"):
        pytest.skip("the interpreter of Triton before 3.8 does not run with NumPy 2.4")
    done = run(path, "1", "-x")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def check_on_the_gpu(path: Path) -> None:
    """All cases pass on the GPU, or all that fail are named; several processes compile, which is what takes time."""
    done = run(path, "0", "-n", "6")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
