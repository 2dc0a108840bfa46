"""What a rank holds of a card beside torch's tensors: CUDA's context after each phase, and each of NCCL's communicators, with and without limits."""

from __future__ import annotations

import re
from collections.abc import Mapping

from benchmarks.gpu_parts import ranks
from benchmarks.gpu_parts.place import Place

_PEER = ("-m", "benchmarks.gpu_parts.held_peer")
_COMMUNICATORS = 5
_SETTINGS: dict[str, dict[str, str]] = {
    "as it is": {},
    "two channels": {"NCCL_MAX_CTAS": "2"},
    "two channels, 1 MiB": {"NCCL_MAX_CTAS": "2", "NCCL_BUFFSIZE": "1048576"},
}


def measure(place: Place) -> None:
    """Two ranks on one card, each a host of its own for NCCL."""
    for name, variables in _SETTINGS.items() if place.is_card else [("as it is", {})]:
        with place.attempt(name):
            _holds(place, name, variables)


def _holds(place: Place, name: str, variables: Mapping[str, str]) -> None:
    folder = place.folder / name
    started = ranks.group(2, [*_PEER, "nccl" if place.is_card else "gloo", str(_COMMUNICATORS)], folder, variables)
    ranks.checked(started, 40)
    held = [dict(re.findall(r"^held (.+) (\d+)$", rank.words(10**6), re.MULTILINE)) for rank in started]
    phases = {phase: max(int(of[phase]) for of in held) for phase in held[0]}
    place.run(name, variables=dict(variables), held_bytes=held)
    key = re.sub(r"\W+", "_", name)
    if not variables:
        for phase in ("context", "product"):
            place.figure(f"{phase}_bytes", phases[phase])
    counts = sorted(int(phase.split()[1]) for phase in phases if phase.startswith("communicators "))
    place.gate(f"{key}_all_communicators_told", counts == list(range(1, _COMMUNICATORS + 1)))
    for count in counts:
        place.figure(f"{key}_{count}_communicators_bytes", phases[f"communicators {count}"] - phases["product"])
    place.figure(f"{key}_open_receives_cpu_ms_per_s", max(int(of["cpu_ms_of_open_receives"]) for of in held))
    place.figure(f"{key}_product_beside_open_receives_percent", max(int(of["product_beside_open_receives_percent"]) for of in held))
