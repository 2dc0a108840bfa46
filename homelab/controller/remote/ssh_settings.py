"""What OpenSSH would do for `ssh HOST`: the answer of `ssh -G`, which has read every file, Include and Match."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from homelab.controller.base.errors import UnreachableError
from homelab.controller.base.hint import Command, Hint
from homelab.controller.config.cluster import Node
from homelab.controller.remote import own_programs

Settings = Mapping[str, Sequence[str]]
"""Key in small letters -> its values, one per line."""

LIMIT_S = 10.0  # `Match exec` runs programs
_AT_LINE = re.compile(r"^(?P<file>.+?):? line (?P<line>\d+): (?P<what>.*)$")
_UNKNOWN_KEY = re.compile(r"Bad configuration option: (\S+)")
_PERMISSIONS = re.compile(r"Bad owner or permissions on (.+)")
_NOISE = "Pseudo-terminal will not be allocated"


def words_of(node: Node) -> list[str]:
    """The words of cluster.toml that come before those of any file: port and user."""
    words = ["-p", str(node.port)] if node.port != 22 else []
    return words + (["-l", node.user] if node.user else [])


def of(node: Node) -> Settings:
    """The settings for a node; empty where no `ssh` is installed. Raises UnreachableError with OpenSSH's own words where it refuses its files."""
    program = shutil.which("ssh")
    return _asked(program, [*words_of(node), "--", node.host], node) if program else {}


def defaults(node: Node) -> Settings:
    """The same without any file."""
    program = shutil.which("ssh")
    return _built_in(program) if program else {}


@functools.cache
def _built_in(program: str) -> Settings:
    return _asked(program, ["-F", os.devnull, "--", "host"], Node(name="defaults", host="host"))


def _asked(program: str, words: Sequence[str], node: Node) -> Settings:
    where = f"node {node.name} ({node.host})"
    # As bytes, there and back: a name may hold letters that this locale has not (LC_ALL=C).
    command = [word.encode("utf-8", "surrogateescape") for word in (program, "-G", *words)]
    process = own_programs.start(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        output, errors = (text.decode("utf-8", "surrogateescape") for text in process.communicate(timeout=LIMIT_S))
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(
            f"OpenSSH did not read its configuration within {LIMIT_S:.0f} s (a program of `Match exec` that does not end?)",
            where=where,
            hint=Hint("this must end: {}", by_hand(node)),
        ) from error
    finally:
        if process.returncode is None:
            own_programs.end_group(process)
    if process.returncode != 0:
        raise _refused(node, errors)
    settings: dict[str, list[str]] = {}
    for line in output.splitlines():
        key, _, value = line.partition(" ")
        settings.setdefault(key.lower(), []).append(value.strip())
    return settings


def by_hand(node: Node) -> Command:
    """The same question, for a person."""
    return Command(shlex.join(["ssh", "-G", *words_of(node), node.host]))


def _refused(node: Node, errors: str) -> UnreachableError:
    """The words of `ssh -G`, and what to change."""
    lines = [line.strip() for line in errors.splitlines() if line.strip() and not line.startswith(_NOISE)] or ["it said nothing"]
    places = [found for line in lines if (found := _AT_LINE.match(line))]
    where = f"node {node.name} ({node.host})" + (f", {places[0]['file']}, line {places[0]['line']}" if places else "")
    again = by_hand(node)
    unknown = [found[1] for line in lines if (found := _UNKNOWN_KEY.search(line))]
    if unknown and places:
        names = ",".join(dict.fromkeys(unknown))
        line = (
            f"make this the first line of {places[0]['file']}: IgnoreUnknown {names} (or add the name to the IgnoreUnknown that is there)"
        )
        hint = Hint(f"{line}; then this must end without an error: {{}}", again)
    elif permissions := next((found for line in lines if (found := _PERMISSIONS.search(line))), None):
        file = shlex.quote(permissions[1])
        hint = Hint(
            "{}; or, if it belongs to somebody else: {}",
            Command(f"chmod go-w {file}"),
            Command(f"sudo chown $(id -u) {file}", needs_root=True),
        )
    elif places:
        hint = Hint(f"edit {places[0]['file']}, line {places[0]['line']}; then this must end without an error: {{}}", again)
    else:
        hint = Hint("edit host = ... in cluster.toml, or ~/.ssh/config; this must end without an error: {}", again)
    shown = [line for line in lines if _AT_LINE.match(line)][:2]
    return UnreachableError("OpenSSH refuses its configuration: " + "; ".join(dict.fromkeys([*shown, lines[-1]])), where=where, hint=hint)
