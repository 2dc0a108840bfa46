"""How a launch is told if no person waits for it: its progress alone, a line each. For who starts one run after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.say import Say
from homelab.controller.config.profile_request import ProfiledSteps
from homelab.controller.features.launch.prepare import Prepared
from homelab.controller.planning.types import Plan
from homelab.controller.run.paths import RunPaths


class QuietView:
    """See `launch_run.LaunchView`: each line goes to `say`."""

    def __init__(self, say: Say) -> None:
        self._say = say

    @contextmanager
    def progress(self) -> Iterator[Say]:
        yield self._say

    def checked(self, prepared: Prepared) -> Prepared:
        return prepared

    def planned(self, plan: Plan) -> None:
        pass

    def started(self, paths: RunPaths, plan: Plan, profiled: ProfiledSteps | None) -> None:
        self._say(f"{paths.name} trains")

    def supervised(self, note: str) -> None:
        pass

    def unsupervised(self, error: HomelabError) -> None:
        self._say(f"without a supervisor: {error.message}")

    def tracked(self, tracker: str, error: HomelabError | None) -> None:
        pass
