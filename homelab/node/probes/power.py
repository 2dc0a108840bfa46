"""Whether the node stays awake: mains, what systemd-logind would do, whether it slept, and what waits for a restart. Read from files."""

import glob
import os
import subprocess
import time

from homelab.node.probes import upgrades

_TARGETS = (
    "sleep.target",
    "suspend.target",
    "hibernate.target",
    "hybrid-sleep.target",
    "suspend-then-hibernate.target",
)
# In the order in which systemd prefers them (systemd.unit(5), logind.conf(5)).
_UNITS = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
_CONFIGURATION = ("/etc/systemd", "/run/systemd", "/usr/local/lib/systemd", "/usr/lib/systemd", "/lib/systemd")
_JOURNAL_S = 3.0


def read(request, root=""):
    """`root`: a folder that stands for /, in tests."""
    power = _power(root)
    return {
        "power": power,
        "sleep": _sleep(root, on_battery=power == "battery"),
        "suspended": _suspended(root),
        "reboot_required": upgrades.reboot_required(root),
        "updates": upgrades.unattended(root),
    }


def _power(root):
    folder = root + "/sys/class/power_supply"
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    online = battery = False
    for name in names:
        kind = _text(os.path.join(folder, name, "type"))
        # A mouse or a headset has a battery too: its scope is the device, not the system.
        if kind == "Battery" and _text(os.path.join(folder, name, "scope")) != "Device":
            battery = True
            online = online or _text(os.path.join(folder, name, "status")) == "Charging"
        elif kind in ("Mains", "USB"):  # many laptops are fed by USB-C, and have no other mains
            online = online or _text(os.path.join(folder, name, "online")) in ("1", "2")
    return ("mains" if online else "battery") if battery else None


def _sleep(root, on_battery):
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


def _has_lid(root):
    """A lid that the kernel watches: ACPI's own file, or its entry among the input devices."""
    acpi = glob.glob(glob.escape(root) + "/proc/acpi/button/lid/*/state")
    return bool(acpi) or 'Name="Lid Switch"' in _text(root + "/proc/bus/input/devices")


def configuration(root, name):
    """The texts of a systemd configuration file in the order in which systemd reads them: the main file, from the first folder
    that has one; then the drop-ins of all folders by their names, where one of a folder before hides one of the same name."""
    files = []
    for folder in _CONFIGURATION:
        if os.path.lexists("%s%s/%s" % (root, folder, name)):
            files.append("%s%s/%s" % (root, folder, name))
            break
    drop_ins = {}
    for folder in _CONFIGURATION:
        for path in glob.glob("%s%s/%s.d/*.conf" % (glob.escape(root), folder, name)):
            drop_ins.setdefault(os.path.basename(path), path)
    files += [drop_ins[basename] for basename in sorted(drop_ins)]
    return [text for text in (_text(path) for path in files) if text]


def logind(texts):
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


def kills_processes(options, user):
    """Whether logind ends what a login of this user started when the login ends. Lingering does not help: it keeps the user's
    service manager alive, not the login's own processes (logind.conf(5), KillUserProcesses=)."""
    if options.get("KillUserProcesses", "no").lower() not in ("yes", "true", "on", "1", "y", "t"):
        return False
    if user in options.get("KillExcludeUsers", "root").split():
        return False
    only = options.get("KillOnlyUsers", "").split()
    return not only or user in only


def _is_masked(root, unit):
    for folder in _UNITS:
        path = "%s%s/%s" % (root, folder, unit)
        if os.path.lexists(path):  # the first folder that has it decides; a link to /dev/null or an empty file masks
            return (os.path.islink(path) and os.readlink(path) == "/dev/null") or (
                os.path.isfile(path) and os.path.getsize(path) == 0
            )
    return False


def _suspended(root):
    """How long the node was asleep since it started: CLOCK_BOOTTIME goes on in sleep, CLOCK_MONOTONIC does not.

    Both clocks can be shifted (a time namespace), so the kernel's count of suspends has to agree. When it was, only the
    journal tells; it is asked on machines alone that have slept, and not every login may read it.
    """
    if (_number(root + "/sys/power/suspend_stats/success") or 0) < 1 or not hasattr(time, "CLOCK_BOOTTIME"):
        return None
    up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    asleep_s = up_s - time.clock_gettime(time.CLOCK_MONOTONIC)
    return {"asleep_s": round(max(0.0, asleep_s), 1), "up_s": round(up_s, 1), "ago_s": _woke_ago_s()}


def _woke_ago_s():
    """Seconds since the kernel last said that it came back, within the last day; None where the journal does not say."""
    command = [
        "journalctl",
        "-k",
        "-b",
        "-q",
        "--no-pager",
        "-o",
        "short-unix",
        "--since=-1d",
        "-g",
        r"PM: (suspend|hibernation) exit",
        "-n",
        "1",
    ]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_JOURNAL_S, text=True, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    woke_at = parse_short_unix(done.stdout)
    return None if woke_at is None else round(max(0.0, time.time() - woke_at), 1)


def parse_short_unix(text):
    """The time of the last line of `journalctl -o short-unix` ("1732189712.123456 tower kernel: PM: suspend exit")."""
    for line in reversed(text.splitlines()):
        try:
            return float(line.split()[0])
        except (ValueError, IndexError):
            continue
    return None


def _text(path):
    try:
        with open(path, errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def _number(path):
    try:
        return int(_text(path))
    except ValueError:
        return None
