"""Real OpenSSH servers on this machine's loopback addresses, each with its own host key and its own client key, and an ssh_config of the test's."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from homelab.controller.config.cluster import Cluster, Node
from homelab.lab import sshd

SSH = shutil.which("ssh") or "/usr/bin/ssh"


class Places:
    """Servers by name. `config` is what every `ssh` of the test reads, as if it were ~/.ssh/config."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config, self.known_hosts = folder / "config", folder / "known_hosts"
        self.known_hosts.write_text("")
        self.config.write_text("")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports: dict[str, int] = {}
        programs = folder / "programs"
        programs.mkdir()
        self.programs = programs
        # OpenSSH takes the home folder from the passwd file, whatever HOME says.
        (programs / "ssh").write_text(f'#!/bin/sh\nexec {SSH} -F "{self.config}" "$@"\n')
        (programs / "ssh").chmod(0o755)

    def add(self, name: str, listen: str = "127.0.0.1", more: str = "") -> int:
        """Start a server that one key alone opens; its port."""
        home = self.folder / name
        home.mkdir()
        with socket.socket(socket.AF_INET6 if ":" in listen else socket.AF_INET) as free:
            free.bind((listen, 0))
            port = int(free.getsockname()[1])
        client_key = sshd.make_key(home / "id", f"client of {name}")
        # bash that sshd starts on its first level reads ~/.bashrc (bash/shell.c, run_startup_files): this person's own, half a second of some.
        environment = {"PLACE": name, "SHLVL": "1"}
        server = sshd.Server(listen, port, getpass.getuser(), client_key, name, environment, None, "no")
        host_key = sshd.write_configuration(home, server)
        with (home / "sshd_config").open("a") as stream:
            stream.write(more)
        with (home / "log").open("wb") as log:
            self.processes[name] = subprocess.Popen(sshd.command(home), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        sshd.wait_for_banner(listen, port, home / "log", name)
        self.ports[name] = port
        with self.known_hosts.open("a") as stream:
            stream.write(f"[{listen}]:{port} {host_key}\n")
        return port

    def key(self, name: str) -> Path:
        """The private key that opens a server."""
        return self.folder / name / "id"

    def block(self, host: str, name: str, more: str = "") -> str:
        """Lines of ssh_config for an alias."""
        return (
            f"Host {host}\n  Hostname 127.0.0.1\n  Port {self.ports[name]}\n  IdentityFile {self.key(name)}\n  IdentitiesOnly yes\n{more}"
        )

    def cluster(self, host: str, **keys: object) -> Cluster:
        """One node, `end`, as a cluster.toml has it."""
        return Cluster(nodes=(Node.model_validate({"name": "end", "host": host, **keys}),), known_hosts=str(self.known_hosts))

    def close(self) -> None:
        """End the servers."""
        for process in self.processes.values():
            process.terminate()
            process.wait(10)


def of_this_test(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """The places, with their `ssh` first on the PATH and no agent of the person's."""
    places = Places(folder)
    monkeypatch.setenv("PATH", f"{places.programs}:{os.environ['PATH']}")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return places
