"""Nodes that were left out after a failure: are they well again? Asked in the background, so that the supervisor does not wait for a dead node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from homelab.controller.base import redact
from homelab.controller.base.errors import HomelabError, UnreachableError
from homelab.controller.base.sanitize import plain_lines
from homelab.controller.checks import registry
from homelab.controller.features.preflight import gather
from homelab.controller.features.supervise.recovery_try import Supervised
from homelab.controller.planning.machines import standbys
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import event_log
from homelab.controller.run.events import note
from homelab.shared.protocol.request import RunRequest

_EVERY_S, _LOOK_S = 5.0, 1.0
PREPARE_S = 90.0  # imports from a slow disk; a run without this node goes on meanwhile


class RejoinMonitor:
    """A context manager. `well` holds those of `names` that answered, passed their own preflight, reach the `others` both ways, and are prepared as far as
    they can be. One that `is_away` with its owner is not asked."""

    def __init__(
        self, run: Supervised, names: Collection[str], others: Collection[str], is_away: Callable[[str], bool] = lambda name: False
    ) -> None:
        self._run, self._others, self._is_away = run, tuple(others), is_away
        self._well: set[str] = set()
        self._told: set[str] = set()
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(name,), daemon=True, name=f"return of {name}") for name in names]

    def __enter__(self) -> RejoinMonitor:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    @property
    def well(self) -> frozenset[str]:
        """Their names."""
        return frozenset(self._well)

    def _ask(self, name: str) -> None:
        while not self._ended.wait(_EVERY_S):
            if self._is_away(name):  # whoever plays a game there is not disturbed
                self._well.discard(name)
                continue
            try:
                # The others train: they are asked for dials only when the node itself is well, and only once.
                is_well = self._is_well((name,)) and (name in self._well or self._is_well((*self._others, name)))
                is_well = is_well and self._prepare((name,) if name in self._well else (*self._others, name))
            except HomelabError:
                is_well = False
            except Exception as error:  # noqa: BLE001 - no processes or no disk on this machine for a while, too: it is asked again
                is_well = False
                words = redact.text(plain_lines(f"{name} could not be asked whether it is well again: {error!r}"))[:300]
                if words not in self._told:
                    self._told.add(words)
                    event_log.append(self._run.paths, note(words))
            (self._well.add if is_well else self._well.discard)(name)

    def _is_well(self, names: tuple[str, ...]) -> bool:
        with Fleet(self._run.cluster.only(names)) as fleet:
            evidence = gather.evidence(fleet, recipe=self._run.recipe, material=self._run.items, port=0, measure_wire=False)
        findings = registry.judge_all(evidence, self._run.skip)
        # Of several nodes only what is between them counts: the others are busy, and hold what they hold.
        counts = [finding for finding in findings if len(names) == 1 or finding.check == "network.reach"]
        return set(evidence.facts) == set(names) and not any(finding.keeps_out for finding in counts)

    def _prepare(self, names: tuple[str, ...]) -> bool:
        """Let all of them do the imports of the next attempt before this one ends for it; whether the last one, which comes back, still answers.

        A node that cannot begins slower, that is all.
        """
        if not standbys.prepares(self._run.recipe):
            return True
        deadline = time.monotonic() + PREPARE_S
        with Fleet(self._run.cluster.only(names)) as fleet:
            while not self._is_away(names[-1]):
                answers, errors = fleet.ask("prepare", RunRequest(run=self._run.paths.name), names=names)
                if isinstance(errors.get(names[-1]), UnreachableError):
                    return False
                is_begun = any(answer["state"] == "begun" for answer in answers.values())
                if not is_begun or time.monotonic() > deadline or self._ended.wait(_LOOK_S):
                    return True
        return False
