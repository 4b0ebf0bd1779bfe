"""Memory that a training process keeps."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import torch
from hyperball.training.process.allocator import keep_freed_memory
kept = keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(2**24)
before = faults()
for _ in range(20):
    torch.ones(2**24)
print(kept, faults() - before)
"""


def faults(**environment):
    """Whether freed memory is kept, and the pages that twenty tensors of 64 MiB, one after another, bring in."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", FAULTS]
    kept, count = subprocess.run(
        command, env=clean | environment, capture_output=True, text=True, check=True
    ).stdout.split()
    return kept == "True", int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the policy is glibc's")
def test_a_freed_tensor_is_used_again_unless_the_environment_decides():
    (kept, few), (left, many) = faults(), faults(MALLOC_TOP_PAD_="131072")
    assert (kept, left) == (True, False)
    assert 5 * few < many
