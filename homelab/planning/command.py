"""Commands as argument lists, and the only place that quotes them into shell text.

`str()` of a command is what `--dry-run` prints, what commands.sh keeps and what a person can run by hand.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from homelab.planning.model import NodePlan
from homelab.secrecy import HIDDEN, names_a_secret, without_login

RENDEZVOUS_TIMEOUT_S = 300
ANSWER_MARK = "homelab-answer-begins-here"
"""The node's Python begins after this line: what a shell prints on start (a greeting in .bashrc) comes before it."""
AGENT_MARK = "homelab-agent-answers-here"
"""And the agent's answer after this one, which it prints itself: what a Python prints on start (sitecustomize) comes before it."""


def quote_path(path: str) -> str:
    """A path as one shell word. A leading `~/` stays the remote user's home; nothing else is expanded."""
    if path == "~":
        return '"$HOME"'
    if path.startswith("~/"):
        return '"$HOME"/' + shlex.quote(path[2:])
    return shlex.quote(path)


def file_word(path: str) -> str:
    """A file of this machine as one shell word that no command takes for an option: `./-rf.toml`."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def quote_words(words: Iterable[str]) -> str:
    """An argument list as shell text."""
    return " ".join(shlex.quote(word) for word in words)


def masked(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the values of secrets hidden, for anything that is shown or kept."""
    return {
        key: HIDDEN if names_a_secret(key) else without_login(value)
        for key, value in environment.items()
    }


def in_sh(script: str) -> str:
    """Run `script` under /bin/sh whatever the login shell is (fish and csh read other languages).

    Inside of single quotes fish reads backslashes, csh reads `!` and refuses the end of a line. A script with one of these is
    written with octal escapes (`\\0NNN`, which printf's %b takes back): they mean the same to all shells.
    """
    if not set(script) & set("\\!\n"):
        return f"exec /bin/sh -c {shlex.quote(script)}"
    written = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter == " ") else "".join(f"\\0{byte:03o}" for byte in letter.encode())
        for letter in script
    )
    return f"""exec /bin/sh -c 'eval "$(printf %b "$0")"' '{written}'"""


def agent_command(python: str, code_dir: str, verb: str) -> str:
    """Shell text that runs one verb of the shipped agent; exit code 97 when the code is not there yet, 98 without any Python.

    What the agent's Python prints comes after ANSWER_MARK, what the agent itself prints after AGENT_MARK. Its Python is in UTF-8 mode: file names mean the same in every locale.
    Falls back to `python3` where the configured Python is missing, so that the other checks can still speak; the facts then
    name the interpreter that answered, and the Python check fails.
    """
    code, configured = quote_path(code_dir), quote_path(python)
    return in_sh(
        f'test -e {code}/complete || exit 97; p={configured}; test -f "$p" -a -x "$p" || p=$(command -v python3) || exit 98; '
        f'echo {ANSWER_MARK}; PYTHONUTF8=1 PYTHONPATH={code} exec "$p" -m homelab.node {shlex.quote(verb)} {AGENT_MARK}'
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


def torchrun(
    *,
    python: str,
    node_count: int,
    ranks_per_node: int,
    node_rank: int,
    master_address: str,
    master_port: int,
    local_address: str,
    rendezvous_id: str,
    log_dir: str,
    program: tuple[str, ...],
) -> tuple[str, ...]:
    """The torchrun command of one node (options: torch/distributed/run.py of 2.13).

    `--max-restarts=0`: restarts are homelab's. `--redirects=3` gives every rank its own stdout and stderr file.
    """
    return (
        python, "-m", "torch.distributed.run",
        f"--nnodes={node_count}",
        f"--nproc-per-node={ranks_per_node}",
        f"--node-rank={node_rank}",
        f"--master-addr={master_address}",
        f"--master-port={master_port}",
        f"--local-addr={local_address}",
        f"--rdzv-id={rendezvous_id}",
        "--max-restarts=0",
        # A node that was started alone (its controller died meanwhile) gives up by itself; the default is 10 minutes.
        f"--rdzv-conf=timeout={RENDEZVOUS_TIMEOUT_S}",
        f"--log-dir={log_dir}",
        "--redirects=3",
        *program,
    )  # fmt: skip


def by_hand(node: NodePlan, ssh_target: str) -> str:
    """What a person would type on this node instead of the agent's start; secrets masked."""
    exports = " ".join(f"{key}={shlex.quote(value)}" for key, value in sorted(masked(node.environment).items()))
    return f"# node {node.name} ({ssh_target})\ncd {quote_path(node.run_dir)} && env {exports} \\\n  {quote_words(node.command)}\n"
