"""The shell text that starts the shipped node program, and the one that unpacks it. Pure."""

from __future__ import annotations

import shlex

from homelab.controller.base.shell import in_sh, quote_path
from homelab.shared.protocol.code import ANOTHER_PYTHON

ANSWER_MARK = "homelab-answer-begins-here"
"""The node's Python begins after this line: what a shell prints on start (a greeting in .bashrc) comes before it."""
AGENT_MARK = "homelab-agent-answers-here"
"""And the agent's answer after this one, which it prints itself: what a Python prints on start (sitecustomize) comes before it."""


def agent_command(python: str, code_dir: str, verb: str) -> str:
    """Shell text that runs one verb of the shipped agent; exit code 97 when the code is not there yet, 98 without any Python.

    What the agent's Python prints comes after ANSWER_MARK, what the agent itself prints after AGENT_MARK. Its Python is in UTF-8 mode: file names mean the same in every locale.
    Falls back to `python3` where the configured Python is missing, so that the other checks can still speak. A variable then says so to the
    facts, and the Python check fails: a wrapper at the configured path ends in another executable, too.
    """
    code, configured = quote_path(code_dir), quote_path(python)
    return in_sh(
        f"test -e {code}/complete || exit 97; p={configured}; o=; "
        f'test -f "$p" -a -x "$p" || {{ o=1; p=$(command -v python3); }} || exit 98; echo {ANSWER_MARK}; '
        f'{ANOTHER_PYTHON}=$o PYTHONUTF8=1 PYTHONPATH={code} exec "$p" -m homelab.node {shlex.quote(verb)} {AGENT_MARK}'
    )


# Runs on the node before any code of ours is there: unpacks a tar from stdin beside its place and renames it.
_UNPACK = """
import os, shutil, sys, tarfile
if sys.version_info < (3, 9):
    sys.exit("%s is Python %s, and homelab needs 3.9 or newer" % (sys.executable, sys.version.split()[0]))
place = os.path.expanduser(sys.argv[1])
partial = "%s.partial.%d" % (place, os.getpid())
os.makedirs(partial)
try:
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|*") as archive:
        for member in archive:
            target = os.path.normpath(os.path.join(partial, member.name))
            if not member.isfile() or not target.startswith(partial + os.sep):
                raise ValueError(member.name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "wb") as out:
                shutil.copyfileobj(archive.extractfile(member), out)
    open(os.path.join(partial, "complete"), "w").close()
    # Else a power cut can keep the name and lose the files, and the name says that nothing is to be sent again. Not the whole disk's: a checkpoint may
    # be written there.
    for folder, _, names in os.walk(partial):
        for name in names:
            with open(os.path.join(folder, name), "rb") as written:
                os.fsync(written.fileno())
    try:
        os.rename(partial, place)
    except OSError:
        if not os.path.exists(os.path.join(place, "complete")):
            raise
finally:
    shutil.rmtree(partial, ignore_errors=True)
"""


def unpack_command(python: str, code_dir: str) -> str:
    """Shell text that unpacks the code archive on stdin into `code_dir`; exit code 98 when the node has no Python."""
    configured = quote_path(python)
    return in_sh(
        f'p={configured}; test -f "$p" -a -x "$p" || p=$(command -v python3) || exit 98; '
        f'PYTHONUTF8=1 exec "$p" -c {shlex.quote(_UNPACK)} {quote_path(code_dir)}'
    )
