"""The words with which OpenSSH goes to a node: ours before those of any file, for every hop on the way too.

`ssh -J` hands none of its -o options on to the hops, whose host keys are to be verified as a node's are. So the hops of a ProxyJump become
the ProxyCommand that OpenSSH makes of them (ssh.c, main: "ssh ... -W '[%h]:%p' HOP"), with our options in it.
"""

from __future__ import annotations

import re
import shlex
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass

from homelab.controller.base.errors import UnreachableError
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.remote import ssh_settings
from homelab.controller.remote.ssh_settings import Settings

HOP_LIMIT_S = 10.0
MOST_HOPS = 8
_MOST_LIMIT_S = 120.0
# First in the list wins over everything in any file (ssh_config(5)). The value of a key that this OpenSSH does not know yet is left out.
_OURS = {
    "BatchMode": "yes", "StrictHostKeyChecking": "yes", "NoHostAuthenticationForLocalhost": "no", "UpdateHostKeys": "no", "ForwardAgent": "no", "ForwardX11": "no",
    "ClearAllForwardings": "yes", "Tunnel": "no", "PermitLocalCommand": "no", "RemoteCommand": "none", "RequestTTY": "no", "StdinNull": "no", "SessionType": "default",
    "ForkAfterAuthentication": "no", "VisualHostKey": "no", "LogLevel": "ERROR", "ServerAliveInterval": "5", "ServerAliveCountMax": "6",
}  # fmt: skip
_SINCE_8_7 = ("StdinNull", "SessionType", "ForkAfterAuthentication")
_USER_HOST_PORT = re.compile(r"^(?:(?P<user>.+)@)?(?:\[(?P<address>[^\]]+)\]|(?P<host>[^@:\[\]]+))(?::(?P<port>\d+))?$")


@dataclass(frozen=True)
class Hop:
    """One machine on the way, as `ssh HOST` names it: an address or an alias."""

    host: str
    user: str | None = None
    port: int | None = None

    def as_node(self) -> Node:
        """The hop with the words of a node, for `ssh -G` and for people."""
        return Node.model_construct(name=self.host, host=self.host, user=self.user, port=self.port or 22, identity_file=None)

    @property
    def spelled(self) -> str:
        """As in a ProxyJump."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{f'{self.user}@' if self.user else ''}{host}{f':{self.port}' if self.port else ''}"

    @property
    def words(self) -> list[str]:
        """Its place on OpenSSH's command line."""
        user, port = ["-l", self.user] if self.user else [], ["-p", str(self.port)] if self.port else []
        return [*user, *port, "--", self.host]


def hops_of(jump: str) -> tuple[Hop, ...]:
    """The hops of a ProxyJump in the order in which they are passed: "user@host:port", "[::1]:2222", "ssh://host:port". Raises ValueError."""
    return () if jump.lower() in ("", "none") else tuple(_hop(text.strip()) for text in jump.split(","))


def _hop(text: str) -> Hop:
    address = text.removeprefix("ssh://").removesuffix("/") if text.startswith("ssh://") else text
    found = _USER_HOST_PORT.match(address)
    if found is None or not 0 < int(found["port"] or 22) < 65536:
        raise ValueError(f'"{text}" is not a hop: user@host:port')
    user = urllib.parse.unquote(found["user"]) if found["user"] and address != text else found["user"]
    return Hop(found["address"] or found["host"], user, int(found["port"]) if found["port"] else None)


def options(cluster: Cluster, settings: Settings, *, limit_s: float = HOP_LIMIT_S) -> list[str]:
    """OpenSSH's options for a node or a hop, our own before all others: nobody is asked, and only keys that are known here are accepted."""
    ours = {name: value for name, value in _OURS.items() if name not in _SINCE_8_7 or name.lower() in settings}
    ours |= {"ConnectTimeout": f"{limit_s:.0f}", **_known_hosts(cluster, settings)}
    return [word for name, value in ours.items() for word in ("-o", f"{name}={value}")]


def _known_hosts(cluster: Cluster, settings: Settings) -> dict[str, str]:
    """The cluster's own file alone where it names one, else the files that OpenSSH would read. One that holds nothing (/dev/null) is the user's."""
    if cluster.known_hosts:
        alone = {"UserKnownHostsFile": _quoted(cluster.known_hosts), "GlobalKnownHostsFile": "/dev/null", "VerifyHostKeyDNS": "no"}
        return alone | ({"KnownHostsCommand": "none"} if "knownhostscommand" in settings else {})
    if "userknownhostsfile" in settings and not known_hosts_files(settings):
        return {"UserKnownHostsFile": "~/.ssh/known_hosts"}
    return {}


def known_hosts_files(settings: Settings) -> tuple[str, ...]:
    """The user's known_hosts files in the settings that can hold a key. `ssh -G` prints them without quotes, so a space may be part of a name."""
    files: list[str] = []
    for word in " ".join(settings.get("userknownhostsfile", ())).split(" "):
        if files and not word.startswith(("/", "~")):
            files[-1] += f" {word}"
        elif word:
            files.append(word)
    return tuple(file for file in files if file.lower() not in ("none", "/dev/null"))


def _quoted(file: str) -> str:
    escaped = file.replace("%", "%%")
    return f'"{escaped}"' if " " in file else escaped


def limit_s(settings: Settings) -> float:
    """Seconds until a server must have greeted: the person's ConnectTimeout where there is one."""
    text = settings.get("connecttimeout", ["none"])[0]
    return min(max(float(text), 1.0), _MOST_LIMIT_S) if text.isdigit() and int(text) else HOP_LIMIT_S


def proxy(cluster: Cluster, hops: Sequence[Hop], where: str, depth: int = 0) -> str:
    """The ProxyCommand that goes through the hops. Raises UnreachableError where there are too many: a hop's own ProxyJump may come back to it."""
    last, before = hops[-1], list(hops[:-1])
    if depth + len(before) >= MOST_HOPS:
        raise UnreachableError(
            f"the way has more than {MOST_HOPS} hops (does a ProxyJump lead back to itself?)", where=f"{where}, by way of {last.host}",
            hint=f"edit ~/.ssh/config: ProxyJump of {last.host}; see it with: {ssh_settings.by_hand(last.as_node())}",
        )  # fmt: skip
    settings = ssh_settings.of(last.as_node())
    # As with `ssh -J a,b HOST`: b is reached through a, whatever b's own ProxyJump says; the first hop goes its own way.
    before = before or list(jumps(settings, f"{where}, by way of {last.host}"))
    way = ["-o", f"ProxyCommand={proxy(cluster, before, where, depth + 1)}"] if before else []
    words = ["ssh", *options(cluster, settings, limit_s=limit_s(settings)), "-o", "ControlMaster=no", "-o", "ControlPath=none", *way]
    # A command is expanded once by OpenSSH (%h, %p) and once by the shell; only -W's two are meant for this expansion.
    head = shlex.join(words).replace("%", "%%")
    return f"{head} -W '[%h]:%p' {shlex.join(last.words).replace('%', '%%')}"


def jumps(settings: Settings, where: str) -> tuple[Hop, ...]:
    """The hops in the settings of `ssh -G`. Raises UnreachableError for a word that is none."""
    try:
        return hops_of(settings.get("proxyjump", ["none"])[0])
    except ValueError as error:
        raise UnreachableError(
            f"ProxyJump of the SSH configuration: {error}", where=where, hint="edit ~/.ssh/config: ProxyJump user@host:port"
        ) from error


def words(cluster: Cluster, node: Node, settings: Settings, where: str, *, before: Sequence[str] = ()) -> list[str]:
    """`ssh` and its options for a node, up to the place for a command: [*words, "--", HOST]. Those of `before` win over all others."""
    hops = jumps(settings, where)
    way = ["-o", f"ProxyCommand={proxy(cluster, hops, where)}"] if hops else []
    key = ["-i", node.identity_file, "-o", "IdentitiesOnly=yes"] if node.identity_file else []
    return ["ssh", *before, *options(cluster, settings, limit_s=limit_s(settings)), *way, *key, *ssh_settings.words_of(node)]
