"""Telling the owner of a run, or of the queue, what became of it: by a command of theirs, or by apprise. Nothing here can disturb the run."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

from homelab.controller.base import package, redact
from homelab.controller.base.sanitize import plain_lines
from homelab.controller.base.say import Say
from homelab.controller.config.cluster import Notify, Occasion
from homelab.controller.run import event_log
from homelab.controller.run.events import event
from homelab.controller.run.paths import RunPaths

LIMIT_S = 30.0


class Notifier:
    """Of `subject`, with which the title begins, and of its run if it has one. `say` hears once what a way of telling refuses."""

    def __init__(self, notify: Notify, subject: str, say: Say, run: str = "") -> None:
        self._notify, self._subject, self._say, self._run = notify, subject, say, run
        self._told: set[str] = set()
        self._threads: list[threading.Thread] = []

    def tell(self, occasion: Occasion, text: str) -> None:
        """In a thread: the supervisor goes on at once."""
        if occasion not in self._notify.on or not (self._notify.command or self._notify.apprise):
            return
        thread = threading.Thread(target=self._tell, args=(occasion, text), daemon=True, name="notify")
        thread.start()
        self._threads.append(thread)

    def close(self) -> None:
        """Wait for what is under way, within its time limit."""
        for thread in self._threads:
            thread.join(LIMIT_S + 5)

    def _tell(self, occasion: Occasion, text: str) -> None:
        title, text = " ".join(filter(None, ["homelab:", self._subject, occasion])), redact.text(text)  # it leaves this machine
        problems = []
        try:
            if self._notify.command:
                problems.append(by_command(self._notify.command, title, text, {"HOMELAB_RUN": self._run, "HOMELAB_OCCASION": occasion}))
            if self._notify.apprise:
                problems.append(by_apprise(self._notify.apprise, title, text))
        except Exception as error:  # noqa: BLE001 - a plugin's own mistake is told as every other refusal
            problems.append(f"[notify] failed: {redact.text(plain_lines(f'{type(error).__name__}: {error}'))[:300]}")
        for problem in problems:
            if problem and problem not in self._told:
                self._told.add(problem)
                self._say(problem)


def of_run(notify: Notify, paths: RunPaths, say: Say) -> Notifier:
    """The notifier of a run. What a way of telling refuses is among the run's events, too."""

    def refused(problem: str) -> None:
        say(problem)
        event_log.append(paths, event("note", text=f"{problem} (the run is not touched)"))

    return Notifier(notify, paths.name, refused, paths.name)


def by_command(command: str, title: str, text: str, variables: dict[str, str]) -> str:
    """Give the words to a shell command on its standard input, the title first; "" or what went wrong. It has `LIMIT_S` seconds."""
    child = subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **variables},
        start_new_session=True,
    )  # fmt: skip
    try:
        said = child.communicate(f"{title}\n{text}\n".encode(), timeout=LIMIT_S)[1]
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return f"[notify] command did not end within {LIMIT_S:.0f} s"
    if child.returncode == 0:
        return ""
    last = (plain_lines(said.decode("utf-8", "replace")).splitlines() or [f"exit code {child.returncode}"])[-1]
    return f"[notify] command failed: {redact.text(last)[:300]}"


def by_apprise(file: str, title: str, text: str) -> str:
    """By the services that this configuration file of apprise names; "" or what went wrong."""
    try:
        import apprise
    except ImportError:
        return f"[notify] apprise: the package is not installed on this machine; install it: {package.install('apprise')}"
    path = Path(os.path.expanduser(file))
    if not path.is_file():
        return f"[notify] apprise: there is no file {path}"
    services, config = apprise.Apprise(), apprise.AppriseConfig()
    config.add(str(path))
    services.add(config)
    if not len(services):
        return f"[notify] apprise: {path} names no known service"
    return "" if services.notify(title=title, body=text) else f"[notify] apprise: a service of {path} refused the message"
