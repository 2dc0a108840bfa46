"""A cluster as the text of a cluster.toml, for a machine that has none."""

from __future__ import annotations

from homelab.controller.config.cluster import Cluster


def cluster_text(cluster: Cluster) -> str:
    """What `homelab.controller.config.load.load_cluster` reads as the same cluster."""
    import tomlkit  # here: a supervisor on a head node does without it

    content = cluster.model_dump(mode="json", exclude={"left_out"}, exclude_none=True)
    nodes = content.pop("nodes")
    sections = {name: content.pop(name) for name in ("energy", "notify")} | {"network": content.pop("wire")}
    return tomlkit.dumps({"cluster": content, **sections, "nodes": nodes})
