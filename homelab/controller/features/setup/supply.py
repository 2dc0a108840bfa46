"""Where the files of an environment come from: this machine, or the package index where a node reaches it by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from homelab.controller.base.say import Say
from homelab.controller.features.setup import cache, python_archive, relay, send, uv_program, wheelhouse
from homelab.controller.features.setup.platform import Platform
from homelab.controller.features.setup.requirements import Lock, Package
from homelab.controller.features.setup.setup_plan import NeededFile
from homelab.controller.remote.agent import Agent
from homelab.shared.protocol import files
from homelab.shared.protocol.digest import file_sha256

_TARGET = send.Target("setup-receive")
# A wheel is a zip archive. Measured: 2.2 times for torch of PyPI (CUDA 13), 4 times for transformers.
_UNPACKED_TIMES = 4


class Supply:
    """For the nodes of one platform. A wheel that lies here is sent; any other is fetched by the node, or here where the node cannot.

    `fetches_here`: every wheel is fetched here, once for all nodes.
    """

    def __init__(self, lock: Lock, platform: Platform, say: Say, *, with_python: bool, fetches_here: bool) -> None:
        self._lock, self._platform, self._say = lock, platform, say
        text = cache.folder() / "requirements" / f"{lock.digest}.txt"
        files.write_atomic(text, lock.text.encode())
        uv = uv_program.fetch(platform.machine)
        python = dict([python_archive.fetch(platform.machine, platform.python)]) if with_python else {}
        self._here = {_part("uv.whl", uv): uv, **python, _part("requirements.txt", text): text}
        self._one_at_a_time = threading.Lock()
        self._lying: frozenset[str] = frozenset()
        self._wheels = {f"wheels/{package.wheel}": package for package in lock.packages}
        lying = {part.name: part for part in wheelhouse.parts(lock)}
        if fetches_here or not all(package.size_bytes for name, package in self._wheels.items() if name not in lying):
            self._fetch_here()
            lying = {part.name: part for part in wheelhouse.parts(lock)}
        self._lying = frozenset(lying)
        self._shared: dict[str, str] = {}
        self.parts = [*self._here, *(lying.get(name) or _estimated(name, package) for name, package in self._wheels.items())]

    def bring(self, agent: Agent, part: NeededFile, have: int, told: Callable[[int], None], refused: set[str]) -> None:
        """Have the node hold this file, of which it has `have` bytes. A node that could not fetch one is in `refused`, and gets all others sent.

        Raises HomelabError.
        """
        shared, package = self._shared.get(part.sha256), self._wheels.get(part.name)
        if shared and send.fetched(agent, _TARGET, part, shared, have, told) is None:
            return
        if package and part.name not in self._lying and agent.node.name not in refused and is_public(package.url):
            error = send.fetched(agent, _TARGET, part, package.url, have, told)
            if error is None:
                return
            refused.add(agent.node.name)
            self._say(f"{agent.node.name} cannot fetch the packages itself ({error.message}); this machine fetches and sends them")
        if package and part.name not in self._lying:
            self._fetch_here()
            part = next(real for real in wheelhouse.parts(self._lock) if real.name == part.name)
        send.file(agent, _TARGET, part, cache.folder() / part.name if package else self._here[part], have, told)

    @contextmanager
    def shared_by(self, agent: Agent) -> Iterator[None]:
        """Until the end of the block this node, which has everything, serves the wheels to the others."""
        wheels = [part for part in self.parts if part.name in self._wheels]
        with relay.sharing(agent, _TARGET, wheels, self._say) as addresses:
            self._shared = addresses
            try:
                yield
            finally:
                self._shared = {}

    def _fetch_here(self) -> None:
        with self._one_at_a_time:
            self._say(f"fetching the packages for {self._platform.name}")
            wheelhouse.fetch(self._lock, self._platform)
            self._lying = frozenset(self._wheels)


def is_public(url: str) -> bool:
    """Whether a node may be given this address: one on a network, without a person's name or password in it."""
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and "@" not in parts.netloc


def _part(name: str, path: Path) -> NeededFile:
    return NeededFile(name=name, sha256=file_sha256(path), size_bytes=path.stat().st_size)


def _estimated(name: str, package: Package) -> NeededFile:
    return NeededFile(name=name, sha256=package.sha256, size_bytes=package.size_bytes, unpacked_bytes=_UNPACKED_TIMES * package.size_bytes)
