"""cluster.toml: the defaults, and one error that lists all faults, each with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.load import cluster_text, load_cluster

GOOD = """[cluster]
name = "attic"
network = "192.168.1.0/24"
known_hosts = "keys/known_hosts"
[defaults]
user = "me"
identity_file = "keys/id"
[[nodes]]
name = "tower"
host = "192.168.1.100"
gpus = [{ model = "RTX 4070", vram_gb = 8 }]
[[nodes]]
name = "küche"
host = "laptop.local"
user = "you"
port = 2222
"""


def load(folder: Path, text: str) -> Cluster:
    file = folder / "cluster.toml"
    file.write_text(text, encoding="utf-8")
    return load_cluster(file)


def faults(folder: Path, text: str) -> list[str]:
    """The lines of the one error this text gives."""
    with pytest.raises(InputError) as caught:
        load(folder, text)
    assert caught.value.exit_code == 2
    assert "cluster.toml" in caught.value.where
    assert caught.value.hint
    return caught.value.message.splitlines()[1:]


def node(line: str) -> str:
    return f'[[nodes]]\nname = "a"\nhost = "10.0.0.1"\n{line}\n'


def test_defaults_and_relative_files(tmp_path: Path) -> None:
    cluster = load(tmp_path, GOOD)
    tower, kitchen = cluster.nodes
    assert (tower.user, tower.port, tower.python, tower.workdir) == ("me", 22, "~/.homelab/env/bin/python", "~/homelab")
    assert (kitchen.user, kitchen.port, kitchen.gpus) == ("you", 2222, ())
    assert cluster.known_hosts == str(tmp_path / "keys/known_hosts")
    assert tower.identity_file == str(tmp_path / "keys/id"), "relative to the file, wherever the command was started"


def test_every_fault_is_listed_at_once_with_its_line(tmp_path: Path) -> None:
    found = faults(tmp_path, """[cluster]
nam = "x"
network = "300.1/24"
[defauts]
port = 22
[defaults]
port = "22"
[[nodes]]
name = "a b"
host = "10.0.0.1"
gpus = [{ model = "x", vram = 8 }]
speed = -1
[[nodes]]
nme = "b"
host = "10.0.0.2"
prot = 3
""")  # fmt: skip
    expected = [
        ("line 2", 'unknown key "nam". Did you mean "name"?'),
        ("line 3", "a network like 192.168.1.0/24"),
        ("line 4", 'unknown section "defauts". Did you mean "defaults"?'),
        ("line 7", "a whole number"),
        ("line 9", "a name starts with a letter or digit"),
        ("line 11", 'unknown key "vram". Did you mean "vram_gb"?'),
        ("line 11", '"vram_gb" is missing'),
        ("line 12", "greater than 0"),
        ("line 13", '"name" is missing'),
        ("line 14", 'unknown key "nme". Did you mean "name"?'),
        ("line 16", 'unknown key "prot". Did you mean "port"?'),
    ]
    assert len(found) == len(expected), found
    for line, (number, words) in zip(found, expected, strict=True):
        assert line.strip().startswith(f"{number},") and words in line, (line, number, words)


def test_two_nodes_with_one_name_or_address(tmp_path: Path) -> None:
    twice = '[[nodes]]\nname = "a"\nhost = "10.0.0.1"\nlan_address = "10.1.0.1"\n'
    found = faults(tmp_path, twice + twice)
    assert [line.split(":")[0].strip() for line in found] == [
        "line 6, nodes.#2.name", "line 7, nodes.#2.host", "line 8, nodes.#2.lan_address",
    ]  # fmt: skip
    assert all('is already that of node "a"' in line for line in found)
    # One host behind two ports is two machines (a router that forwards).
    assert len(load(tmp_path, node("port = 22") + node("port = 23").replace('"a"', '"b"')).nodes) == 2


@pytest.mark.parametrize(
    "line",
    [
        'user = "-oProxyCommand=touch pwned"', 'user = "a b"', 'user = "a\\nrm -rf x"', 'user = "$(touch pwned)"', 'user = ""',
        'interface = "eth0; touch pwned"', 'interface = "a-name-that-is-too-long"', 'interface = ""',
        'workdir = "relative"', 'workdir = "/a\\nb"', 'workdir = "/a:b"', 'workdir = "/a\\u0000b"', 'python = "python3"',
        'lan_address = "tower.local"', "port = 0", "port = 99999999999999999999", "port = true", "speed = nan", "speed = inf",
        'hours = "23:00"', 'hours = "24:00-07:00"', 'hours = "08:00-08:00"', 'hours = "23:00-07:00,"', "hours = 23", 'hours = ["23:00-07:00"]',
        'yield_to = "steam"', "yield_to = [1]", 'yield_to = [""]', 'yield_to = ["/usr/bin/steam"]', 'yield_to = ["a\\nb"]', 'yield_to = ["' + 'x' * 65 + '"]',
        'yield_to = [' + '"x", ' * 65 + ']', 'yield_when = "always"', "yield_when = true", 'yield_when = ["gpu"]',
        'gpus = "RTX 4070"', 'gpus = [{ model = "x", vram_gb = -1 }]', 'gpus = [{ model = "", vram_gb = 1 }]',
    ],
)  # fmt: skip
def test_a_value_that_cannot_be(tmp_path: Path, line: str) -> None:
    found = faults(tmp_path, node(line))
    assert len(found) == 1, found
    assert found[0].strip().startswith("line 4, nodes.#1."), found


@pytest.mark.parametrize(
    "name", ["homelab", "python", "python3", "Python3.11", "pt_main_thread", "torchrun", "sshd", "ssh", "sshd-session", "bash", "sh", "systemd", "nvidia-smi"]
)  # fmt: skip
def test_a_program_that_is_no_owners(tmp_path: Path, name: str) -> None:
    found = faults(tmp_path, node(f'yield_to = ["{name}"]'))
    assert len(found) == 1 and "line 4, nodes.#1.yield_to" in found[0] and "a program that only the owner starts" in found[0], found


def test_when_the_house_comes_first(tmp_path: Path) -> None:
    cluster = load(tmp_path, '[defaults]\nhours = "23:00-7:00"\nyield_to = ["steam"]\nyield_when = "gpu"\n' + node("yield_to = []"))
    (one,) = cluster.nodes
    assert (one.hours, one.yield_to, one.yield_when) == ("23:00-07:00", (), "gpu")
    (one,) = load(tmp_path, node("")).nodes
    assert (one.hours, one.yield_to, one.yield_when) == ("", (), "never")


@pytest.mark.parametrize("host", ["", "a b", "-oProxyCommand=touch pwned", "$(touch pwned)", "a;b", "a\\nb", "`touch pwned`", "a'b"])
def test_a_host_that_a_shell_could_read(tmp_path: Path, host: str) -> None:
    assert "a host is an address" in faults(tmp_path, f'[[nodes]]\nname = "a"\nhost = "{host}"\n')[0]


@pytest.mark.parametrize("name", ["", "..", "a/b", "../x", "a b", "$(touch pwned)", "a\\n", "_a", "-a", "x" * 65, "a'b", 'a\\"b', ".a"])
def test_a_name_that_cannot_be_a_folder(tmp_path: Path, name: str) -> None:
    assert "a name starts with a letter or digit" in faults(tmp_path, f'[[nodes]]\nname = "{name}"\nhost = "h"\n')[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no machine: add a [[nodes]] section"),
        ('[nodes]\nname = "a"\n', "two brackets"),
        ('nodes = ["a"]\n', "two brackets"),
        ("cluster = 3\n" + node(""), "[cluster] is a section"),
        ("defaults = []\n" + node(""), "[defaults] is a section"),
        ('[defaults]\nname = "x"\n' + node(""), 'unknown key "name"'),
        ("[cluster]\nleft_out = []\n" + node(""), 'unknown key "left_out"'),
        ("[cluster]\nknown_hosts = 3\n" + node(""), "a text in quotes"),
    ],
)
def test_sections_of_the_wrong_shape(tmp_path: Path, text: str, words: str) -> None:
    assert any(words in line for line in faults(tmp_path, text))


def test_a_fault_in_the_defaults_is_blamed_once(tmp_path: Path) -> None:
    found = faults(tmp_path, '[defaults]\nport = "x"\n' + node("") + node("").replace('"a"', '"b"').replace(".1", ".2"))
    assert len(found) == 1 and found[0].strip().startswith("line 2, defaults.port"), found


@pytest.mark.parametrize(
    ("content", "words", "place"),
    [
        (b"[cluster\nname = 1", "not valid TOML", "line 1"),
        (b"name = \xff\xfe", "not UTF-8 text", "byte 7"),
        (b"x = " + b"[" * 5000, "not valid TOML", ""),
        (b"[cluster]\nname = 'a'\nname = 'b'\n", "not valid TOML", "line 3"),
    ],
)
def test_a_file_that_is_no_toml(tmp_path: Path, content: bytes, words: str, place: str) -> None:
    file = tmp_path / "cluster.toml"
    file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_cluster(file)
    assert words in caught.value.message
    assert place in caught.value.message + caught.value.where
    assert str(file) in caught.value.where and caught.value.hint


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no cluster.toml here") as missing:
        load_cluster(tmp_path / "nowhere.toml")
    assert missing.value.where.endswith("nowhere.toml") and "--cluster" in missing.value.hint
    folder = tmp_path / "it's $(a) folder"
    folder.mkdir()
    with pytest.raises(InputError, match="directory") as caught:
        load_cluster(folder)
    assert str(folder) == caught.value.where
    assert caught.value.hint == f"ls -ld '{tmp_path}/it'\"'\"'s $(a) folder'", "the hint can be pasted"


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(GOOD, encoding="utf-8-sig")
    assert load_cluster(file).name == "attic"


def test_the_kind_of_wire(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD).wire.profile == "auto"
    named = load(tmp_path, GOOD + '[network]\nprofile = "2.5gbe"\n')
    assert named.wire.profile == "2.5gbe"
    assert load(tmp_path, cluster_text(named)) == named, "written and read again"
    listed = faults(tmp_path, 'wire = "a"\n' + node("") + '[network]\nprofile = "2.5gb"\nspeed = 3\n')
    assert len(listed) == 3, listed
    assert any("got '2.5gb'; allowed: " in line and 'Did you mean "2.5gbe"?' in line and "line " in line for line in listed)
    assert any('network.speed: unknown key "speed"' in line for line in listed)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (node('identity_file = "~.ssh/id_ed25519"'), "line 4, nodes.#1.identity_file"),
        ('[defaults]\nidentity_file = "~.ssh/id_ed25519"\n' + node(""), "line 2, defaults.identity_file"),
        ('[cluster]\nknown_hosts = "~.ssh/id_ed25519"\n' + node(""), "line 2, cluster.known_hosts"),
        ('[notify]\napprise = "~.ssh/id_ed25519"\n' + node(""), "line 2, notify.apprise"),
    ],
)
def test_a_home_without_its_slash_is_a_fault_of_the_file(tmp_path: Path, text: str, place: str) -> None:
    words = 'this machine has no account ".ssh"; a file of your home begins with ~/: "~/.ssh/id_ed25519"'
    assert faults(tmp_path, text) == [f"  {place}: {words}"]


def test_what_only_the_node_reads_may_begin_as_it_likes(tmp_path: Path) -> None:
    assert load(tmp_path, node('environment = { SIGN = "~nobody-like-this" }')).nodes[0].environment == {"SIGN": "~nobody-like-this"}


@pytest.mark.parametrize("host", ["192.168..5", "gpu..lan", ".lan", f"{'a' * 64}.lan", "lan.."])
def test_a_host_that_no_network_has_is_a_fault_of_the_file(tmp_path: Path, host: str) -> None:
    (fault,) = faults(tmp_path, f'[[nodes]]\nname = "a"\nhost = "{host}"\n')
    assert fault.startswith(f"  line 3, nodes.#1.host: got {host!r}; allowed: a host with 1 to 63 characters before, between and behind")


@pytest.mark.parametrize("host", ["192.168.1.5", "gpu.lan.", "fe80::1%eth0", "an_alias", "küche.local", f"{'a' * 63}.lan"])
def test_a_host_that_a_network_may_have(tmp_path: Path, host: str) -> None:
    assert load(tmp_path, f'[[nodes]]\nname = "a"\nhost = "{host}"\n').nodes[0].host == host
