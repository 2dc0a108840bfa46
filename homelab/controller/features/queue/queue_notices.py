"""The messages of a runner to the owner of the queue, by [notify] of cluster.toml as it is at that moment."""

from __future__ import annotations

from pathlib import Path

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.say import Say
from homelab.controller.config import load
from homelab.controller.config.cluster import Occasion
from homelab.controller.features.supervise.notifier import Notifier


class QueueNotices:
    """Each message is sent in a thread: the runner goes on at once. `say` hears what a way of telling refuses."""

    def __init__(self, cluster_file: Path, say: Say) -> None:
        self._cluster_file, self._say = cluster_file, say
        self._sent: list[Notifier] = []

    def tell(self, occasion: Occasion, subject: str, text: str) -> None:
        """A message whose title is "homelab: SUBJECT OCCASION". A cluster.toml that cannot be read is said by the runner itself."""
        try:
            notify = load.load_cluster(self._cluster_file).notify
        except HomelabError:
            return
        notifier = Notifier(notify, subject, self._say)
        notifier.tell(occasion, text)
        self._sent.append(notifier)

    def close(self) -> None:
        """Wait for what is under way, within its time limit."""
        for notifier in self._sent:
            notifier.close()
