"""The rules as data: which words in a log mean what, and which command mends it.

The patterns come from recorded failures of torchrun with gloo (`tests/diagnose/data`), and for CUDA and NCCL from the
reports of pytorch/pytorch, e.g. issues 16417 (out of memory), 153928 (no kernel image) and 118369 (watchdog), and of
meta-pytorch/torchtune 1025 (port in use). What is known without any words is in `endings`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from homelab.torch_builds import BEFORE_TURING, FROM_TURING, TORCH

# cause: a reason by itself. symptom: what a rank sees when another one is silent; named only when nothing better is
# known. victim: what a rank sees when another one is gone; never named as the culprit.
Role = Literal["cause", "symptom", "victim"]


@dataclass(frozen=True)
class Rule:
    """One cause.

    `title` and `hint` may use {node}, {rank}, {run}, {options}, {where}, {message} and `pattern`'s named groups; `hint` also
    {on_node:COMMAND}, which is COMMAND as the controller runs it there, and {python}, the node's own.
    `retryable`: starting again from the newest checkpoint can help (whoever restarts must still give up when the same
    cause comes back). `specificity`: of several rules that match, the highest wins; below 50 the rule only says that
    something is wrong, not what.
    """

    id: str
    title: str
    hint: str
    retryable: bool
    specificity: int
    pattern: re.Pattern[str] = re.compile(r"(?!)")  # matches nothing
    role: Role = "cause"


def _any(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE)


RECOVER = "homelab recover {run}{options}"
_RIGHT_BUILD = (
    f"install the torch for the card of {{node}}. RTX 20xx to 50xx, driver {FROM_TURING.driver} or newer: "
    f"{{on_node:{{python}} -m pip install --force-reinstall torch=={TORCH} --index-url {FROM_TURING.index}}}; GTX 10xx and older: the same with {BEFORE_TURING.tag}"
)
_NO_PEER_ACCESS = 'edit cluster.toml, node {node}: environment = {{ NCCL_P2P_DISABLE = "1"'

RULES: tuple[Rule, ...] = (
    # --- the card -----------------------------------------------------------------------------------------------------
    Rule(
        "cuda-out-of-memory",
        "the GPU of rank {rank} on {node} ran out of memory",
        "lower [parallel] micro_batch or [train] seq_len in the recipe (homelab plan itemises the bytes), or free "
        "the card ({on_node:nvidia-smi}); then: " + RECOVER,
        True,
        90,
        _any(
            r"CUDA out of memory",
            r"CUDA error: out of memory",
            r"OutOfMemoryError: (?:CUDA|HIP|XPU)",
            r"CUBLAS_STATUS_ALLOC_FAILED",
            r"Failed to CUDA (?:malloc|calloc)",
            r"Cuda failure (?:\d+ )?'out of memory'",
            r"\bError out of memory at line \d+ in file",  # bitsandbytes, which ends the process itself (CUDA_CHECK_RETURN)
        ),
    ),
    Rule(
        "no-kernel-image",
        "the torch on {node} has no kernels for its card",
        _RIGHT_BUILD,
        False,
        95,
        _any(r"no kernel image is available", r"not compatible with the current PyTorch installation"),
    ),
    Rule(
        "cuda-driver",
        "the GPU driver of {node} and its torch do not fit together, or the driver is not loaded",
        "{on_node:nvidia-smi}; if it fails, reboot {node}, or install a newer driver; then: homelab preflight",
        False,
        90,
        _any(
            r"CUDA driver version is insufficient",
            r"Found no NVIDIA driver",
            r"NVML: Driver/library version mismatch",
            r"no CUDA-capable device is detected",
            r"Torch not compiled with CUDA enabled",
            r"driver on your system is too old",
        ),
    ),
    Rule(
        "gpu-lost",
        "the GPU of {node} stopped working",
        "reboot {node} (heat, power supply and overclocking are the usual reasons: "
        "{on_node:journalctl -k | grep Xid}); then: " + RECOVER,
        True,
        85,
        _any(
            r"GPU is lost",
            r"fallen off the bus",
            r"uncorrectable ECC",
            r"CUDA error: (?:unspecified launch failure|unknown error|an illegal memory access|the launch timed out)",
            r"Cuda failure (?:\d+ )?'(?:unspecified launch failure|unknown error|an illegal memory access|the launch timed out)",
        ),
    ),
    Rule(
        "cuda-assert",
        "an index was out of range in a GPU kernel on {node}",
        "the data or the vocabulary is wrong (a token id or a label beyond the model's size); see {where}",
        False,
        85,
        _any(r"device-side assert triggered"),
    ),
    Rule(
        "nccl-version",
        "the nodes have different versions of NCCL, which do not talk with each other",
        "the same build of torch on every node; homelab preflight --only python.same names the one that differs and the command; then: "
        + RECOVER,
        False,
        95,
        _any(r"Mismatched NCCL version detected"),
    ),
    Rule(
        "peer-access",
        "two cards of {node} cannot reach each other's memory",
        _NO_PEER_ACCESS + ', NCCL_CUMEM_HOST_ENABLE = "0" }}, or a newer driver on {node}; then: ' + RECOVER,
        False,
        93,
        _any(r"peer access is not supported between these two devices", r"failed to open CUDA IPC handle"),
    ),
    Rule(
        "peer-access-refused",
        "accelerate does not start on several RTX 40xx of {node} with this driver",
        _NO_PEER_ACCESS + ' }}, or install driver 550.40.07 or newer on {node}; then: ' + RECOVER,
        False,
        93,
        _any(r"RTX 4000 series doesn't support faster communication"),
    ),
    Rule(
        "nccl-cuda",
        "NCCL could not use the GPU of rank {rank} on {node}",
        "{on_node:nvidia-smi} and {on_node:journalctl -k | grep Xid} say whether the card is well; then: " + RECOVER,
        True,
        60,
        _any(r"\bCuda failure (?:\d+ )?'", r"\bncclUnhandledCudaError\b"),
    ),
    # --- the machine --------------------------------------------------------------------------------------------------
    Rule(
        "oom-killer",
        "the kernel of {node} killed rank {rank}: the machine ran out of memory",
        "close other programs on {node}, or lower its share in [parallel] shares; then: " + RECOVER,
        True,
        92,
        _any(r"Out of memory: Killed process", r"oom[-_]kill", r"Memory cgroup out of memory"),
    ),
    Rule(
        "host-out-of-memory",
        "rank {rank} on {node} ran out of main memory",
        "close other programs on {node} ({on_node:free -h}), or lower its share in [parallel] shares; then: "
        + RECOVER,
        True,
        88,
        _any(
            r"\bMemoryError\b",
            r"DefaultCPUAllocator: (?:can't|not enough)",
            r"Cannot allocate memory",
            r"std::bad_alloc",
            r"unable to mmap \d+ bytes",
        ),
    ),
    Rule(
        "shared-memory",
        "/dev/shm of {node} is too small",
        "{on_node:df -h /dev/shm}, and remove what fills it (nccl-* and torch_* of programs that have ended); a container: start it with --shm-size=8g",
        False,
        91,  # above disk-full, whose words NCCL uses
        _any(
            r"/dev/shm/nccl-.{0,80}No space left on device",
            r"failed to extend /dev/shm/nccl-",
            r"insufficient shared memory \(shm\)",
            r"unable to (?:write|resize|open) (?:to )?(?:file|shared memory) </torch_",
        ),
    ),
    Rule(
        "disk-full",
        "the disk of {node} is full",
        "make room on {node} ({on_node:df -h}; [checkpoint] keep in the recipe says how many are kept); then: "
        + RECOVER,
        False,
        90,
        _any(r"No space left on device", r"\bENOSPC\b", r"Disk quota exceeded"),
    ),
    Rule(
        "permission",
        "{node} may not open a file",
        "let the user that homelab logs in with read and write it ({path}); then: " + RECOVER,
        False,
        80,
        re.compile(r"Permission denied(?:: '(?P<path>[^']+)')?", re.IGNORECASE),
    ),
    Rule(
        "missing-file",
        "a file is not on {node}",
        "put it there, or correct its path in the recipe ({path}); then: " + RECOVER,
        False,
        75,
        re.compile(r"No such file or directory(?:: '(?P<path>[^']+)')?"),
    ),
    # --- the environment ----------------------------------------------------------------------------------------------
    Rule(
        "missing-package",
        "a Python package is missing on {node}: {module}",
        "install it into the environment of {node} that cluster.toml names under python, then: " + RECOVER,
        False,
        85,
        re.compile(r"No module named '?(?P<module>[\w.]+)'?"),
    ),
    Rule(
        "import-error",
        "a Python package on {node} is broken, or of the wrong version",
        "compare the versions: homelab preflight; then install the right one on {node}",
        False,
        80,
        _any(r"\bImportError\b", r"cannot import name", r"undefined symbol", r"cannot open shared object file"),
    ),
    Rule(
        "port-in-use",
        "port {port} of {node} is in use",
        "{on_node:ss -ltnp} names the program that holds it; " + RECOVER + " takes a fresh port",
        True,
        90,
        re.compile(r"(?:port: (?P<port>\d+).*)?(?:EADDRINUSE|Address already in use)", re.IGNORECASE),
    ),
    # --- the training -------------------------------------------------------------------------------------------------
    Rule(
        "nan-loss",
        "the loss is not a number any more",
        "lower [train] learning_rate or raise warmup_steps; then, as a new training: homelab launch {recipe}{options}",
        False,
        85,
        _any(
            r"loss (?:is|became|was) (?:nan|inf|not a number|not finite|infinite)",
            r"non-?finite (?:loss|gradient)",
            r"(?:nan|inf) loss",
        ),
    ),
    Rule(
        "checkpoint-set-aside",
        "the newest checkpoint on {node} is whole and cannot be loaded; it was set aside",
        RECOVER + " goes on from the one before",
        True,
        95,
        re.compile(r"of the checkpoint cannot be loaded: .*; it was set aside"),
    ),
    # --- what others' failures look like from here ------------------------------------------------------------------
    Rule(
        "timeout",
        "the ranks waited for each other in vain: no data came through",
        "the network between the nodes is the first suspect: homelab preflight; then: " + RECOVER,
        True,
        40,
        _any(
            r"Watchdog caught collective operation timeout",
            r"Timed out waiting \d+ ?ms",
            r"wait timeout after \d+ ?ms",
            r"ran for \d+ milliseconds before timing out",
            r"(?:socket|connect\w*|operation|client|store|barrier|rendezvous)\b.{0,60}\btimed out",
            r"\btimed out after \d+",
            r"RendezvousTimeoutError",
            r"\bETIMEDOUT\b",
        ),
        role="symptom",
    ),
    Rule(
        "connection-refused",
        "{node} could not connect to another node",
        "a firewall, a wrong interface or a dead peer; homelab preflight dials every pair of nodes and names the one",
        True,
        42,
        _any(
            r"Connection refused",
            r"\bECONNREFUSED\b",
            r"No route to host",
            r"Network is unreachable",
            r"Gloo connectFullMesh failed",
            r"failed to connect to",
            r"\bncclSystemError\b",
            r"Unable to find address for",
            r"No interface found|Bootstrap : no socket interface found",
        ),
        role="symptom",
    ),
    Rule(
        "connection-lost",
        "the connection between the nodes broke",
        "homelab preflight tells whether every pair of nodes can talk; then: " + RECOVER,
        True,
        30,
        _any(
            r"Connection closed by (?:remote )?peer",
            r"Connection reset by (?:remote )?peer",
            r"Broken pipe",
            r"recv(?:eive)?d? SIGTERM",
            r"\bncclRemoteError\b",
            r"remote process exited",
            r"NCCL communicator was aborted",
            r"failed to recv, got 0 bytes",
            r"Signal 15 \(SIGTERM\) received",
            r"Process group (?:has been|was) (?:shut ?down|aborted)",
        ),
        role="victim",
    ),
    Rule(
        "stopped-from-outside",
        "torchrun on {node} was told to stop, and not by homelab",
        "a logout, a shutdown, a service manager or a person ended it ({on_node:journalctl -n 50}); then: "
        + RECOVER,
        True,
        60,
        _any(r"SignalException: Process \d+ got signal: \d+"),
    ),
)
