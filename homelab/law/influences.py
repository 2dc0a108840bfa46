"""Everything that may decide a training beside its recipe, and what holds each. `homelab explain law` prints it; each line has a test."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# Variables that change what torch, accelerate, Unsloth or Python itself compute: refused in files, and taken from what a node sets by itself.
CHANGES_NUMBERS = re.compile(
    r"PYTHON(?:HASHSEED|OPTIMIZE)|ACCELERATE_\w+|FSDP_\w+|UNSLOTH_\w+|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
)


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
        "locale", "the worker never sets one, and every file is read and written as UTF-8", "tests/law/test_influences.py::test_no_locale_decides_how_data_is_read",
    ),
    Influence(
        "environment of a node", "what changes numbers is refused in cluster.toml and recipes, and the worker drops what a node sets by itself, with a note",
        "tests/law/test_influences.py::test_a_variable_of_a_node_that_changes_numbers_is_dropped",
    ),
    Influence(
        "hash seed of Python", "orders and seeds come from sha256 and numbered streams, never from hash() or a set",
        "tests/law/test_influences.py::test_orders_do_not_depend_on_the_hash_seed",
    ),
    Influence(
        "order of files in a folder", "data is one file or one data set, named by its content; a listing of a model's files is sorted",
        "tests/law/test_influences.py::test_no_listing_of_a_folder_decides_an_order",
    ),
    Influence(
        "library versions", "preflight compares Python and packages of the nodes, and the ranks compare their rows to the last token before the first step",
        "tests/worker/data/test_template_clock.py::test_a_transformers_with_another_clock_is_refused",
    ),
    Influence(
        "state of random generators", "every micro-batch is seeded by the seed, the step and its rows (torch, numpy, Python)",
        "tests/law/test_influences.py::test_every_stream_is_seeded",
    ),
    Influence(
        "dropout and noise in the model's config.json", "off, unless [method] model_dropout keeps them: a law: line says it; a pipeline refuses them",
        "tests/worker/model/test_model_dropout.py::test_every_source_is_off_and_named",
    ),
    Influence(
        "start of the adapters", "drawn from [train] seed and the name of each", "tests/worker/model/test_adapters.py::test_every_adapter_starts_from_the_seed_alone",
    ),
    Influence(
        "weights that a text gives no gradient", "frozen on every rank, and named in a note",
        "tests/worker/model/test_adapters.py::test_what_gets_no_gradient_is_frozen_and_named",
    ),
    Influence(
        "number of threads, kind of card, order of sums", "not held: losses differ in the last digits (README, the law); a law: line says where it is more",
        "tests/planning/strategy/test_law_warnings.py::test_eight_bit_states_are_said",
    ),
)  # fmt: skip


def of_a_node(variables: Iterable[str]) -> list[str]:
    """Those of these variables that change what is computed."""
    return sorted(name for name in variables if CHANGES_NUMBERS.fullmatch(name))
