"""The messages of the node program about its machine, and of the runs on it."""

from __future__ import annotations

from typing import Any, TypedDict

Json = dict[str, Any]


class Facts(TypedDict, total=False):
    """The answer of `facts`: one key for each probe of `homelab.node.facts`. `broken`: probe -> its error; its key is missing then."""

    node: str
    broken: dict[str, str]
    system: Json
    resources: Json
    python: Json
    gpu: Json
    amd: list[Json]
    xid: list[Json] | None
    network: Json
    model: Json | None
    speed_profiles: Json | None
    data: dict[str, Json]
    power: Json
    runs: Json
    collective_check: Json | None


class RunRecovered(TypedDict):
    """A run between two attempts, in the answer of `facts`: who its supervisor is, as it says itself."""

    by: str
    process: dict[str, Json]


class RunAtWork(TypedDict):
    """A run that is alive, in the answer of `facts`: how far it is, since when no rank here has spoken, and who looks after it ("" for nobody)."""

    has_ended: bool
    phase: str
    step: int | None
    total_steps: int | None
    step_s: float | None
    still_s: float | None
    owner: str
