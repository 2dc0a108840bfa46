"""The shared part of the commands that work on a run: their options and their messages to the user."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homelab.cli import common, terminal
from homelab.controller.base.hint import Options, with_options

if TYPE_CHECKING:
    from homelab.cli.clean_console import CleanConsole
    from homelab.controller.base.errors import HomelabError
    from homelab.controller.remote.fanout import Fleet
    from homelab.controller.run.paths import RunPaths


@dataclass
class RunCommand:
    """`--cluster`, `--runs-dir` and `--json` of a command; --json leaves stdout to the JSON document."""

    cluster_file: Path
    runs_dir: Path
    as_json: bool

    @cached_property
    def console(self) -> CleanConsole:
        """For people."""
        from homelab.cli.clean_console import CleanConsole

        return CleanConsole(stderr=self.as_json)

    @property
    def options(self) -> str:
        """What a follow-up command needs to mean the same files, as shell text."""
        return common.same_options(self.cluster_file, self.runs_dir)

    @property
    def command_options(self) -> Options:
        """The same for each command of ours."""
        return common.options_of(self.cluster_file, self.runs_dir)

    def progress(self) -> AbstractContextManager[Callable[[str], None]]:
        """Inside the block `say` tells what is being done."""
        return common.progress(self.as_json)

    def line(self, text: str) -> None:
        """A line as it is, however wide."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def json(self, value: dict[str, Any]) -> None:
        """The JSON document, before anything else is waited for."""
        common.print_json(value)
        sys.stdout.flush()

    def supervised(self, note: str) -> None:
        """Where the run's supervisor is, where that is worth a line."""
        if note:
            self.line(f"  supervisor  {note}")

    def unsupervised(self, error: HomelabError) -> None:
        """The run is under way without its supervisor: a warning on stderr."""
        self._warn(error)

    def tracked(self, tracker: str, error: HomelabError | None) -> None:
        """The run's metrics go to this tracker; or a warning on stderr."""
        if error is None:
            self.line(f"  tracking    {tracker}")
        else:
            self._warn(error)

    def _warn(self, error: HomelabError) -> None:
        hint = with_options(error.hint, self.command_options)
        terminal.three_parts("warning", error.message, error.where, hint)

    def wait(self, fleet: Fleet, paths: RunPaths) -> int:
        """Show the dashboard until the run ends; its exit code."""
        from homelab.controller.base.errors import EXIT_FAILED
        from homelab.controller.features.status import monitor
        from homelab.controller.features.stop import stop

        code = monitor.until_end(fleet, paths, console=self.console, options=self.command_options)
        if code == EXIT_FAILED:
            for name in stop.end_rest(fleet, paths):
                self.line(f"{name}: processes of this run may still be there. When it answers: homelab stop {paths.name}{self.options}")
        return code
