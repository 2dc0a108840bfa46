"""`homelab tensorboard`: event files that follow the run, and TensorBoard beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

from homelab.controller.base import package
from homelab.controller.base.say import Say
from homelab.controller.features.track import event_files, forwarder_lock
from homelab.controller.features.track.event_files import EventFiles
from homelab.controller.features.track.metrics_source import KnownMetrics, MetricsSource
from homelab.controller.features.track.tensorboard_server import TensorBoardServer
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import store
from homelab.controller.run.paths import RunPaths


def show(fleet: Fleet, paths: RunPaths, *, port: int, say: Say, serving: Callable[[str, KnownMetrics], None]) -> None:
    """Until Ctrl-C. `serving` is told the address and the first look, once. Raises HomelabError; the run is never touched.

    A forwarder that writes the event files already goes on doing so.
    """
    package.require("tensorboard", event_files.REQUIREMENT)
    source = MetricsSource(fleet, paths)
    with ExitStack() as stack:
        files = EventFiles(paths.event_files) if stack.enter_context(forwarder_lock.held(paths, "tensorboard")) else None
        if files is not None:
            stack.callback(files.close)
        say("gathering the run's metrics")
        look = _look(source, files)
        say("starting TensorBoard")
        server = TensorBoardServer(paths.event_files.parent, port)
        stack.callback(server.close)
        serving(server.address, look)
        trouble = ""
        with suppress(KeyboardInterrupt):
            while True:
                server.refuse_ended()
                time.sleep(look.next_s)
                if not look.is_over:
                    look = _look(source, files)
                    if look.trouble != trouble and look.trouble:
                        say(f"the curves stand still: {look.trouble}")
                    trouble = look.trouble


def _look(source: MetricsSource, files: EventFiles | None) -> KnownMetrics:
    look = source.look()
    if files is not None:
        with store.disk_errors_as_hints(files.folder):
            files.bring(look.points)
    return look
