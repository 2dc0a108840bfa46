"""Upgrades of a running machine: a pending restart, and unattended upgrades (Debian, Ubuntu)."""

from __future__ import annotations

import getpass
import glob
import os
import re
from typing import TYPE_CHECKING

from homelab.shared.protocol import files

if TYPE_CHECKING:
    from collections.abc import Iterable

    from homelab.shared.protocol.files import JsonObject

# An upgrade of these packages replaces the libraries on disk, and the driver in the kernel does not match them any more.
_DRIVER = re.compile(r"nvidia-(?:driver|dkms|kernel)-|libnvidia-compute-|linux-modules-nvidia-")
_TOKENS = re.compile(r'//[^\n]*|#[^\n]*|/\*.*?\*/|"([^"]*)"|([{};])|([^\s{};"]+)', re.DOTALL)


def user_name() -> str:
    """The name of this user in /etc/passwd."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())


def reboot_required(root: str = "") -> list[str] | None:
    """The packages that need a restart (an empty list when they are not named); None when no restart is pending."""
    for folder in ("/run", "/var/run"):
        if os.path.exists(root + folder + "/reboot-required"):
            names = files.text(root + folder + "/reboot-required.pkgs").split()
            return list(dict.fromkeys(names))[:50]
    return None


def unattended(root: str = "") -> JsonObject | None:
    """Whether unattended upgrades restart the machine, and which of NVIDIA's packages they may replace; None without
    unattended upgrades."""
    if not os.path.exists(root + "/usr/bin/unattended-upgrade"):
        return None
    paths = sorted(glob.glob(glob.escape(root) + "/etc/apt/apt.conf.d/*"))
    options = apt_options(files.text(path) for path in paths if _is_read(path))
    if last(options, "apt::periodic::unattended-upgrade", "0") in ("0", ""):
        return None
    blacklist = options.get("unattended-upgrade::package-blacklist", [])
    return {
        "reboots": last(options, "unattended-upgrade::automatic-reboot", "false").lower() in ("true", "yes", "on", "1", "enable", "with"),
        "reboot_time": last(options, "unattended-upgrade::automatic-reboot-time", "now"),
        "driver_packages": [name for name in _driver_packages(root) if not any(_matches(entry, name) for entry in blacklist)],
    }


def _is_read(path: str) -> bool:
    """apt reads names of letters, digits, - _ . that end in .conf or have no ending (apt.conf(5))."""
    name = os.path.basename(path)
    return re.fullmatch(r"[\w.-]+", name) is not None and (name.endswith(".conf") or "." not in name)


def apt_options(texts: Iterable[str]) -> dict[str, list[str]]:
    """{name in small letters: [values]} of files of apt.conf.d in their order.

    `Name "value";`, `Name { Inner "value"; "list entry"; };` and `#clear Name;` are understood: all that stands in these files.
    """
    options: dict[str, list[str]] = {}
    for text in texts:
        for name in re.findall(r"^\s*#clear\s+([^\s;]+)", text, re.MULTILINE):
            for cleared in [key for key in options if key == name.lower() or key.startswith(name.lower() + "::")]:
                del options[cleared]
        words: list[str] = []
        scopes = [""]
        for quoted, sign, plain in _TOKENS.findall(text):
            if sign == "{":
                scopes.append("::".join(part for part in (scopes[-1], words[0] if words else "") if part))
                words = []
            elif sign == "}":
                scopes, words = scopes[:-1] or [""], []
            elif sign == ";":
                _set(options, scopes[-1], words)
                words = []
            elif plain:
                words.append(plain)
            elif quoted or words:
                words.append(quoted)
    return options


def _set(options: dict[str, list[str]], scope: str, words: list[str]) -> None:
    """One statement: two words are a name and a value, one is an entry of a list."""
    if len(words) >= 2:
        name = "::".join(part for part in (scope, words[0]) if part)
        options.setdefault(name.rstrip(":").lower(), []).append(words[1])
    elif len(words) == 1 and scope:
        options.setdefault(scope.lower(), []).append(words[0])


def last(options: dict[str, list[str]], name: str, default: str) -> str:
    """The value that takes effect: the last one."""
    return options.get(name, [default])[-1]


def _matches(entry: str, name: str) -> bool:
    """Entries of the blacklist are regular expressions from the start of the name (50unattended-upgrades)."""
    try:
        return re.match(entry, name) is not None
    except re.error:
        return False


def _driver_packages(root: str) -> list[str]:
    """NVIDIA's driver packages that apt has installed and would exchange; nothing is looked for without NVIDIA's driver."""
    programs = (os.path.join(folder, "nvidia-smi") for folder in os.environ.get("PATH", "").split(os.pathsep))
    if not (os.path.exists(root + "/proc/driver/nvidia") or any(os.access(path, os.X_OK) for path in programs)):
        return []
    return installed_drivers(files.text(root + "/var/lib/dpkg/status"))


def installed_drivers(status: str) -> list[str]:
    """From dpkg's status file: installed, not held."""
    names = {match.group(1) for match in re.finditer(r"^Package: (\S+)\nStatus: install ok installed$", status, re.MULTILINE)}
    return sorted(filter(_DRIVER.match, names))[:20]
