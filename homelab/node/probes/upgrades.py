"""What an upgrade did or will do to a running machine: a restart that waits, and unattended upgrades (Debian, Ubuntu)."""

import getpass
import glob
import os
import re

# Packages whose exchange leaves a driver in the kernel that the libraries on disk do not fit any more.
_DRIVER = re.compile(r"nvidia-(?:driver|dkms|kernel)-|libnvidia-compute-|linux-modules-nvidia-")
_TOKENS = re.compile(r'//[^\n]*|#[^\n]*|/\*.*?\*/|"([^"]*)"|([{};])|([^\s{};"]+)', re.DOTALL)


def user_name():
    """Ours, as /etc/passwd has it."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())


def reboot_required(root=""):
    """The packages that ask for a restart (none of them named: an empty list); None where nothing does."""
    for folder in ("/run", "/var/run"):
        if os.path.exists(root + folder + "/reboot-required"):
            names = (_text(root + folder + "/reboot-required.pkgs") or "").split()
            return list(dict.fromkeys(names))[:50]
    return None


def unattended(root=""):
    """Whether upgrades that nobody starts restart the machine, and which of NVIDIA's packages they may exchange; None where
    there are no unattended upgrades."""
    if not os.path.exists(root + "/usr/bin/unattended-upgrade"):
        return None
    options = apt_options(
        _text(path) or "" for path in sorted(glob.glob(glob.escape(root) + "/etc/apt/apt.conf.d/*")) if _is_read(path)
    )
    if last(options, "apt::periodic::unattended-upgrade", "0") in ("0", ""):
        return None
    blacklist = options.get("unattended-upgrade::package-blacklist", [])
    return {
        "reboots": last(options, "unattended-upgrade::automatic-reboot", "false").lower()
        in ("true", "yes", "on", "1", "enable", "with"),
        "reboot_time": last(options, "unattended-upgrade::automatic-reboot-time", "now"),
        "driver_packages": [
            name for name in _driver_packages(root) if not any(_matches(entry, name) for entry in blacklist)
        ],
    }


def _is_read(path):
    """apt reads names of letters, digits, - _ . that end in .conf or have no ending (apt.conf(5))."""
    name = os.path.basename(path)
    return re.fullmatch(r"[\w.-]+", name) is not None and (name.endswith(".conf") or "." not in name)


def apt_options(texts):
    """{name in small letters: [values]} of files of apt.conf.d in their order.

    `Name "value";`, `Name { Inner "value"; "list entry"; };` and `#clear Name;` are understood: all that stands in these files.
    """
    options = {}
    for text in texts:
        for name in re.findall(r"^\s*#clear\s+([^\s;]+)", text, re.MULTILINE):
            for known in [key for key in options if key == name.lower() or key.startswith(name.lower() + "::")]:
                del options[known]
        scopes, words = [""], []
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


def _set(options, scope, words):
    """One statement: two words are a name and a value, one is an entry of a list."""
    if len(words) >= 2:
        name = "::".join(part for part in (scope, words[0]) if part)
        options.setdefault(name.rstrip(":").lower(), []).append(words[1])
    elif len(words) == 1 and scope:
        options.setdefault(scope.lower(), []).append(words[0])


def last(options, name, default):
    """The value that counts."""
    return options.get(name, [default])[-1]


def _matches(entry, name):
    """Entries of the blacklist are regular expressions from the start of the name (50unattended-upgrades)."""
    try:
        return re.match(entry, name) is not None
    except re.error:
        return False


def _driver_packages(root):
    """NVIDIA's driver packages that apt has installed and would exchange; nothing is looked for without NVIDIA's driver."""
    programs = (os.path.join(folder, "nvidia-smi") for folder in os.environ.get("PATH", "").split(os.pathsep))
    if not (os.path.exists(root + "/proc/driver/nvidia") or any(os.access(path, os.X_OK) for path in programs)):
        return []
    return installed_drivers(_text(root + "/var/lib/dpkg/status") or "")


def installed_drivers(status):
    """From dpkg's status file: installed, not held."""
    names = []
    for match in re.finditer(r"^Package: (\S+)\nStatus: install ok installed$", status, re.MULTILINE):
        if _DRIVER.match(match.group(1)):
            names.append(match.group(1))
    return sorted(set(names))[:20]


def _text(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return None
