"""Everything that may decide a training beside its recipe, and what holds each. `homelab explain law` prints it; each line has a test."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# Families of variables that torch, its mathematics libraries, transformers, accelerate, Unsloth or Python itself read. New ones appear with every
# release, so a whole family counts as changing what is computed: refused in files, and taken from what a node sets by itself.
_FAMILIES = (
    r"PYTHON(?:HASHSEED|OPTIMIZE)", r"(?:PY)?TORCH\w+", r"(?:CUBLAS|CUDNN|CUTLASS|NVIDIA|TRITON|MIOPEN|ROCBLAS|HIPBLAS|DNNL|ONEDNN|XLA|PJRT|BNB|FLASH_ATTENTION)\w+",
    r"DISABLE_ADDMM_\w+", r"(?:ACCELERATE|FSDP|PARALLELISM_CONFIG|TRANSFORMERS|UNSLOTH|PEFT|TRL|BITSANDBYTES|LIGER)_\w+", r"USE_(?:HUB_KERNELS|TORCH_XLA)", r"TRUST_REMOTE_CODE",
)  # fmt: skip
# Of these families, what says where files lie, how memory is held, how ranks meet and what is written down: a rank keeps what its node says.
# TORCH_DISABLE_NATIVE_JIT chooses between two kernels of one product a number, whose bits are the same (controller/planning/environment/cuda.py sets it).
_KEPT = (
    r"TORCH_(?:DISABLE_NATIVE_JIT|HOME|EXTENSIONS_DIR|CUDA_ARCH_LIST|TRACE|DEVICE_BACKEND_AUTOLOAD)",
    r"TORCH_(?:LOGS|SHOW|CPP|SYMBOLIZE|DISABLE_ADDR2LINE|ADDR2LINE|WARN|DISTRIBUTED|NCCL|FR|GLOO)\w*",
    r"TORCHELASTIC_\w+", r"TORCHINDUCTOR_CACHE_DIR", r"PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF", r"PYTORCH_(?:NO_CUDA_MEMORY_CACHING|NVML_BASED_CUDA_CHECK|KERNEL_CACHE_PATH)",
    r"(?:CUBLAS|CUBLASLT|CUDNN)_?LOG\w+", r"NVIDIA_(?:VISIBLE_DEVICES|DRIVER_CAPABILITIES|REQUIRE_\w+|PRODUCT_NAME)", r"TRITON_(?:HOME|\w*_DIR|\w+_PATH)",
    r"(?:DNNL|ONEDNN)_VERBOSE\w*", r"BNB_(?:CUDA|ROCM)_VERSION",
    r"TRANSFORMERS_(?:CACHE|OFFLINE|VERBOSITY|NO_ADVISORY_WARNINGS)", r"ACCELERATE_LOG_LEVEL",
)  # fmt: skip
CHANGES_NUMBERS = re.compile(f"(?!(?:{'|'.join(_KEPT)})$)(?:{'|'.join(_FAMILIES)})")


@dataclass(frozen=True)
class Influence:
    """One thing that may decide a training. `holds`: what keeps it the same on every node and in every attempt; `test`: file::function."""

    name: str
    holds: str
    test: str


INFLUENCES = (
    Influence(
        "clock and time zone", "a chat template is told the moment of the launch by UTC (moment in run.json); nothing else of the data reads a clock",
        "tests/worker/data/test_template_clock.py::test_rows_do_not_depend_on_the_node_or_the_day",
    ),
    Influence(
        "chance in a chat template", "Jinja's random and lipsum begin anew with every text",
        "tests/worker/data/test_template_clock.py::test_rows_do_not_depend_on_the_node_or_the_day",
    ),
    Influence(
        "overflow in fp16", "the gradient of the whole batch decides which steps are skipped, not that of a pass, a rank, a stage or a shard",
        "tests/worker/training/test_fp16.py::test_the_training_is_that_of_one_process",
    ),
    Influence(
        "locale", "the worker never sets one, and every file is read and written as UTF-8", "tests/shared/law/test_influences.py::test_no_locale_decides_how_data_is_read",
    ),
    Influence(
        "environment of a node",
        "of torch, transformers, accelerate, Unsloth and their libraries a rank keeps only the variables of places, memory and logs; "
        "any other is refused in cluster.toml and recipes, and dropped with a note if a node sets it",
        "tests/shared/law/test_influences.py::test_a_variable_of_a_node_that_changes_numbers_is_dropped",
    ),
    Influence(
        "hash seed of Python", "orders and seeds come from sha256 and numbered streams, never from hash() or a set",
        "tests/shared/law/test_influences.py::test_orders_do_not_depend_on_the_hash_seed",
    ),
    Influence(
        "order of files in a folder", "data is one file or one data set, named by its content; a listing of a model's files is sorted",
        "tests/shared/law/test_influences.py::test_no_listing_of_a_folder_decides_an_order",
    ),
    Influence(
        "library versions", "preflight compares Python and packages of the nodes, and the ranks compare their rows to the last token before the first step",
        "tests/worker/data/test_template_clock.py::test_a_transformers_with_another_clock_is_refused",
    ),
    Influence(
        "state of random generators", "every micro-batch is seeded by the seed, the step and its rows (torch, numpy, Python)",
        "tests/shared/law/test_influences.py::test_every_stream_is_seeded",
    ),
    Influence(
        "dropout and noise in the model's config.json", "off, unless [method] model_dropout keeps them: a law: line says it",
        "tests/worker/model/test_model_dropout.py::test_every_source_is_off_and_named",
    ),
    Influence(
        "which layers a process holds, or computes again", "each layer begins its own random numbers, by the seed of the micro-batch and its number in the model",
        "tests/worker/strategies/pipeline/test_dropout.py::test_the_masks_are_those_of_one_process",
    ),
    Influence(
        "start of the adapters", "drawn from [train] seed and the name of each", "tests/worker/model/test_adapters.py::test_every_adapter_starts_from_the_seed_alone",
    ),
    Influence(
        "what the base gives to answers", "computed once before the first step, and kept beside the run on every node",
        "tests/worker/training/test_preferences.py::test_a_run_goes_on_elsewhere_with_the_reference_it_began_with",
    ),
    Influence(
        "the other answer that a labelled one is compared with", "drawn once by [train] seed; the mean over the global batch is gathered before its passes",
        "tests/worker/training/test_preferences.py::test_a_baseline_of_one_rank_is_seen",
    ),
    Influence(
        "weights that a text gives no gradient", "frozen on every rank, and named in a note",
        "tests/worker/model/test_adapters.py::test_what_gets_no_gradient_is_frozen_and_named",
    ),
    Influence(
        "number of threads, kind of card, order of sums", "not held: losses differ in the last digits (homelab explain evidence); a law: line says if it is more",
        "tests/controller/planning/strategy/test_law_warnings.py::test_eight_bit_states_are_said",
    ),
)  # fmt: skip


def of_a_node(variables: Iterable[str]) -> list[str]:
    """Those of these variables that change what is computed."""
    return sorted(name for name in variables if CHANGES_NUMBERS.fullmatch(name))
