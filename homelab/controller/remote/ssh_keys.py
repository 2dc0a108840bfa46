"""Every key of ssh_config(5), and what homelab does with it. Pure.

paramiko serves a node whose keys are all obeyed here or mean nothing. One key of `Use.OPENSSH` with another value than OpenSSH's own
makes OpenSSH itself the transport (`homelab.controller.remote.openssh`), as does a key that is not in the table: it is newer than the table.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence


class Use(enum.Enum):
    """What becomes of a key."""

    OBEYED = "obeyed"
    OPENSSH = "used: OpenSSH itself is the transport"
    LOGIN = "used: OpenSSH itself tries the login if paramiko's is refused"
    NOTHING = "means nothing here"
    REFUSED = "not supported"


_CONFIG = "it decides which lines of the files apply; `ssh -G` has read them"
_NO_TERMINAL = "no terminal, no window and no forwarded port is opened on a node"
_NOBODY_TYPES = "nobody can type there: log in with a key"
_OWN_CONNECTION = "homelab opens its own connection, because a shared one may have no verified host key"
_OWN_LIMITS = "homelab looks for signs of life itself, every 5 s"
_LAW = "put variables for commands on a node into cluster.toml: [nodes] environment is recorded with every run"
_OWN_PROGRAMS = "only the way to a node runs programs here: ProxyCommand, Match exec"
_NO_AGENT = "no agent is forwarded to a node: root there could log in elsewhere as you"
_OWN_COMMANDS = "homelab's own commands run on a node"
_NOT_SERVED = "it is not for the client of a login"

_BY_USE: Mapping[Use, Mapping[str, str]] = {
    Use.OBEYED: {
        "Host": _CONFIG, "Match": _CONFIG, "Include": _CONFIG, "IgnoreUnknown": _CONFIG, "Tag": _CONFIG,
        "Hostname": "the address", "Port": "the port, unless cluster.toml has one", "User": "the account, unless cluster.toml has one",
        "IdentityFile": "these keys, unless cluster.toml has one", "IdentitiesOnly": "only these keys",
        "ConnectTimeout": "how long OpenSSH waits for a server; a direct connection has homelab's own limit",
    },
    Use.OPENSSH: {
        "AddressFamily": "", "BindAddress": "", "BindInterface": "", "CanonicalDomains": "", "CanonicalizeFallbackLocal": "", "CanonicalizeHostname": "",
        "CanonicalizeMaxDots": "", "CanonicalizePermittedCNAMEs": "", "CASignatureAlgorithms": "", "CertificateFile": "", "CheckHostIP": "", "Ciphers": "",
        "Compression": "", "ConnectionAttempts": "", "EnableSSHKeysign": "", "GlobalKnownHostsFile": "", "HostbasedAcceptedAlgorithms": "", "HostbasedAuthentication": "",
        "HostKeyAlgorithms": "", "HostKeyAlias": "", "IdentityAgent": "", "IPQoS": "", "KexAlgorithms": "", "KnownHostsCommand": "", "MACs": "",
        "ObscureKeystrokeTiming": "", "PKCS11Provider": "", "PreferredAuthentications": "", "ProxyCommand": "",
        "ProxyJump": "every hop has its own settings, and its host key is verified like a node's", "ProxyUseFdpass": "", "PubkeyAcceptedAlgorithms": "", "PubkeyAuthentication": "",
        "RefuseConnection": "", "RekeyLimit": "", "RequiredRSASize": "", "RevokedHostKeys": "", "SecurityKeyProvider": "", "TCPKeepAlive": "", "UseKeychain": "",
        "UserKnownHostsFile": "unless cluster.toml has known_hosts", "VerifyHostKeyDNS": "", "VersionAddendum": "",
    },
    Use.LOGIN: {
        "GSSAPIAuthentication": "", "GSSAPIClientIdentity": "", "GSSAPIDelegateCredentials": "", "GSSAPIKexAlgorithms": "", "GSSAPIKeyExchange": "",
        "GSSAPIRenewalForcesRekey": "", "GSSAPIServerIdentity": "", "GSSAPITrustDns": "",
    },
    Use.NOTHING: {
        "AddKeysToAgent": "no key is put anywhere", "ChannelTimeout": _OWN_LIMITS, "ClearAllForwardings": _NO_TERMINAL, "EnableEscapeCommandline": _NO_TERMINAL,
        "EscapeChar": _NO_TERMINAL, "ExitOnForwardFailure": _NO_TERMINAL, "FingerprintHash": "fingerprints are SHA256", "ForkAfterAuthentication": _NO_TERMINAL,
        "ForwardX11": _NO_TERMINAL, "ForwardX11Timeout": _NO_TERMINAL, "ForwardX11Trusted": _NO_TERMINAL, "GatewayPorts": _NO_TERMINAL,
        "HashKnownHosts": "hashed names are read; `homelab trust` writes plain ones", "LogLevel": "homelab has its own messages", "LogVerbose": "homelab has its own messages",
        "PermitRemoteOpen": _NO_TERMINAL, "RequestTTY": _NO_TERMINAL, "ServerAliveCountMax": _OWN_LIMITS, "ServerAliveInterval": _OWN_LIMITS,
        "SessionType": _NO_TERMINAL, "StdinNull": _NO_TERMINAL, "StreamLocalBindMask": _NO_TERMINAL, "StreamLocalBindUnlink": _NO_TERMINAL,
        "SyslogFacility": _NOT_SERVED, "TunnelDevice": _NO_TERMINAL, "VisualHostKey": "fingerprints are compared as text", "WarnWeakCrypto": _NOT_SERVED,
        "XAuthLocation": _NO_TERMINAL,
    },
    Use.REFUSED: {
        "BatchMode": _NOBODY_TYPES, "ControlMaster": _OWN_CONNECTION, "ControlPath": _OWN_CONNECTION, "ControlPersist": _OWN_CONNECTION,
        "DynamicForward": _NO_TERMINAL, "ForwardAgent": _NO_AGENT,
        "KbdInteractiveAuthentication": _NOBODY_TYPES, "KbdInteractiveDevices": _NOBODY_TYPES, "LocalCommand": _OWN_PROGRAMS,
        "LocalForward": _NO_TERMINAL, "NoHostAuthenticationForLocalhost": "every host key is verified", "NumberOfPasswordPrompts": _NOBODY_TYPES,
        "PasswordAuthentication": _NOBODY_TYPES, "PermitLocalCommand": _OWN_PROGRAMS,
        "RemoteCommand": _OWN_COMMANDS, "RemoteForward": _NO_TERMINAL, "SendEnv": _LAW, "SetEnv": _LAW,
        "StrictHostKeyChecking": "every host key is verified: `homelab trust NODE` accepts one, once", "Tunnel": _NO_TERMINAL,
        "UpdateHostKeys": "a node adds no key to your files by itself",
    },
}  # fmt: skip
_MISSED = (_NO_TERMINAL, _LAW, _OWN_PROGRAMS, _NO_AGENT, _OWN_COMMANDS)
_OF_LANGUAGE = re.compile(r"LANG|LC_\S+")  # distributions send these for every host, in /etc/ssh/ssh_config
USES: Mapping[str, Use] = {name.lower(): use for use, names in _BY_USE.items() for name in names}
"""Key in small letters, as `ssh -G` prints it -> what becomes of it."""
WHY: Mapping[str, str] = {name.lower(): why for names in _BY_USE.values() for name, why in names.items()}
"""How a key is obeyed where that is not plain, or why it is not."""


def beyond_paramiko(
    settings: Mapping[str, Sequence[str]], defaults: Mapping[str, Sequence[str]], *, instead: Iterable[str] = ()
) -> tuple[str, ...]:
    """The keys of `ssh -G` that OpenSSH alone obeys and that have another value than without any file.

    `instead`: keys that cluster.toml answers (its known_hosts, its identity_file). Values with tokens or variables are OpenSSH's to expand.
    """
    own = set(instead)
    found = [
        key
        for key, values in settings.items()
        if USES.get(key, Use.OPENSSH) is Use.OPENSSH and key not in own and _differs(key, values, defaults)
    ]
    if "identityfile" not in own and any("%" in value or "$" in value for value in settings.get("identityfile", ())):
        found.append("identityfile")
    return tuple(found)


def refused(settings: Mapping[str, Sequence[str]], defaults: Mapping[str, Sequence[str]]) -> list[str]:
    """Keys that are not supported and could let `ssh HOST` in where homelab is kept out, each with the reason."""
    spelled = {name.lower(): name for name in _BY_USE[Use.REFUSED]}
    return [
        f"{spelled[key]} ({WHY[key]})" for key in ("stricthostkeychecking", "nohostauthenticationforlocalhost", "controlpath")
        if _differs(key, settings.get(key, ()), defaults)
    ]  # fmt: skip


def without_effect(settings: Mapping[str, Sequence[str]], defaults: Mapping[str, Sequence[str]]) -> list[str]:
    """Keys that were set for something on the node or through the connection, and that homelab leaves out, with the reason: "SetEnv (REASON)"."""
    found: dict[str, list[str]] = {}
    for name, why in _BY_USE[Use.REFUSED].items():
        values = [value for value in settings.get(name.lower(), ()) if not (name == "SendEnv" and _OF_LANGUAGE.fullmatch(value))]
        if why in _MISSED and values and _differs(name.lower(), values, defaults):
            found.setdefault(why, []).append(name)
    return [f"{', '.join(names)} ({why})" for why, names in found.items()]


def _differs(key: str, values: Sequence[str], defaults: Mapping[str, Sequence[str]]) -> bool:
    """A key without a default is "none" by default, but for the agent: the person's own is asked then."""
    is_unset = not defaults.get(key) and list(values) in ([], ["none"], [""]) and not (key == "identityagent" and values)
    return not is_unset and list(values) != list(defaults.get(key, ()))
