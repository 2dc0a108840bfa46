"""Whether the node stays awake: mains, what systemd-logind would do, whether it slept, and what waits for a restart. Read from files."""

from __future__ import annotations

import glob
import os
import re
import time
from typing import TYPE_CHECKING

from homelab.node.probes import upgrades
from homelab.node.system import programs
from homelab.shared.protocol import files

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject

_TARGETS = ("sleep.target", "suspend.target", "hibernate.target", "hybrid-sleep.target", "suspend-then-hibernate.target")
# In the order in which systemd prefers them (systemd.unit(5), logind.conf(5)).
_CONFIGURATION = ("/etc/systemd", "/run/systemd", "/usr/local/lib/systemd", "/usr/lib/systemd", "/lib/systemd")
_UNITS = tuple(f"{folder}/system" for folder in _CONFIGURATION)
_JOURNAL_S = 3.0
_STAYS = re.compile(r"^\s*instanceIdleTimeout\s*=\s*-", re.MULTILINE | re.IGNORECASE)


def read(request: JsonObject, root: str = "") -> JsonObject:
    """`root`: a folder that stands for /, in tests."""
    power = _power(root)
    return {
        "source": power,
        "sleep": _sleep(root, on_battery=power == "battery"),
        "suspended": _suspended(root),
        "reboot_required": upgrades.reboot_required(root),
        "updates": upgrades.unattended(root),
        "ends_with_windows": _ends_with_windows(root),
    }


def _power(root: str) -> str | None:
    folder = root + "/sys/class/power_supply"
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    online = battery = False
    for name in names:
        kind = files.text(os.path.join(folder, name, "type"))
        # A mouse or a headset has a battery too; its scope is "Device".
        if kind == "Battery" and files.text(os.path.join(folder, name, "scope")) != "Device":
            battery = True
            online = online or files.text(os.path.join(folder, name, "status")) == "Charging"
        elif kind in ("Mains", "USB"):  # many laptops get power by USB-C only
            online = online or files.text(os.path.join(folder, name, "online")) in ("1", "2")
    return ("mains" if online else "battery") if battery else None


def _ends_with_windows(root: str) -> bool | None:
    """Whether Windows ends this WSL2 when the last window of it is closed, whatever sshd or systemd run in it. None where this is no WSL2."""
    if "microsoft" not in files.text(root + "/proc/sys/kernel/osrelease").lower():
        return None
    return not any(_STAYS.search(files.text(path)) for path in glob.glob(root + "/mnt/c/Users/*/.wslconfig"))


def _sleep(root: str, on_battery: bool) -> JsonObject | None:
    """What logind does by itself. None where systemd does not run the machine: then nobody here knows who sends it to sleep.

    The desktop's own wish to suspend when nobody types (GNOME: sleep-inactive-ac-type) stands in a binary database of each
    user and is not looked at; masked sleep targets stop that too.
    """
    if not os.path.isdir(root + "/run/systemd/system"):
        return None
    options = logind(configuration(root, "logind.conf"))
    lid = options.get("HandleLidSwitch", "suspend")
    if not on_battery:
        lid = options.get("HandleLidSwitchExternalPower", lid)
    return {
        "masked": [name for name in _TARGETS if _is_masked(root, name)],
        "idle_action": options.get("IdleAction", "ignore"),
        "lid": _has_lid(root),
        "lid_action": lid,
        "kills_processes": kills_processes(options, upgrades.user_name()),
    }


def _has_lid(root: str) -> bool:
    """A lid that the kernel watches: ACPI's own file, or its entry among the input devices."""
    acpi = glob.glob(glob.escape(root) + "/proc/acpi/button/lid/*/state")
    return bool(acpi) or 'Name="Lid Switch"' in files.text(root + "/proc/bus/input/devices")


def configuration(root: str, name: str) -> list[str]:
    """The texts of a systemd configuration file in the order in which systemd reads them: the main file, from the first folder
    that has one; then the drop-ins of all folders by their names, where one of a folder before hides one of the same name."""
    paths = []
    for folder in _CONFIGURATION:
        if os.path.lexists(f"{root}{folder}/{name}"):
            paths.append(f"{root}{folder}/{name}")
            break
    drop_ins: dict[str, str] = {}
    for folder in _CONFIGURATION:
        for path in glob.glob(f"{glob.escape(root)}{folder}/{name}.d/*.conf"):
            drop_ins.setdefault(os.path.basename(path), path)
    paths += [drop_ins[basename] for basename in sorted(drop_ins)]
    return [text for text in (files.text(path) for path in paths) if text]


def logind(texts: list[str]) -> JsonObject:
    """The options of [Login], the last of each; an empty value is the default again."""
    options = {}
    for text in texts:
        section = ""
        for line in text.splitlines():
            line = line.strip()
            if line.startswith("["):
                section = line
            elif section == "[Login]" and "=" in line and line[:1] not in "#;":
                key, _, value = (part.strip() for part in line.partition("="))
                options[key] = value
    return {key: value for key, value in options.items() if value}


def kills_processes(options: JsonObject, user: str) -> bool:
    """Whether logind ends what a login of this user started when the login ends. Lingering does not help: it keeps the user's
    service manager alive, not the login's own processes (logind.conf(5), KillUserProcesses=)."""
    if options.get("KillUserProcesses", "no").lower() not in ("yes", "true", "on", "1", "y", "t"):
        return False
    if user in options.get("KillExcludeUsers", "root").split():
        return False
    only = options.get("KillOnlyUsers", "").split()
    return not only or user in only


def _is_masked(root: str, unit: str) -> bool:
    for folder in _UNITS:
        path = f"{root}{folder}/{unit}"
        # The first folder that has it decides. A link to /dev/null masks, on NixOS by way of other links, and so does an empty file.
        if os.path.lexists(path):
            return os.path.realpath(path) == os.devnull or (os.path.isfile(path) and os.path.getsize(path) == 0)
    return False


def _suspended(root: str) -> JsonObject | None:
    """How long the node was asleep since it started: CLOCK_BOOTTIME goes on in sleep, CLOCK_MONOTONIC does not.

    Both clocks can be shifted (a time namespace), so the kernel's count of suspends has to agree. When it was, only the
    journal tells; it is asked on machines alone that have slept, and not every login may read it.
    """
    if (files.integer(root + "/sys/power/suspend_stats/success") or 0) < 1 or not hasattr(time, "CLOCK_BOOTTIME"):
        return None
    up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    asleep_s = up_s - time.clock_gettime(time.CLOCK_MONOTONIC)
    return {"asleep_s": round(max(0.0, asleep_s), 1), "up_s": round(up_s, 1), "ago_s": _woke_ago_s()}


def _woke_ago_s() -> float | None:
    """Seconds since the kernel last said that it came back, within the last day; None where the journal does not say."""
    words = ("-k", "-b", "-q", "--no-pager", "-o", "short-unix", "--since=-1d", "-g", r"PM: (suspend|hibernation) exit", "-n", "1")
    try:
        _, output, _ = programs.answer_of(("journalctl", *words), _JOURNAL_S)
    except (OSError, TimeoutError):
        return None
    woke_at = parse_short_unix(output)
    return None if woke_at is None else round(max(0.0, time.time() - woke_at), 1)


def parse_short_unix(text: str) -> float | None:
    """The time of the last line of `journalctl -o short-unix` ("1732189712.123456 tower kernel: PM: suspend exit")."""
    for line in reversed(text.splitlines()):
        try:
            return float(line.split()[0])
        except (ValueError, IndexError):
            continue
    return None
