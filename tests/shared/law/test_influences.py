"""The list of what may decide a training beside its recipe: every line names a test that is there, and the lines without a test elsewhere have theirs here."""

from __future__ import annotations

import ast
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

import homelab
from homelab.controller.config import environment
from homelab.shared.law.influences import INFLUENCES, of_a_node

ROOT = Path(homelab.__file__).parent
REPOSITORY = ROOT.parent
SHIPPED = [path for room in ("worker", "law") for path in sorted((ROOT / room).rglob("*.py"))]


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]


def named(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


@pytest.mark.parametrize("influence", INFLUENCES, ids=lambda influence: influence.name)
def test_every_line_has_a_test(influence):
    file, _, function = influence.test.partition("::")
    names = {
        node.name for node in ast.walk(ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)
    }

    assert function in names and influence.holds


def test_no_locale_decides_how_data_is_read():
    found = []
    for path in SHIPPED:
        for call in calls(path):
            keywords = {keyword.arg for keyword in call.keywords}
            mode = next((str(argument.value) for argument in call.args if isinstance(argument, ast.Constant)), "r")
            mode = next(
                (
                    str(keyword.value.value)
                    for keyword in call.keywords
                    if keyword.arg == "mode" and isinstance(keyword.value, ast.Constant)
                ),
                mode,
            )
            if named(call) == "setlocale" or (named(call) in ("read_text", "write_text") and "encoding" not in keywords):
                found.append(f"{path.relative_to(ROOT)}:{call.lineno}")
            if (
                named(call) == "open"
                and "b" not in mode
                and "encoding" not in keywords
                and not isinstance(getattr(call.func, "value", None), ast.Name)
            ):
                found.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert found == []


def test_no_listing_of_a_folder_decides_an_order():
    """In what makes rows or a model, a listing is sorted where it is made."""
    listings = ("iterdir", "listdir", "glob", "rglob", "scandir")
    found = []
    for path in (path for path in SHIPPED if path.parent.name in ("data", "model", "law")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        sorted_ones = {
            id(inner)
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and named(call) in ("sorted", "set", "sum", "any")
            for inner in ast.walk(call)
        }
        found += [
            f"{path.name}:{call.lineno}"
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and named(call) in listings and id(call) not in sorted_ones
        ]
    assert found == []


def test_orders_do_not_depend_on_the_hash_seed():
    program = (
        "from homelab.shared.law import order, packing\n"
        "from homelab.worker.data.batches import random_seed\n"
        "print(order.permutation(3, 1, 50), packing.pack([5, 9, 2, 7, 7, 1], 12), random_seed(1, 2, [3, 4]))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            cwd=REPOSITORY,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(said) == 1 and next(iter(said)).strip()


def test_every_stream_is_seeded():
    import numpy
    import torch

    from homelab.worker.model import layer_seeds

    def draw() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(1))

    drawn = []
    for noise in (1, 2):
        random.seed(noise), numpy.random.seed(noise), torch.manual_seed(noise)
        layer_seeds.begin(2**55 + 3)
        drawn.append(draw())
    assert drawn[0] == drawn[1]


def test_a_variable_of_a_node_that_changes_numbers_is_dropped(monkeypatch: pytest.MonkeyPatch):
    from homelab.worker.training import train

    odd = {"NVIDIA_TF32_OVERRIDE": "1", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "ACCELERATE_MIXED_PRECISION": "fp16", "FSDP_VERSION": "2"}
    own = {"OMP_NUM_THREADS": "2", "HF_HOME": "/h", "CUDA_VISIBLE_DEVICES": "0", **odd}

    assert train.without_odd_variables(own) == sorted(odd)
    assert own == {"OMP_NUM_THREADS": "2", "HF_HOME": "/h", "CUDA_VISIBLE_DEVICES": "0"}
    assert of_a_node(own) == []


CHANGE = (
    "NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCH_BLAS_PREFER_CUBLASLT TORCH_LINALG_PREFER_CUSOLVER TORCH_CUDNN_V8_API_DISABLED "
    "TORCH_CUDNN_USE_HEURISTIC_MODE_B TORCHDYNAMO_DISABLE TORCHINDUCTOR_CPP_ENABLE_UNSAFE_MATH_OPT_FLAG TORCH_COMPILE_DISABLE PYTORCH_JIT "
    "PYTORCH_TUNABLEOP_ENABLED PYTORCH_TUNABLEOP_FILENAME TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD CUBLAS_WORKSPACE_CONFIG CUBLAS_EMULATION_STRATEGY "
    "CUBLASLT_WORKSPACE_SIZE DISABLE_ADDMM_CUDA_LT TRITON_F32_DEFAULT TRITON_INTERPRET ONEDNN_DEFAULT_FPMATH_MODE DNNL_MAX_CPU_ISA "
    "TRANSFORMERS_SDPA_FORCE_GQA TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR USE_HUB_KERNELS TRUST_REMOTE_CODE ACCELERATE_MIXED_PRECISION "
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS ACCELERATE_DYNAMO_BACKEND ACCELERATE_DOWNCAST_BF16 FSDP_OFFLOAD_PARAMS PARALLELISM_CONFIG_TP_SIZE "
    "UNSLOTH_RETURN_LOGITS XLA_USE_BF16 PJRT_DEVICE FLASH_ATTENTION_DETERMINISTIC PYTHONHASHSEED PYTHONOPTIMIZE PEFT_OF_NEXT_YEAR BITSANDBYTES_NOWELCOME "
    "TORCH_OF_NEXT_YEAR"
)  # fmt: skip
KEPT = (
    "TORCH_DISABLE_NATIVE_JIT TORCH_HOME TORCH_LOGS TORCH_SHOW_CPP_STACKTRACES TORCH_CPP_LOG_LEVEL TORCH_DISTRIBUTED_DEBUG TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_FR_BUFFER_SIZE "
    "TORCHELASTIC_RUN_ID TORCHINDUCTOR_CACHE_DIR PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES "
    "TRITON_CACHE_DIR TRITON_PTXAS_PATH BNB_CUDA_VERSION TRANSFORMERS_CACHE TRANSFORMERS_OFFLINE TRANSFORMERS_VERBOSITY ACCELERATE_LOG_LEVEL HF_HOME "
    "HF_TOKEN_PATH HF_ENDPOINT HF_HUB_OFFLINE CUDA_HOME CUDA_VISIBLE_DEVICES NCCL_DEBUG OMP_NUM_THREADS TOKENIZERS_PARALLELISM LD_LIBRARY_PATH PATH HOME"
)  # fmt: skip


@pytest.mark.parametrize("name", CHANGE.split())
def test_a_variable_of_these_libraries_is_not_inherited(name: str):
    assert of_a_node([name]) == [name] and environment.refusal_of_the_law(name)


@pytest.mark.parametrize("name", KEPT.split())
def test_places_memory_meeting_and_logs_are_kept(name: str):
    assert of_a_node([name]) == [] and environment.refusal_of_the_law(name) is None


def test_nothing_that_a_plan_sets_is_dropped():
    """What the planner and torchrun give a rank reaches it."""
    words = {
        word
        for path in sorted((ROOT / "controller/planning").rglob("*.py"))
        for word in re.findall(r'"([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)"', path.read_text(encoding="utf-8"))
    }
    assert "NCCL_SOCKET_IFNAME" in words and of_a_node(words) == []
