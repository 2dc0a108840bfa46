"""Environment variables that a person gives the ranks: of one node in cluster.toml, of a whole run in its recipe. Pure.

They are words for a program, never for a shell. Some names are refused, because with them the ranks would not meet, would not be ended
when a peer is gone, or would compute something else than the recipe says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from homelab.controller.base import secrets
from homelab.controller.config import typed_secrets
from homelab.shared.law import influences

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Names, and why they cannot be set. torchrun takes each of its options from PET_... too (torch/distributed/run.py, argparse_util.py).
_TAKEN = (
    (
        r"RANK|LOCAL_RANK|NODE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|(?:GROUP|ROLE)_\w+|MASTER_(?:ADDR|PORT)|(?:TORCHELASTIC|PET)_\w+|NCCL_COMM_ID",
        "it tells a process its rank and the address of the head: the plan decides that",
    ),
    (
        r"(?:CUDA|HIP|ROCR|NVIDIA)_VISIBLE_DEVICES|CUDA_DEVICE_ORDER",
        "it chooses the cards: use `gpus` of the node in cluster.toml for that, with fewer cards than there are, or with the `uuid` of a card",
    ),
    (
        r"(?:NCCL|GLOO|TP)_SOCKET_IFNAME|NCCL_SOCKET_FAMILY",
        "it chooses the network of the ranks: use `interface` and `lan_address` of the node in cluster.toml for that",
    ),
    (
        r"TORCH_NCCL_\w+|TORCH_FR_\w+|NCCL_(?:ASYNC_ERROR_HANDLING|BLOCKING_WAIT|DESYNC_DEBUG|ENABLE_TIMING|DEBUG_FILE)",
        "it decides how ranks end when another rank is gone, and what they log: the supervisor depends on that",
    ),
    (r"HOMELAB_\w+", "homelab sets it itself for its workers"),
    (
        r"PYTHON(?:PATH|HOME|UNBUFFERED|STARTUP|SAFEPATH)|HOME",
        "homelab finds its own code on the node, `python` and `workdir` by it",
    ),
)  # fmt: skip
# On one node alone it would be another training there; of the built-in worker [train] says it.
_OF_THE_LAW = (
    influences.CHANGES_NUMBERS,
    "it changes what is computed, and a recipe alone decides the training: [train] has precision, seed and optimizer",
)
# Each NCCL rank reads these for itself: where they differ the ranks wait for each other, or fail (NCCL guide, environment variables).
EQUAL_ON_ALL_NODES = (
    "NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_BUFFSIZE",
    "NCCL_LL_BUFFSIZE", "NCCL_LL128_BUFFSIZE", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_CROSS_NIC", "NCCL_COLLNET_ENABLE",
)  # fmt: skip


def refusal(name: str) -> str | None:
    """Why nobody may set this variable; None where a recipe may. `refusal_of_the_law` has those that only a [script] may have."""
    if not _NAME.fullmatch(name):
        return "a variable's name has letters of the alphabet, digits and '_', and does not begin with a digit"
    if secrets.names_a_secret(name):
        return f"a secret must not be in a file that is stored with each run: {typed_secrets.HELP}"
    return next((why for names, why in _TAKEN if re.fullmatch(names, name)), None)


def refusal_of_the_law(name: str) -> str | None:
    """Why this variable would change the training; None where it would not."""
    names, why = _OF_THE_LAW
    return why if re.fullmatch(names, name) else None


def _checked(name: str, why: str | None) -> str:
    if why is not None:
        raise PydanticCustomError("variable", "{said}", {"said": f"{name} cannot be set here: {why}"})
    return name


def _value(value: str) -> str:
    if not value.isprintable():
        raise ValueError("one line of printable characters")
    if secrets.without_login(value) != value:
        message = "an address with a login must not be in a file that is stored with each run: put this variable into /etc/environment of the node"
        raise PydanticCustomError("variable", "{said}", {"said": message})  # the value is shown nowhere
    return value


Value = Annotated[str, AfterValidator(_value)]
NodeEnvironment = dict[Annotated[str, AfterValidator(lambda name: _checked(name, refusal(name) or refusal_of_the_law(name)))], Value]
RecipeEnvironment = dict[Annotated[str, AfterValidator(lambda name: _checked(name, refusal(name)))], Value]


def differing(tables: Mapping[str, Mapping[str, str]]) -> tuple[str, str, str] | None:
    """(variable, one node, another) of what NCCL wants equal on all ranks and is not; None when nothing is. `tables`: by node."""
    for variable in EQUAL_ON_ALL_NODES:
        first = next(iter(tables), "")
        for node, table in tables.items():
            if table.get(variable) != tables[first].get(variable):
                return variable, first, node
    return None
