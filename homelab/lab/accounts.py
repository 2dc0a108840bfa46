"""The account files a node sees: passwd with its own home, and shadow without passwords."""

from __future__ import annotations

from pathlib import Path


def is_locked(user: str, shadow: Path = Path("/etc/shadow")) -> bool:
    """True when the password of `user` is locked ("!..."). False when that cannot be read: so does sshd take it then."""
    try:
        lines = shadow.read_text(errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        name, _, rest = line.partition(":")
        if name == user:
            return rest.startswith("!")
    return False


def passwd_with_home(passwd: str, user: str, home: str) -> str:
    """The text of /etc/passwd with another home for `user`."""
    lines = []
    for line in passwd.splitlines():
        fields = line.split(":")
        if len(fields) == 7 and fields[0] == user:
            fields[5] = home
        lines.append(":".join(fields))
    return "\n".join(lines) + "\n"


def passwd_with_account(passwd: str, user: str, uid: int, home: str) -> str:
    """The text of /etc/passwd with one account more. Its group has its number, and no name."""
    return f"{passwd.rstrip(chr(10))}\n{user}:x:{uid}:{uid}::{home}:/bin/sh\n"


def shadow_of(passwd: str) -> str:
    """A shadow file in which no account has a password, and none is locked or expired."""
    names = [line.split(":")[0] for line in passwd.splitlines() if line.count(":") == 6]
    return "".join(f"{name}:*:19000:0:99999:7:::\n" for name in names)
