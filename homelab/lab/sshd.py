"""A real OpenSSH server per node: its keys, its configuration, and waiting until it answers."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from homelab.controller.base.errors import HomelabError
from homelab.lab import procfs
from homelab.lab.tools import call, program
from homelab.shared.protocol import files

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Where distributions keep the external sftp server: it starts in the node's home, the built-in in the passwd home.
_SFTP_SERVERS = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/lib/ssh/sftp-server")


def make_key(file: Path, comment: str) -> str:
    """Make an ed25519 key pair (file, file.pub) unless there; return the public key as "ssh-ed25519 AAAA..."."""
    if not file.exists():
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(file))
    return " ".join(file.with_name(file.name + ".pub").read_text().split()[:2])


def known_hosts_line(host: str, port: int, public_key: str) -> str:
    """A line of known_hosts: the port is part of the name where it is not 22."""
    return f"{host if port == 22 else f'[{host}]:{port}'} {public_key}\n"


@dataclass(frozen=True)
class Server:
    """The settings of a node's sshd.

    `environment` is what every session of the node sees. `wrapper` (a shell command) starts every session where the home
    of the passwd file is not the node's. `pam` is "yes" or "no".
    """

    listen: str
    port: int
    user: str
    client_key: str
    comment: str
    environment: dict[str, str]
    wrapper: str | None
    pam: str


def write_configuration(folder: Path, server: Server) -> str:
    """Write host key, authorized_keys and sshd_config into `folder`; return the public host key."""
    host_key = make_key(folder / "host_key", server.comment)
    authorized = folder / "authorized_keys"
    authorized.write_text(server.client_key + "\n")
    authorized.chmod(0o600)
    sftp = next((path for path in _SFTP_SERVERS if Path(path).exists()), "internal-sftp")
    lines = [
        f"ListenAddress {server.listen}",
        f"Port {server.port}",
        f"HostKey {_quoted(folder / 'host_key')}",
        f"AuthorizedKeysFile {_quoted(authorized)}",
        "PidFile none",
        f"AllowUsers {server.user}",
        "AuthenticationMethods publickey",
        "PubkeyAuthentication yes",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin prohibit-password",
        f"UsePAM {server.pam}",
        # The folder may be below a world-writable one (/tmp), which sshd does not accept.
        "StrictModes no",
        "UseDNS no",
        "PrintMotd no",
        "PrintLastLog no",
        "X11Forwarding no",
        "AllowAgentForwarding no",
        "MaxStartups 100",
        "MaxSessions 100",
        "LoginGraceTime 30",
        f"Subsystem sftp {sftp}",
        # One SetEnv line: of several, sshd takes only the first.
        "SetEnv " + " ".join(_quoted(f"{name}={value}") for name, value in server.environment.items()),
    ]
    if _version() >= (9, 8):
        lines.append("PerSourcePenalties no")
    if server.wrapper is not None:
        lines.append(f"ForceCommand {server.wrapper}")
    file = configuration(folder)
    file.write_text("\n".join(lines) + "\n")
    _check(file)
    return host_key


def session_wrapper(folder: Path, environment: dict[str, str]) -> str:
    """Write the program that starts every session in the node's own home; return the shell command that runs it.

    sshd starts a session in the home of the passwd file; `exec` hands on stdin, signals and exit code untouched.
    """
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    lines = [
        "#!/bin/sh",
        *exports,
        'cd "$HOME" || exit 255',
        'if [ -z "${SSH_ORIGINAL_COMMAND-}" ]; then exec "${SHELL:-/bin/sh}" -l; fi',
        "command=$SSH_ORIGINAL_COMMAND",
        "unset SSH_ORIGINAL_COMMAND",
        'exec "${SHELL:-/bin/sh}" -c "$command"',
    ]
    file = folder / "session"
    file.write_text("\n".join(lines) + "\n")
    file.chmod(0o755)
    return shlex.quote(str(file))


def configuration(folder: Path) -> Path:
    """The sshd_config of the node in `folder`."""
    return folder / "sshd_config"


def command(folder: Path) -> list[str]:
    """The argument list that runs the node's sshd in the foreground, its log on stderr."""
    return [program("sshd"), "-D", "-e", "-f", str(configuration(folder))]


def banner(host: str, port: int, timeout_s: float = 1.0) -> str | None:
    """What an SSH server says first ("SSH-2.0-OpenSSH_9.2..."), or None when no server answers in time."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            connection.settimeout(timeout_s)
            line = connection.recv(255).decode(errors="replace").strip()
    except OSError:
        return None
    return line if line.startswith("SSH-") else None


def wait_for_banner(host: str, port: int, log: Path, node: str, timeout_s: float = 15.0) -> None:
    """Wait until the node's sshd answers. Raises HomelabError with the end of its log after `timeout_s`."""
    if not procfs.until(lambda: banner(host, port) is not None, timeout_s):
        last = "\n".join(files.tail(log, 5))
        raise HomelabError(
            f"sshd of {node} did not answer on {host}:{port} within {timeout_s:g} s\n{last}".rstrip(),
            where=f"{node}, {log}",
            hint="read the log above; a firewall on this machine or a full disk are the usual causes",
        )


def _quoted(value: str | Path) -> str:
    return f'"{value}"'


def _version() -> tuple[int, int]:
    completed = subprocess.run([program("ssh-keygen").replace("ssh-keygen", "ssh"), "-V"], capture_output=True, text=True, check=False)
    match = re.search(r"OpenSSH_(\d+)\.(\d+)", completed.stderr + completed.stdout)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def _check(file: Path) -> None:
    try:
        call("sshd", "-t", "-f", str(file))
    except HomelabError as error:
        missing = re.search(r"Missing privilege separation directory: (\S+)", error.message)
        if missing is None:
            raise
        # The ssh service makes it at boot; on a machine without that service it does not exist.
        Path(missing.group(1)).mkdir(mode=0o755, parents=True, exist_ok=True)
        call("sshd", "-t", "-f", str(file))
