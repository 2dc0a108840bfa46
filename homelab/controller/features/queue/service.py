"""`homelab queue install`: the unit of a person's own systemd that keeps a runner at work, or a line for cron. Nothing is enabled here."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from homelab.controller.base import shell
from homelab.controller.base.errors import InputError
from homelab.controller.base.hint import Hint
from homelab.controller.run import store
from homelab.shared.protocol import files

NAME = "homelab-queue"


@dataclass(frozen=True)
class Installed:
    """`unit`: the file that was written; None where no systemd is, and `cron` is the line that does the same."""

    unit: Path | None
    cron: str


def command(cluster: Path, runs_dir: Path, supervise: str) -> list[str]:
    """The words of the runner that stays, whatever folder and environment it is started in."""
    of_place = ["--cluster", str(cluster.resolve()), "--runs-dir", str(runs_dir.resolve()), "--supervise", supervise]
    return [sys.executable, "-P", "-m", "homelab", "queue", "run", "--stay", *of_place]


def install(words: list[str]) -> Installed:
    """Write the unit, if this machine has systemd. Raises InputError if there is one for another queue."""
    # A second runner ends at once: the line may come every five minutes, and a runner that has died is back after that.
    cron = f"*/5 * * * * {shell.quote_words(words).replace('%', chr(92) + '%')} >/dev/null 2>&1"
    if sys.platform != "linux" or shutil.which("systemctl") is None or not Path("/run/systemd/system").is_dir():
        return Installed(None, cron)
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"
    file, text = folder / f"{NAME}.service", unit(words)
    if file.exists() and file.read_text(encoding="utf-8", errors="replace") != text:
        away = shell.quote_words([str(file)])
        raise InputError(
            "this unit is there already, and is for another queue or was edited", where=str(file),
            hint=Hint("to write it anew: {}, then the same command again", f"systemctl --user disable --now {NAME}; rm {away}"),
        )  # fmt: skip
    with store.disk_errors_as_hints(file):
        files.write_atomic(file, text.encode())
    return Installed(file, cron)


def unit(words: list[str]) -> str:
    """The unit's text (systemd.service(5)). Only the runner itself is ended with it: supervisors of its runs go on."""
    return f"""[Unit]
Description=homelab queue: trains the recipes that wait

[Service]
ExecStart={" ".join(map(_quoted, words))}
Restart=on-failure
RestartSec=60
KillMode=process

[Install]
WantedBy=default.target
"""


def _quoted(word: str) -> str:
    """One word of a command as systemd reads it (systemd.syntax(7)); % and $ would be replaced."""
    text = word.replace("%", "%%").replace("$", "$$")
    if re.fullmatch(r"[\w%$@:,./=+-]+", text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
