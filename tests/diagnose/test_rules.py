# ruff: noqa: E501  (words of others are kept on one line)
"""Each rule against words that were really printed, and the rules as data."""

from __future__ import annotations

import math
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homelab.diagnose import endings
from homelab.diagnose.rules import RULES, Rule
from homelab.diagnose.suspects import best_rule
from homelab.diagnose.traces import child_failures, last_exceptions
from homelab.worker.errors import first_words

# CUDA and NCCL: as reported to pytorch/pytorch, hiyouga/LlamaFactory, Comfy-Org/ComfyUI and vllm-project/vllm, shortened.
LINES = [
    ("cuda-out-of-memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of 7.65 GiB of which 11.06 MiB is free."),
    ("cuda-out-of-memory", "RuntimeError: CUDA out of memory. Tried to allocate 2.87 GiB (GPU 0; 14.76 GiB total capacity)"),
    ("cuda-out-of-memory", "RuntimeError: CUDA error: out of memory"),
    ("cuda-out-of-memory", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    # bitsandbytes csrc/ops.cuh, CUDA_CHECK_RETURN: printed, then exit(1); issue bitsandbytes 959
    ("cuda-out-of-memory", "Error out of memory at line 380 in file /mmfs1/gscratch/zlab/timdettmers/git/bitsandbytes/csrc/pythonInterface.c"),
    ("cuda-out-of-memory", "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"),
    ("no-kernel-image", "RuntimeError: CUDA error: no kernel image is available for execution on the device"),
    ("no-kernel-image", "NVIDIA GeForce RTX 5070 Ti with CUDA capability sm_120 is not compatible with the current PyTorch installation."),
    ("cuda-driver", "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."),
    ("cuda-driver", "RuntimeError: Found no NVIDIA driver on your system."),
    ("cuda-driver", "AssertionError: Torch not compiled with CUDA enabled"),
    ("gpu-lost", "RuntimeError: CUDA error: unspecified launch failure"),
    ("gpu-lost", "Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost."),
    ("gpu-lost", "enqueue.cc:1556 NCCL WARN Cuda failure 700 'an illegal memory access was encountered'"),
    ("cuda-assert", "RuntimeError: CUDA error: device-side assert triggered"),
    # NCCL src/init.cc (initTransportsRank)
    ("nccl-version", "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.29.7\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nMismatched NCCL version detected : rank 0 version 22903 rank 1 version 22907"),
    # printed on an H100: two ranks on one card; a peer that is killed, and one that is frozen, as the watchdog ends the others
    ("duplicate-gpu", "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 60"),
    ("connection-lost", "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: NCCL error: remote process exited or there was a network error, NCCL version 2.28.9\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer localhost<53046>"),
    ("timeout", "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=23, OpType=ALLREDUCE, NumelIn=1048576, NumelOut=1048576, Timeout(ms)=20000) ran for 20015 milliseconds before timing out."),
    ("peer-access", "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3699, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 217 'peer access is not supported between these two devices'"),
    ("peer-access", "z-pc:909608:910337 [0] transport/p2p.cc:238 NCCL WARN failed to open CUDA IPC handle : 217 peer access is not supported between these two devices"),
    # accelerate/state.py, where accelerate.utils.environment.check_cuda_p2p_ib_support says no
    ("peer-access-refused", "NotImplementedError: Using RTX 4000 series doesn't support faster communication broadband via P2P or IB. Please set `NCCL_P2P_DISABLE=\"1\"` and `NCCL_IB_DISABLE=\"1\" or use `accelerate launch` which will do this automatically."),
    ("nccl-cuda", "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 1 'invalid argument'"),
    ("nccl-cuda", "misc/strongstream.cc:424 NCCL WARN Cuda failure 'operation not permitted'"),
    ("cuda-driver", "include/alloc.h:228 NCCL WARN Cuda failure 35 'CUDA driver version is insufficient for CUDA runtime version'"),
    ("oom-killer", "Out of memory: Killed process 4242 (pt_main_thread) total-vm:41943040kB"),
    ("host-out-of-memory", "OSError: [Errno 12] Cannot allocate memory"),
    ("host-out-of-memory", "terminate called after throwing an instance of 'std::bad_alloc'"),
    ("shared-memory", "RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. unable to write to file </torch_77_1_0>"),
    ("shared-memory", "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm)."),
    # NCCL src/misc/shmutils.cc (ncclShmOpen), as torch hands it on (NCCLUtils.cpp); without the reason before NCCL 2.19
    ("shared-memory", "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \nLast error:\nError while creating shared memory segment /dev/shm/nccl-cjY8K5 (size 10617216), error: No space left on device (28)"),
    ("shared-memory", "misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-UbzKZ9 to 9637892 bytes"),
    ("disk-full", "OSError: [Errno 28] No space left on device: '/home/me/homelab/runs/x/checkpoints'"),
    ("disk-full", "OSError: [Errno 122] Disk quota exceeded"),
    ("permission", "PermissionError: [Errno 13] Permission denied: '/data/train.jsonl'"),
    ("missing-file", "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.jsonl'"),
    ("missing-package", "ModuleNotFoundError: No module named 'bitsandbytes'"),
    ("missing-package", "/usr/bin/python3: No module named torch"),
    ("missing-package", "RuntimeError: Failed to import transformers.trainer because of the following error (look up to see its traceback):\nNo module named 'accelerate'"),
    ("import-error", "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory"),
    ("import-error", "ImportError: cannot import name 'LlamaForCausalLM' from 'transformers'"),
    ("port-in-use", "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"),
    ("port-in-use", "RuntimeError: The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use)."),
    ("nan-loss", "TrainingError: the loss is not a number at step 12"),
    ("nan-loss", "ValueError: loss became nan"),
    ("checkpoint-set-aside", "optimizer.pt of the checkpoint cannot be loaded: Weights only load failed. (the checkpoint of step 40 on node1, whole by its manifest); it was set aside"),
    ("timeout", "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600060 milliseconds before timing out."),
    ("timeout", "RuntimeError: [/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete"),
    ("timeout", "torch.distributed.DistStoreError: wait timeout after 6000ms, keys: /default_pg/0//cpu//0/2"),
    ("timeout", "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (192.168.1.100, 29500)."),
    ("connection-refused", "RuntimeError: [/gloo/transport/tcp/pair.cc] connect [127.0.1.1]:1234: Connection refused"),
    ("connection-refused", "RuntimeError: Gloo connectFullMesh failed with [/gloo/transport/tcp/pair.cc:144] no error"),
    ("connection-refused", "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."),
    ("connection-lost", "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9128."),
    ("connection-lost", "RuntimeError: [/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:48819: Connection reset by peer."),
    ("connection-lost", "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."),
    ("connection-lost", "BrokenPipeError: [Errno 32] Broken pipe"),
    ("stopped-from-outside", "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7269 got signal: 15"),
]  # fmt: skip

ENDINGS = [value for value in vars(endings).values() if isinstance(value, Rule)]
FILLED = dict.fromkeys(("node", "on_node", "rank", "run", "where", "message", "code", "signal", "recover", "logs", "status", "launch"), "x")


@pytest.mark.parametrize(("cause", "line"), LINES)
def test_the_words_of_a_cause(cause: str, line: str) -> None:
    found = best_rule(line)
    assert found is not None and found[0].id == cause


@pytest.mark.parametrize(("cause", "line"), [(cause, line) for cause, line in LINES if "DistBackendError" in line])
def test_the_words_of_a_cause_in_a_worker_s_own_account(cause: str, line: str) -> None:
    """error.json has one line, and NCCL's reason comes behind torch's first one; then comes a stack."""
    kind = type("DistBackendError", (RuntimeError,), {})
    found = best_rule(first_words(kind(line.partition(": ")[2] + "\nException raised from x at y.cpp:1\nframe #0: <unknown>")))
    assert found is not None and found[0].id == cause
    assert first_words(kind("plain\nstack")) == "DistBackendError: plain" and first_words(kind("")) == "DistBackendError: "


def test_every_rule_is_tried_here() -> None:
    assert {rule.id for rule in RULES} == {cause for cause, _ in LINES}


@pytest.mark.parametrize(
    "line",
    [
        "{'loss': 1.204, 'grad_norm': 0.41, 'learning_rate': 0.0002, 'epoch': 0.31}",
        "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.",
        "[rank0]:[W1121 03:13:01 ProcessGroupNCCL.cpp:1250] Warning: process group has NOT been destroyed",
        "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default",
        "connection timeout is set to 120 s",
        "step 28 of 1000, nan_count 0",
        "KeyError: 'completion'",
        # bitsandbytes 0.49, at the first 4-bit layer on a CPU: it goes on without the package
        "Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'. Please make sure you already `pip install kernels`",
    ],
)
def test_ordinary_lines_mean_nothing(line: str) -> None:
    assert best_rule(line) is None


def test_ids_are_unique() -> None:
    ids = [rule.id for rule in (*RULES, *ENDINGS)]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("rule", [*RULES, *ENDINGS], ids=lambda rule: rule.id)
def test_titles_and_hints_name_only_what_is_known(rule: Rule) -> None:
    of_script = ("module", "local") if rule.id == "not-shipped" else ()
    known = FILLED | dict.fromkeys((*rule.pattern.groupindex, "port", "way", "who", "target", *of_script), "x")
    for template in (rule.title, rule.hint):
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name}
        assert names <= set(known)
    assert "ssh" not in rule.hint.replace("ssh-", ""), "{on_node:COMMAND} knows the port, the key and the known hosts"
    assert rule.hint.strip() and rule.title.strip()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_victims_and_symptoms_are_less_specific_than_any_cause(rule: Rule) -> None:
    assert (rule.specificity >= 50) == (rule.role == "cause")


PIECES = st.sampled_from(
    ["Traceback (most recent call last):", '  File "a.py", line 3, in f', "    x()", "KeyError: 'x'", "", "MemoryError",
     "During handling of the above exception, another exception occurred:", "Root Cause (first observed failure):",
     "[0]:", "  rank      : 1 (local_rank: 0)", "  exitcode  : -9 (pid: 1)", "  time      : tomorrow", "-" * 60,
     "  traceback : Signal 9", "[rank0]: ValueError: a", "torch.distributed.elastic.x.ChildFailedError: "]
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(PIECES, st.text(max_size=40)), max_size=40))
def test_no_log_can_make_the_readers_fail(lines: list[str]) -> None:
    for failure in child_failures(lines, 1e9):
        assert (failure.exit_code is None) != (failure.signal is None)
        assert failure.time_s is None or math.isfinite(failure.time_s)
    for raised in last_exceptions(lines):
        assert raised.text
