"""A parent that has imported everything once and forks the ranks of one run after another. It only saves the seconds of starting.

The ranks are real processes with torchrun's environment, a store as torchrun's agent has one, gloo, and the worker's own `main`.
Requests come as JSON lines on stdin: {"ranks": [environment of each rank], "output": file, "timeout_s": ...}; the answer is a JSON
line with the exit codes, and the CPU seconds of all ranks so far.
FORKS_ENTRY in a rank's environment may name another function than `main`. What goes wrong shows in the output file, as in torchrun's.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    import peft  # noqa: F401
    import torch.distributed.algorithms.ddp_comm_hooks
    import torch.utils.serialization  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.trainer  # noqa: F401
    from transformers import conversion_mapping

    import homelab.worker

    root = Path(homelab.worker.__file__).parent
    for file in sorted(root.rglob("*.py")):
        room, *rest = file.relative_to(root).with_suffix("").parts
        # No rank needs the tools, and one that is not asked for a profile has nothing of it.
        if room not in ("tools", "profiling") and "__init__" not in (room, *rest):
            importlib.import_module(".".join(("homelab.worker", room, *rest)))
    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # a thousand patterns, which each rank would compile

    gc.collect()
    gc.freeze()  # the ranks' collectors leave these pages alone

    for line in sys.stdin:
        request = json.loads(line)
        codes = run(**request)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(json.dumps({"codes": codes, "cpu_s": used.ru_utime + used.ru_stime}), flush=True)


def run(ranks: list[dict[str, str]], output: str, timeout_s: float, after_failure_s: float) -> list[int]:
    """Exit codes of the ranks. Nobody outlives `timeout_s`."""
    store, port = fork_store()
    together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    together |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "forks"}
    pids = [fork_rank(environment | (together if len(ranks) > 1 else {}), output) for environment in ranks]
    codes: dict[int, int] = {}
    end = time.monotonic() + timeout_s
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes and (done := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(done[1])
                if codes[pid]:
                    end = min(end, time.monotonic() + after_failure_s)
        if time.monotonic() > end:
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
            end += timeout_s
        time.sleep(0.005)
    os.kill(store, signal.SIGKILL)
    os.waitpid(store, 0)
    return [codes[pid] for pid in pids]


def fork_store() -> tuple[int, int]:
    """(pid, port) of a process that holds the key-value store: its thread must not be in the one that forks."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        import torch.distributed as dist

        kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(into, str(kept.port).encode())
        os.close(into)
        signal.pause()
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as pipe:
        return pid, int(pipe.read())


def fork_rank(environment: dict[str, str], output: str) -> int:
    """The pid of a rank; its words go to the end of the file `output`."""
    pid = os.fork()
    if pid:
        return pid
    code: Any = 70
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(environment)
        module, _, function = environment["FORKS_ENTRY"].partition(":")
        code = getattr(importlib.import_module(module), function)()
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    main()
