"""What a worker imports before its first step."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
from homelab.worker.runtime import imports
run = {"recipe": {"model": {"name": "/nowhere"}}, "data": {}}
imports.prepare(run, bitsandbytes=sys.argv[1] == "yes")
import homelab.worker.training.trainer
if sys.argv[1] == "yes":
    import torch
    from bitsandbytes.optim import AdamW8bit
    parameter = torch.nn.Parameter(torch.ones(5000))
    parameter.grad = torch.ones(5000)
    AdamW8bit([parameter]).step()
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("needed", [pytest.param("yes", marks=pytest.mark.thorough), "no"])
def test_no_compiler_and_nothing_unused_is_loaded(needed: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, needed], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert ("bitsandbytes.optim" in loaded) is (needed == "yes")
    assert not loaded & {"torch._inductor.compile_fx", "datasets.arrow_dataset", "pandas"}
