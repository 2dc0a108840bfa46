"""`homelab web`: a port, a token, and the server behind them, until Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psutil
import uvicorn

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Command, Options, homelab
from homelab.controller.config.cluster import Cluster
from homelab.controller.features.web import app
from homelab.controller.features.web.observer import Observer
from homelab.controller.features.web.page_chats import PageChats
from homelab.controller.features.web.run_acts import RunActs

FIRST_PORT = 8808
_MOST_PORTS = 100
_LOOK_S = 0.25
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServedAt:
    """Where a page is served: the bound socket, the addresses that lead to it, and the names that a browser may use."""

    listener: socket.socket
    addresses: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def port(self) -> int:
        port: int = self.listener.getsockname()[1]
        return port

    @property
    def is_lan(self) -> bool:
        """Others than this machine can ask for it."""
        return self.names != LOOPBACK


def bind(port: int | None, *, is_lan: bool) -> ServedAt:
    """The port, or the first free one from FIRST_PORT on. Raises HomelabError where it is taken."""
    entries = [entry for found in psutil.net_if_addrs().values() for entry in found if entry.family == socket.AF_INET] if is_lan else []
    own = tuple(entry.address for entry in entries if not entry.address.startswith(("127.", "169.254.")))
    addresses = ("127.0.0.1", *own)
    name = socket.gethostname().lower()
    names = (*LOOPBACK, *own, name, f"{name.partition('.')[0]}.local") if is_lan else LOOPBACK
    host = "0.0.0.0" if is_lan else "127.0.0.1"
    for number in range(FIRST_PORT, FIRST_PORT + _MOST_PORTS) if port is None else [port]:
        try:
            return ServedAt(socket.create_server((host, number)), addresses, names)
        except (OSError, OverflowError) as error:
            if port is not None:
                raise _refused(host, port, error) from error
    raise HomelabError(
        "no port is free", where=f"{host}, ports {FIRST_PORT} to {FIRST_PORT + _MOST_PORTS - 1}", hint=homelab("web --port 0")
    )


def _refused(host: str, port: int, error: Exception) -> HomelabError:
    if not isinstance(error, OSError) or error.errno != errno.EADDRINUSE:
        return InputError(f"this port cannot be opened: {error}", where=f"--port {port}", hint=homelab("web"))
    for number in range(port + 1, min(65536, port + _MOST_PORTS)):
        with suppress(OSError), socket.create_server((host, number)):
            return HomelabError(f"port {port} is taken by another program", where=f"{host}:{port}", hint=homelab(f"web --port {number}"))
    return HomelabError(f"port {port} is taken by another program", where=f"{host}:{port}", hint=homelab("web --port 0"))


def serve(
    cluster: Cluster, runs_dir: Path, options: Options, place: ServedAt, *, run: str | None, serving: Callable[[list[str]], None]
) -> list[Command]:
    """Until Ctrl-C; the commands of pages that were ended with it. `serving` is told the addresses, with their token, once they can be opened;
    `run`: the one that they lead to.
    """
    token = secrets.token_urlsafe(24)
    path = f"/runs/{quote(run)}" if run else "/"
    observer, chats = Observer(cluster, runs_dir, options), PageChats(cluster, runs_dir)
    acts = RunActs(options, observer.look_soon, does_act=not place.is_lan)
    made = app.make(observer, chats, acts, token=token, hosts=place.names, cookie=f"homelab-{place.port}")
    config = uvicorn.Config(
        made, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False, timeout_graceful_shutdown=2,
    )  # fmt: skip
    server = uvicorn.Server(config)

    # Looked at, and waited for by `sleep`: a Ctrl-C in the middle of `Thread.join` makes Python 3.11 take the thread for ended
    # (Thread._wait_for_tstate_lock), and a second one in `Event.wait` leaves its lock released twice.
    is_over = threading.Event()

    async def until_told() -> None:
        try:
            serving = asyncio.create_task(server.serve(sockets=[place.listener]))
            while not (server.should_exit or serving.done()):
                await asyncio.sleep(_LOOK_S)
            await asyncio.gather(chats.close(), observer.close(), acts.close())  # before the server waits for its streams
            await serving
        finally:
            is_over.set()

    # Signals belong to the main thread, where Ctrl-C ends this command as it ends every other.
    thread = threading.Thread(target=lambda: asyncio.run(until_told()), name="web", daemon=True)
    thread.start()
    try:
        while not (server.started or is_over.is_set()):
            time.sleep(0.01)
        serving([f"http://{address}:{place.port}{path}?token={token}" for address in place.addresses])
        while not is_over.is_set():
            time.sleep(_LOOK_S)
        raise HomelabError("the server of the page has ended by itself", where=f"port {place.port}", hint=homelab("web"))
    except KeyboardInterrupt:
        logging.getLogger("uvicorn.error").disabled = True  # streams that are cut now are no errors
        server.should_exit = True
        deadline = time.monotonic() + 2 * _LOOK_S + 4
        while not is_over.is_set() and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        place.listener.close()
    return acts.cut
