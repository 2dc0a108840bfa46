"""power: a node that sleeps, restarts or ends our processes ends the whole run."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.controller.base.hint import Command, Hint, homelab
from homelab.controller.base.units import listed
from homelab.controller.checks.check import Problem, check, subject
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.cluster import Node
from homelab.controller.facts.machine import SleepFacts
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import as_root, by_root, on_node, restart, written_as_root

DAY_S = 86400.0
# What logind may do that a run does not survive (logind.conf(5)), and the systemd targets that it goes through.
_THROUGH = {
    "suspend": "suspend.target", "hibernate": "hibernate.target", "hybrid-sleep": "hybrid-sleep.target",
    "suspend-then-hibernate": "suspend-then-hibernate.target", "sleep": "sleep.target",
}  # fmt: skip
_ENDS = ("poweroff", "reboot", "halt", "kexec", "soft-reboot")
_MASK = "systemctl mask sleep.target suspend.target hibernate.target hybrid-sleep.target suspend-then-hibernate.target"
_WSL_HINT = (
    "leave a window of it open; or in Windows on that machine, write into %UserProfile%\\.wslconfig: [general] instanceIdleTimeout=-1, "
    "then in PowerShell: wsl --update; wsl --shutdown"
)
_APT_FILE = "/etc/apt/apt.conf.d/99homelab"


@check("power.battery", "a laptop is plugged in", worst="warn", sees="power")
def battery(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn on battery."""
    if facts.power.source == "battery":
        hint = Hint("plug it in, then: {}", homelab("preflight --only power"))
        yield Problem("warn", "it runs on battery: it will slow down, and may go to sleep", hint)


@check("power.sleep", "the node does not go to sleep when it is idle or its lid is shut", worst="warn", sees="power")
def sleep(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn for a node that logind sends to sleep, or switches off, when nobody types or when the lid is shut."""
    policy = facts.power.sleep
    if policy is None:
        return
    reasons = []
    if _happens(policy.idle_action, policy):
        reasons.append(f"when nobody types (IdleAction={policy.idle_action})")
    if policy.lid and _happens(policy.lid_action, policy):
        reasons.append(f"when the lid is shut (HandleLidSwitch: {policy.lid_action})")
    if not reasons:
        return
    actions = {
        action for action, applies in ((policy.idle_action, True), (policy.lid_action, policy.lid)) if applies and _happens(action, policy)
    }
    if actions & set(_ENDS):
        lines = ["[Login]", "IdleAction=ignore", "HandleLidSwitch=ignore", "HandleLidSwitchExternalPower=ignore"]
        fix = _logind(node, facts, lines)
    else:
        fix = as_root(node, facts, _MASK)
    yield Problem("warn", f"it goes to sleep {' and '.join(reasons)}, and the run hangs", fix=fix)


@check("power.suspended", "the node was not asleep within the last day", worst="warn", sees="power")
def suspended(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn for a node that was asleep within the last day, because it may sleep again. Silent when the time is not known."""
    sleep = facts.power.suspended
    if (
        sleep is None
        or sleep.asleep_s < 1
        or (facts.power.sleep is not None and {"sleep.target", "suspend.target"} & set(facts.power.sleep.masked))
    ):
        return
    if sleep.ago_s is not None and sleep.ago_s < DAY_S:
        when = f"{_duration(sleep.ago_s)} ago"
    elif sleep.ago_s is None and sleep.up_s < DAY_S:
        when = f"since it started {_duration(sleep.up_s)} ago"
    else:
        return
    message = f"it was asleep within the last day ({when}; {_duration(sleep.asleep_s)} in total since its start)"
    forbid = as_root(node, facts, _MASK)
    yield Problem("warn", message, Hint("if nobody closed it by hand: {}", forbid), forbid)


@check("power.reboot", "no upgrade waits for a restart", worst="warn", sees="power")
def reboot(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn for a restart that waits: until then libraries and kernel are of two versions."""
    if facts.power.reboot_required is None:
        return
    names = facts.power.reboot_required
    packages_text = f" ({listed(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''})" if names else ""
    yield Problem(
        "warn",
        f"an upgrade waits for a restart{packages_text}",
        Hint("when no run is running there: {}", restart(node, facts, of_card=False)),
    )


@check("power.updates", "unattended upgrades leave the driver alone and do not restart the node", worst="warn", sees="power")
def updates(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn for unattended upgrades that restart the node, or that exchange NVIDIA's libraries under a running driver."""
    upgrades = facts.power.updates
    if upgrades is None:
        return
    if upgrades.reboots:
        line = 'Unattended-Upgrade::Automatic-Reboot "false";'
        write = on_node(node, written_as_root(facts, [line], _APT_FILE + "-reboot"))
        when = "at once" if upgrades.reboot_time == "now" else f"at {upgrades.reboot_time}"
        yield Problem("warn", f"unattended upgrades restart it by themselves ({when})", fix=write)
    if upgrades.driver_packages and (node.gpus or facts.gpu.cards):
        line = 'Unattended-Upgrade::Package-Blacklist { "nvidia-"; "libnvidia-"; "linux-modules-nvidia-"; };'
        write = on_node(node, written_as_root(facts, [line], _APT_FILE + "-nvidia"))
        message = f"unattended upgrades may replace {upgrades.driver_packages[0]} while the driver runs: nvidia-smi and CUDA then fail until a restart"
        yield Problem("warn", message, fix=write)


@check("power.linger", "programs of a login continue when the login ends", worst="fail", sees="power")
def linger(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where logind ends all processes of a login that ends: the run is one of them, lingering or not."""
    if facts.power.sleep is not None and facts.power.sleep.kills_processes:
        message = f"it ends all processes of {facts.system.user} when the login ends (KillUserProcesses=yes), and the run with them"
        yield Problem("fail", message, fix=_logind(node, facts, ["[Login]", "KillUserProcesses=no"], "91-homelab.conf"))


@check("power.wsl", "a WSL2 stays on when its last window is closed", worst="warn", sees="power")
def wsl(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn for a WSL2 that Windows ends by itself. Silent where .wslconfig says that it stays."""
    if facts.power.ends_with_windows:
        yield Problem("warn", "Windows ends this WSL2 soon after its last window is closed, and the run with it", _WSL_HINT)


def _happens(action: str, policy: SleepFacts) -> bool:
    if action in _THROUGH:
        return not {"sleep.target", _THROUGH[action]} & set(policy.masked)
    return action in _ENDS


def _logind(node: Node, facts: Facts, lines: list[str], name: str = "90-homelab.conf") -> Command:
    """The command that writes a drop-in and has logind read it (SIGHUP: it ends no session)."""
    folder = "/etc/systemd/logind.conf.d"
    write = written_as_root(facts, lines, f"{folder}/{name}")
    return on_node(node, by_root(f"mkdir -p {folder}", facts), write, by_root("systemctl kill -s HUP systemd-logind", facts))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


@subject("power", "the node stays awake until the run has ended", after="data")
def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    return "on mains" if facts.power.source == "mains" else "no battery"
