"""The life of a lab: up, faults, status, down. Sequences; the backend knows how a node is made.

from homelab.lab import Lab
with Lab.up(folder, nodes=3, cpu=(0.9, 0.5, 0.3)) as lab:
    lab.fault("node2", "power-cut")
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.lab import faults, lab_files, lab_status, nodes, procfs, sshd
from homelab.lab.lab_state import LOCK_FILE, LabNode, LabState, boot_id, is_lab, load, locked
from homelab.lab.loopback import Loopback
from homelab.lab.namespaces import Namespaces
from homelab.lab.nodes import Backend
from homelab.lab.spec import LabOptions, new_state
from homelab.lab.tools import machine_lock, require

# A fault takes a second at most; two at once wait for each other.
OTHERS_TIMEOUT_S = 20.0
BACKENDS: dict[str, Callable[[], Backend]] = {"loopback": Loopback, "namespaces": Namespaces}


@dataclass(frozen=True)
class Down:
    """What `down` did: whether the folder itself was removed too, and what is verified to be gone."""

    lab: str
    folder_removed: bool
    verified: tuple[str, ...] = ("processes", "network namespaces", "interfaces", "mounts", "cgroups")


class Lab:
    """A running lab. `state` is what lab.json says; `nodes` has addresses, homes, limits."""

    def __init__(self, state: LabState) -> None:
        self.state = state
        self._backend = BACKENDS[state.backend]()

    @classmethod
    def up(
        cls, folder: Path | str, nodes: int = 3, *, tell: Callable[[str], None] = lambda line: None, **options: Unpack[LabOptions]
    ) -> Lab:
        """Start a lab in `folder`; returns when every sshd answers. `tell` hears of a clean-up.

        Raises InputError or HomelabError, and then nothing of the lab is left running.
        """
        path = Path(folder).expanduser().resolve()
        desired = new_state(path, nodes, options)
        require("sshd", "ssh-keygen", "setsid")
        lab_files.check_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"this folder cannot be made: {error.strerror}", where=str(path), hint="choose another folder") from None
        with locked(path):
            if is_lab(path):
                cls._clean_dead(path, tell)
            lab = cls(desired)
            try:
                with machine_lock():
                    lab.state = lab._backend.place(desired)
                    lab.state.save()
                    lab._start()
            except BaseException:
                lab._remove(keep_files=False)
                raise
        return lab

    @classmethod
    def open(cls, folder: Path | str) -> Lab:
        """The lab of `folder`. Raises InputError when there is none."""
        return cls(load(Path(folder).expanduser().resolve()))

    @property
    def folder(self) -> Path:
        """Where the lab lives."""
        return self.state.path

    @property
    def nodes(self) -> tuple[LabNode, ...]:
        """The nodes, in order."""
        return self.state.nodes

    @property
    def cluster_file(self) -> Path:
        """The cluster.toml of this lab."""
        return self.folder / lab_files.CLUSTER_FILE

    def ssh_command(self, node: str) -> list[str]:
        """The argument list of an OpenSSH client for this node; append the remote command."""
        return lab_files.ssh_command(self.state, self.state.node(node))

    def fault(self, node: str, fault: str) -> None:
        """Let something happen to a node (see `faults.FAULTS`); power-on returns when sshd answers, if its cable is plugged.

        Raises InputError for an unknown node or fault, HomelabError when it cannot be done.
        """
        parsed = faults.parse(fault)
        with self._changing():
            target = self.state.node(node)
            self.state = faults.inject(self._backend, self.state, target, parsed)
            self.state.save()
            target = self.state.node(node)
            if parsed.kind == "power-on" and target.cable == "plugged":
                sshd.wait_for_banner(target.host, target.port, self.state.node_folder(target) / "sshd.log", target.name)

    def status(self) -> dict[str, Any]:
        """The state now, as the machine reports it; the shape of `homelab lab status --json` (see status.py)."""
        self.state = load(self.folder)
        return lab_status.collect(self._backend, self.state)

    def processes_of(self, node: str) -> set[int]:
        """The node's processes, numbered as this machine sees them."""
        return self._backend.processes(self.state, self.state.node(node))

    def processes_of_run(self, run: str) -> dict[str, list[int]]:
        """node -> the processes with HOMELAB_RUN=`run` in their environment; every node is listed."""
        return {
            node.name: sorted(procfs.with_environment("HOMELAB_RUN", run, self._backend.processes(self.state, node))) for node in self.nodes
        }

    def down(self, *, keep_files: bool = False) -> Down:
        """End everything and remove it, then verify that nothing is left.

        `keep_files` keeps homes and logs (nodes/). Raises HomelabError that lists what could not be removed.
        """
        with locked(self.folder, OTHERS_TIMEOUT_S):
            self.state = load(self.folder)
            return self._remove(keep_files=keep_files)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exception: object) -> None:
        if is_lab(self.folder):
            self.down()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with locked(self.folder, OTHERS_TIMEOUT_S):
            self.state = load(self.folder)
            if self.state.phase != "up" or self.state.boot_id != boot_id():
                raise HomelabError(
                    "this lab is not running: it was interrupted while starting, or the machine was restarted since",
                    where=str(self.folder),
                    hint=Hint("{}, then {}", homelab("lab down", str(self.folder)), homelab("lab up", str(self.folder))),
                )
            yield

    def _start(self) -> None:
        state = self.state
        client_key = lab_files.prepare(state)
        self._backend.prepare(state)
        host_keys = []
        for node in state.nodes:
            host_key = self._backend.configure(state, node, client_key)
            host_keys.append(sshd.known_hosts_line(node.host, node.port, host_key))
        for node in state.nodes:
            self._backend.power_on(state, node)
        for node in state.nodes:
            sshd.wait_for_banner(node.host, node.port, state.node_folder(node) / "sshd.log", node.name)
        lab_files.write_cluster(state, host_keys)
        self.state = replace(state, phase="up")
        self.state.save()

    def _remove(self, *, keep_files: bool) -> Down:
        if is_lab(self.folder):
            again = Hint("once more: {}; lab.json was kept for that", homelab("lab down", str(self.folder)))
            self._remove_parts("the lab is not all gone", again, keep_files)
        (self.folder / LOCK_FILE).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()  # only when nothing of anybody is in it
        return Down(lab=self.state.id, folder_removed=not self.folder.exists())

    def _remove_parts(self, failure: str, hint: str, keep_files: bool) -> None:
        """Remove all that the lab is made of. Raises HomelabError that lists what is left."""
        self._backend.remove(self.state)
        left = self._backend.leftovers(self.state)
        if left:
            raise HomelabError(f"{failure}:\n" + "\n".join(left), where=str(self.folder), hint=hint)
        lab_files.remove(self.state, keep_nodes=keep_files)

    def _is_dead(self) -> bool:
        """Whether a crash or a reboot left it behind: nothing of it runs, and no node of it was switched off by a person."""
        is_alive = any(nodes.init_of(self.state, node) or node.power == "off" for node in self.nodes)
        return self.state.phase != "up" or self.state.boot_id != boot_id() or not is_alive

    @classmethod
    def _clean_dead(cls, path: Path, tell: Callable[[str], None]) -> None:
        """Remove a lab that a crash or a reboot left behind. Raises HomelabError when it lives."""
        old = cls(load(path))
        if not old._is_dead():
            raise HomelabError(
                "a lab is running here already",
                where=str(path),
                hint=Hint("look at it: {}; end it: {}", homelab("lab status", str(path)), homelab("lab down", str(path))),
            )
        why = "the machine was restarted" if old.state.boot_id != boot_id() else "it was interrupted"
        tell(f"cleaning up lab {old.state.id} first: {why}")
        with contextlib.suppress(FileNotFoundError):
            old._remove_parts("an earlier lab could not be removed", homelab("lab down", str(path)), keep_files=False)
