"""Edits of cluster.toml: what they are not about stays to the byte."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.config.load import parse_cluster
from homelab.controller.features.discover import cluster_edit
from homelab.controller.features.discover.cluster_edit import NewNode

TEXT = """\
# the house
[cluster]  # all
name = "a"  # its name

[[nodes]]  # upstairs
name = "tower"  # mine
host = "192.0.2.1"  # by cable
gpus = [{ model = "RTX 3070", vram_gb = 8 }]  # since 2022

# the next one is old
[[nodes]]
name = "laptop"
host = "192.0.2.2"
# [[nodes]]
"""


def lines_kept(before: str, after: str) -> bool:
    left = iter(after.splitlines())
    return all(line in left for line in before.splitlines())


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "\n", "\n\n"])
def test_nodes_are_added_at_the_end(end: str, last: str) -> None:
    text = (TEXT.rstrip("\n") + last).replace("\n", end)
    after = cluster_edit.with_nodes(text, [NewNode("pi", "pi.lan", "me", 2222, about="small"), NewNode("nas", "nas")])
    assert after.startswith(text) and "# small" in after
    assert ("\r" in after) == (end == "\r\n") and after.count("\r") in (0, after.count("\n"))
    cluster = parse_cluster(after, Path("cluster.toml"))
    assert [node.name for node in cluster.nodes] == ["tower", "laptop", "pi", "nas"] and cluster.node("pi").port == 2222


def test_keys_are_put_behind_the_host_and_values_keep_their_comments() -> None:
    cards: list[dict[str, str | int | float]] = [{"model": "RTX 4090", "vram_gb": 24}]
    after = cluster_edit.with_keys(TEXT, 0, {"user": "me", "gpus": cards})
    after = cluster_edit.with_keys(after, 1, {"gpus": cards})
    after = cluster_edit.with_network(after, "192.0.2.0/24")
    found = tomllib.loads(after)
    assert found["nodes"][0]["gpus"] == found["nodes"][1]["gpus"] == cards and found["nodes"][0]["user"] == "me"
    assert found["cluster"] == {"name": "a", "network": "192.0.2.0/24"}
    kept = TEXT.replace('{ model = "RTX 3070", vram_gb = 8 }', '{model = "RTX 4090", vram_gb = 24}')
    assert lines_kept(kept, after), after


def test_a_file_without_a_cluster_section() -> None:
    text = '[[nodes]]\nname = "a"\nhost = "b"'
    after = cluster_edit.with_network(text, "192.0.2.0/24")
    assert after.startswith(text) and parse_cluster(after, Path("c")).network == "192.0.2.0/24"


def test_sections_that_stand_apart_are_not_torn() -> None:
    text = TEXT.replace("# the next one is old", '[defaults]\nuser = "me"')
    assert parse_cluster(cluster_edit.with_keys(text, 1, {"port": 2222}), Path("c")).node("laptop").port == 2222
    with pytest.raises(InputError, match="without moving"):
        cluster_edit.with_keys(text, 0, {"gpus": [{"model": "RTX 4090", "vram_gb": 24}]})


def test_the_text_of_a_new_file_is_a_cluster() -> None:
    text = cluster_edit.with_network(cluster_edit.with_nodes(cluster_edit.NEW_FILE, [NewNode("a", "b")]), "192.0.2.0/24")
    assert parse_cluster(text, Path("c")).network == "192.0.2.0/24" and text.count("\n\n\n") == 0


CARDS: list[dict[str, str | int | float]] = [{"model": "RTX 4090", "vram_gb": 24}]


def test_a_form_that_cannot_be_edited_is_named_with_what_to_write() -> None:
    """The text would be TOML no more, and the reader would be told that of a file that is."""
    inline = 'nodes = [{ name = "a", host = "b" }]\n'
    with pytest.raises(InputError, match=r"the file has the machines as nodes = \[...\]") as raised:
        cluster_edit.with_nodes(inline, [NewNode("pi", "pi.lan", port=2222, gpus=tuple(CARDS))])
    by_hand = raised.value.hint.partition("add to the list: ")[2]
    after = inline.replace("}]", "}, " + by_hand + "]")
    assert parse_cluster(after, Path("c")).node("pi").gpus[0].model == "RTX 4090"

    cards = '[[nodes]]\nname = "a"\nhost = "b"\n[[nodes.gpus]]\nmodel = "RTX 3070"\nvram_gb = 8\n'
    with pytest.raises(InputError, match=r"`gpus` of machine 1 in a form that homelab cannot change, like \[\[nodes.gpus\]\]") as raised:
        cluster_edit.with_keys(cards, 0, {"gpus": CARDS})
    line = raised.value.hint.partition("host: ")[2]
    assert parse_cluster(cards.partition("[[nodes.gpus]]")[0] + line, Path("c")).nodes[0].gpus[0].vram_gb == 24

    dotted = f'cluster.name = "a"\n{cards}'
    with pytest.raises(InputError, match="without a section") as raised:
        cluster_edit.with_network(dotted, "192.0.2.0/24")
    assert raised.value.hint.endswith('network = "192.0.2.0/24"')
