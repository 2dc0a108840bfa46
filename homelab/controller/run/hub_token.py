"""The token of the Hugging Face hub, where a command was given one: in this process's memory, and in no environment that others can read."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping

_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # the hub's own order (huggingface_hub, utils/_auth.py)
_PATH = "HF_TOKEN_PATH"
_LENT = "/dev/fd/"  # by `lent`
_token = ""
_is_from_file = False


def take(environment: MutableMapping[str, str]) -> str:
    """Take the token out of the environment (or read it from the file that HF_TOKEN_PATH names), so that no other program gets it; "" without one."""
    global _token, _is_from_file
    given = [environment.pop(name, "").strip() for name in _VARIABLES]
    if environment is os.environ and any(given):
        _cover_own()
    in_variable = next(filter(None, given), "")
    path = environment.get(_PATH, "")
    _token = in_variable or _read(path)
    if path.startswith(_LENT):  # it ends with this process
        del environment[_PATH]
    _is_from_file = bool(_token) and not in_variable and not path.startswith(_LENT)
    return _token


def _read(path: str) -> str:
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as stream:
            return stream.read(4096).strip()
    except (OSError, ValueError):  # as the hub's library takes it: no token
        return ""


def _cover_own() -> None:
    """Write stars over the values in what the system shows of this process (/proc/PID/environ): it shows the memory of the start."""
    import re

    if sys.platform != "linux":  # elsewhere only the same user can read it
        return
    try:
        with open("/proc/self/environ", "rb") as stream:
            content = stream.read()
        with open("/proc/self/stat", "rb") as stream:
            start = int(stream.read().rpartition(b")")[2].split()[47])  # env_start (proc(5): field 50)
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            for match in re.finditer(rb"(?:^|\0)(?:%b)=([^\0]*)" % "|".join(_VARIABLES).encode(), content):
                memory.seek(start + match.start(1))
                memory.write(b"*" * len(match[1]))
    except (OSError, ValueError, IndexError):  # it is not allowed: other users cannot read it either
        return


def value() -> str:
    """The token; "" where there is none."""
    return _token


def to_send() -> dict[str, str]:
    """The secrets that a run gets, by name."""
    return {_VARIABLES[0]: _token} if _token else {}


@contextlib.contextmanager
def lent(environment: Mapping[str, str]) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """The environment of a `homelab` that is started in this block, and the descriptors it must inherit: it reads the token there."""
    if not _token or _is_from_file:
        yield dict(environment), ()
        return
    descriptor, writer = (os.memfd_create("homelab-token"), -1) if hasattr(os, "memfd_create") else os.pipe()
    try:
        os.write(descriptor if writer < 0 else writer, _token.encode())
        if writer >= 0:
            os.close(writer)
        yield {**environment, _PATH: f"{_LENT}{descriptor}"}, (descriptor,)
    finally:
        os.close(descriptor)
