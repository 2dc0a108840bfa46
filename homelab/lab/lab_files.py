"""The files of a lab's folder: keys, homes, cluster.toml, known_hosts."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from homelab.controller.base.errors import InputError
from homelab.lab import sshd
from homelab.lab.lab_state import NODES_FOLDER, NODES_MARK, STATE_FILE, LabNode, LabState

CLUSTER_FILE = "cluster.toml"
KNOWN_HOSTS_FILE = "known_hosts"
KEYS_FOLDER = "keys"


def check_free(folder: Path) -> None:
    """Raise InputError when `folder` holds files of somebody else that a lab would overwrite and later remove."""
    if folder.exists() and not folder.is_dir():
        raise InputError("this is a file; a lab needs a folder", where=str(folder), hint="choose another name")
    if (folder / STATE_FILE).exists():
        return
    existing = [name for name in (CLUSTER_FILE, KNOWN_HOSTS_FILE, KEYS_FOLDER) if (folder / name).exists()]
    if (folder / NODES_FOLDER).exists() and not (folder / NODES_FOLDER / NODES_MARK).exists():
        existing.append(NODES_FOLDER)
    if existing:
        raise InputError(
            f"this folder holds files that no lab made: {', '.join(existing)}",
            where=str(folder),
            hint="choose another folder: a lab would overwrite files of these names",
        )


def prepare(state: LabState) -> str:
    """Make folders and the client's key pair; return the public key. Homes that an earlier lab left are used again."""
    keys = state.path / KEYS_FOLDER
    keys.mkdir(mode=0o700, exist_ok=True)
    top = state.path / NODES_FOLDER
    top.mkdir(exist_ok=True)
    (top / NODES_MARK).touch()
    for node in state.nodes:
        folder = state.node_folder(node)
        for needed in (folder, folder / "bin", Path(node.home), Path(node.workdir)):
            needed.mkdir(exist_ok=True)
            if node.uid is not None and needed != folder:
                os.chown(needed, node.uid, node.uid)
    return sshd.make_key(keys / "id_ed25519", f"homelab-lab-{state.id}")


def write_cluster(state: LabState, host_keys: list[str]) -> None:
    """Write known_hosts and cluster.toml: the lab as a cluster like any other."""
    (state.path / KNOWN_HOSTS_FILE).write_text("".join(host_keys))
    lines = [
        f"# A practice cluster on this machine (homelab lab, backend {state.backend}).",
        "[cluster]",
        f"name = {json.dumps(f'lab-{state.id}')}",
        f"network = {json.dumps(state.network)}",
        f"known_hosts = {json.dumps(KNOWN_HOSTS_FILE)}",
        "",
        "[defaults]",
        f"user = {json.dumps(state.nodes[0].user)}",
        f"port = {state.nodes[0].port}",
        f"identity_file = {json.dumps(f'{KEYS_FOLDER}/id_ed25519')}",
        f"python = {json.dumps(state.nodes[0].python, ensure_ascii=False)}",
    ]
    for node in state.nodes:
        lines += [
            "",
            "[[nodes]]",
            f"name = {json.dumps(node.name)}",
            f"host = {json.dumps(node.host)}",
            f"lan_address = {json.dumps(node.host)}",
            f"interface = {json.dumps(node.interface)}",
            f"workdir = {json.dumps(node.workdir, ensure_ascii=False)}",
            "gpus = []",
        ]
        if node.user != state.nodes[0].user:
            lines.append(f"user = {json.dumps(node.user)}")
        if state.backend == "namespaces" and node.port != state.nodes[0].port:
            lines.append(f"port = {node.port}")
        if node.cpu is not None:
            lines.append(f"speed = {float(node.cpu)}")
    (state.path / CLUSTER_FILE).write_text("\n".join(lines) + "\n")


def ssh_command(state: LabState, node: LabNode) -> list[str]:
    """The argument list of an OpenSSH client that trusts this lab's host keys alone and reads no configuration."""
    options = {
        "UserKnownHostsFile": f'"{state.path / KNOWN_HOSTS_FILE}"',
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
        "IdentitiesOnly": "yes",
        "BatchMode": "yes",
        "ConnectTimeout": "10",
    }
    words = ["ssh", "-F", "none", "-i", str(state.path / KEYS_FOLDER / "id_ed25519"), "-p", str(node.port)]
    for name, value in options.items():
        words += ["-o", f"{name}={value}"]
    return [*words, f"{node.user}@{node.host}"]


def remove(state: LabState, *, keep_nodes: bool) -> None:
    """Remove what the lab wrote; `keep_nodes` keeps homes and logs.

    lab.json goes last: until then `down` can be repeated.
    """
    for name in (CLUSTER_FILE, KNOWN_HOSTS_FILE):
        (state.path / name).unlink(missing_ok=True)
    shutil.rmtree(state.path / KEYS_FOLDER, ignore_errors=True)
    if keep_nodes:
        for node in state.nodes:
            _keep_home_and_log(state.node_folder(node))
    else:
        shutil.rmtree(state.path / NODES_FOLDER, ignore_errors=True)
    (state.path / STATE_FILE).unlink(missing_ok=True)


def _keep_home_and_log(folder: Path) -> None:
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name in ("home", "bin", "sshd.log"):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
