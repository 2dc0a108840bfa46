"""python -m homelab.worker: train this rank's part of a run (see `homelab.worker.training.train.main`)."""

from __future__ import annotations

import os
import sys

from homelab.worker.training.train import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is written and the process group is left. The normal exit of Python runs torch's native destructors, which
    # abort now and then ("terminate called without an active exception", 2 of 12 runs with gloo, torch 2.13): a finished
    # rank would count as a crash.
    os._exit(code)
