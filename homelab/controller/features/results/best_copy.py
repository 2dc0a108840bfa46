"""Which node's copy of a run's model is taken: final/ before any checkpoint, then the newest step, then the node with the most free memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.models import Value
from homelab.controller.base.units import listed
from homelab.shared.protocol import layout, result_files
from homelab.shared.protocol.result_messages import Results


class ModelHolder(Value):
    """A node and the folder there that holds the trained model. `step`: of the checkpoint, None for final/; `is_exported`: the folder is there already."""

    node: str
    folder: str
    step: int | None = None
    is_exported: bool = True


def choose(run: str, results: Mapping[str, Results], errors: Mapping[str, HomelabError]) -> ModelHolder:
    """Raises HomelabError where no node that answered holds a finished model or a complete checkpoint (`errors`: nodes that did not answer)."""

    def most_memory(names: list[str]) -> str:
        return max(names, key=lambda name: (results[name].memory_bytes, name))

    finals = [name for name, result in results.items() if result.final]
    if finals:
        return ModelHolder(node=most_memory(finals), folder=layout.FINAL)
    newest = max((step for result in results.values() for step in result.steps), default=None)
    if newest is None:
        raise _nothing(run, results, errors)
    holders = [name for name, result in results.items() if newest in result.steps]
    exported = [name for name in holders if newest in results[name].exported]
    return ModelHolder(node=most_memory(exported or holders), folder=result_files.exported(newest), step=newest, is_exported=bool(exported))


def merged(results: Mapping[str, Results], adapter: str) -> list[str]:
    """The nodes that hold this adapter (a folder) merged, that with the most free memory first."""
    return sorted((name for name, result in results.items() if result.merged == adapter), key=lambda name: -results[name].memory_bytes)


def _nothing(run: str, results: Mapping[str, Results], errors: Mapping[str, HomelabError]) -> HomelabError:
    if not results and errors:
        return next(iter(errors.values()))
    away = f"; {listed(sorted(errors))} did not answer" if errors else ""
    hint = (
        Hint("{}, then {}", homelab("preflight --nodes", ",".join(sorted(errors))), homelab("fetch", run))
        if errors
        else homelab("status", run)
    )
    return HomelabError(
        "there is no finished model and no complete checkpoint yet", where=f"{run}, on {listed(sorted(results))}{away}", hint=hint
    )
