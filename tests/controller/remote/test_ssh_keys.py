"""The table of ssh_config's keys against the OpenSSH that is installed, and the words of a ProxyJump."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.remote import openssh_login, ssh_address, ssh_keys, ssh_route
from homelab.controller.remote.ssh_keys import USES, WHY, Use
from homelab.controller.remote.ssh_route import Hop

MANUAL = Path("/usr/share/man/man5/ssh_config.5.gz")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh")
def test_every_key_of_the_installed_openssh_is_in_the_table() -> None:
    said = subprocess.run(
        ["ssh", "-F", "/dev/null", "-G", "host"], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    ).stdout
    keys = {line.split()[0].lower() for line in said.splitlines()}
    assert len(keys) > 60 and sorted(keys - set(USES)) == []


@pytest.mark.skipif(not MANUAL.exists(), reason="no manual page of ssh_config")
def test_every_key_of_the_manual_is_in_the_table() -> None:
    keys = set(re.findall(r"^\.It Cm (\S+)", gzip.decompress(MANUAL.read_bytes()).decode(), re.MULTILINE))
    assert len(keys) > 90 and sorted(key for key in keys if key.lower() not in USES) == []


def test_each_key_stands_once_and_what_is_not_obeyed_has_its_reason() -> None:
    assert len(USES) == sum(len(names) for names in ssh_keys._BY_USE.values())
    assert [key for key, use in USES.items() if use in (Use.REFUSED, Use.NOTHING) and not WHY[key]] == []


def beyond(settings: dict[str, list[str]], **defaults: list[str]) -> tuple[str, ...]:
    return ssh_keys.beyond_paramiko(settings, defaults)


@pytest.mark.parametrize("key", [key for key, use in USES.items() if use is Use.OPENSSH])
def test_openssh_serves_each_key_that_it_alone_obeys(key: str) -> None:
    assert beyond({key: ["something"]}) == (key,) and beyond({key: ["a"]}, **{key: ["b"]}) == (key,)
    assert beyond({key: ["a"]}, **{key: ["a"]}) == ()


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh")
def test_what_was_set_for_the_node_and_is_left_out_is_told(tmp_path: Path) -> None:
    def told(lines: str) -> str:
        (tmp_path / "config").write_text(f"Host a\n{lines}")
        found = [
            subprocess.run(
                ["ssh", "-F", str(file), "-G", "a"], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
            ).stdout.splitlines()
            for file in ("/dev/null", tmp_path / "config")
        ]
        defaults, settings = (
            {line.split()[0]: [other.partition(" ")[2] for other in lines if other.split()[0] == line.split()[0]] for line in lines}
            for lines in found
        )
        return "; ".join(ssh_keys.without_effect(settings, defaults))

    set_for_the_node = {
        "LocalForward": "1 localhost:1", "RemoteForward": "1 localhost:1", "SetEnv": "A=b", "SendEnv": "A", "RemoteCommand": "tmux", "ForwardAgent": "yes",
        "DynamicForward": "1080", "LocalCommand": "true", "Tunnel": "yes",
    }  # fmt: skip
    for key, value in set_for_the_node.items():
        assert told(f"{key} {value}\n").startswith(f"{key} (") and told(f"{key} {value}\n").count("(") >= 1
    assert told("SetEnv A=b\nSendEnv A\n") == f"SendEnv, SetEnv ({ssh_keys._LAW})"
    assert told("SendEnv LANG LC_*\nHashKnownHosts yes\nControlMaster auto\nServerAliveInterval 5\nCompression yes\n") == ""


def test_a_key_of_a_newer_openssh_is_left_to_openssh() -> None:
    assert beyond({"brandnewkey": ["yes"]}) == ("brandnewkey",) and beyond({"brandnewkey": ["no"]}, brandnewkey=["no"]) == ()


def test_none_is_no_setting_but_for_the_agent() -> None:
    assert beyond({"proxycommand": ["none"], "certificatefile": ["none"]}) == ()
    assert beyond({"identityagent": ["none"]}) == ("identityagent",)


@pytest.mark.parametrize("key", [key for key, use in USES.items() if use in (Use.OBEYED, Use.NOTHING, Use.LOGIN, Use.REFUSED)])
def test_paramiko_serves_everything_else(key: str) -> None:
    assert beyond({key: ["other"]}, **{key: ["default"]}) == ()


def test_the_files_of_cluster_toml_need_no_openssh() -> None:
    node = Node(name="a", host="a", identity_file="/key")
    Cluster(nodes=(node,), known_hosts="/hosts")
    address = ssh_address.address_of(node, {"hostname": ["a"], "userknownhostsfile": ["/else"], "identityfile": ["~/%h"]})
    assert "userknownhostsfile" not in address.beyond_paramiko and "identityfile" not in address.beyond_paramiko


@pytest.mark.parametrize(
    ("jump", "hops"),
    [
        ("none", ()),
        ("gate", (Hop("gate"),)),
        ("me@gate:2222", (Hop("gate", "me", 2222),)),
        ("me@[fe80::1%eth0]:22", (Hop("fe80::1%eth0", "me", 22),)),
        ("[::1]", (Hop("::1"),)),
        ("a,b@[::1]:2,c:3", (Hop("a"), Hop("::1", "b", 2), Hop("c", None, 3))),
        ("ssh://me@gate:2222", (Hop("gate", "me", 2222),)),
        ("ssh://my%40name@gate/", (Hop("gate", "my@name"),)),
        ("me@corp@gate", (Hop("gate", "me@corp"),)),
    ],
)
def test_a_proxy_jump_is_read_as_openssh_reads_it(jump: str, hops: tuple[Hop, ...]) -> None:
    assert ssh_route.hops_of(jump) == hops
    assert ssh_route.hops_of(",".join(hop.spelled for hop in hops)) == hops


@pytest.mark.parametrize("jump", ["::1", "a:0", "a:99999", "a:b", "[::1", "a,,b", "@"])
def test_a_word_that_is_no_hop(jump: str) -> None:
    with pytest.raises(ValueError, match="is not a hop"):
        ssh_route.hops_of(jump)


@pytest.mark.parametrize(
    ("text", "files"),
    [("/a /b", ("/a", "/b")), ("/a b/c /d", ("/a b/c", "/d")), ("/dev/null", ()), ("none", ()), ("~/.ssh/x /dev/null", ("~/.ssh/x",))],
)
def test_known_hosts_files_are_printed_without_quotes(text: str, files: tuple[str, ...]) -> None:
    assert ssh_route.known_hosts_files({"userknownhostsfile": [text]}) == files


def test_known_hosts_that_hold_nothing_are_replaced_and_a_clusters_own_file_stands_alone() -> None:
    cluster = Cluster(nodes=(Node(name="a", host="a"),))
    assert ssh_route._known_hosts(cluster, {"userknownhostsfile": ["/dev/null"]}) == {"UserKnownHostsFile": "~/.ssh/known_hosts"}
    assert ssh_route._known_hosts(cluster, {"userknownhostsfile": ["/a"]}) == {}
    own = ssh_route._known_hosts(cluster.model_copy(update={"known_hosts": "/my hosts/%h"}), {"knownhostscommand": ["/x"]})
    assert own == {
        "UserKnownHostsFile": '"/my hosts/%%h"',
        "GlobalKnownHostsFile": "/dev/null",
        "VerifyHostKeyDNS": "no",
        "KnownHostsCommand": "none",
    }


@pytest.mark.parametrize(("value", "limit"), [("none", 10.0), ("0", 10.0), ("30", 30.0), ("100000", 120.0), ("x", 10.0)])
def test_the_persons_connect_timeout(value: str, limit: float) -> None:
    assert ssh_route.limit_s({"connecttimeout": [value]}) == limit


ROWS = [
    (
        "No ED25519 host key is known for [::1]:22 and you have requested strict checking.\r\nHost key verification failed.",
        "SSHException",
        "not found in known_hosts",
    ),
    ("me@a: Permission denied (publickey).\r\nConnection closed by UNKNOWN port 65535", "AuthenticationException", "me@a"),
    ("ssh: Could not resolve hostname x: Name or service not known", "gaierror", "x"),
    (
        "ssh: connect to host 127.0.0.1 port 1: Connection refused\r\nConnection closed by UNKNOWN port 65535",
        "ConnectionRefusedError",
        "refused",
    ),
    ("ssh: connect to host 10.0.0.1 port 22: No route to host", "OSError", "No route"),
    ("ssh: connect to host 10.0.0.1 port 22: Operation timed out", "TimeoutError", "10.0.0.1"),
    ("sh: nc: not found\nConnection closed by UNKNOWN port 65535", "SSHException", "nc: not found"),
    ("", "SSHException", "printed nothing"),
]


@pytest.mark.parametrize(("words", "kind", "said"), ROWS)
def test_what_openssh_says_becomes_an_error_that_has_words(words: str, kind: str, said: str) -> None:
    error, _ = openssh_login.error_of(words)
    assert type(error).__name__ == kind and said in str(error)
