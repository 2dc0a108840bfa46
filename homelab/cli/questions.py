"""What a person is asked on a terminal, and the error where there is nobody to ask."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import typer

from homelab.cli import terminal
from homelab.controller.base import own_machine
from homelab.controller.base.errors import InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.sanitize import plain

if TYPE_CHECKING:
    from homelab.controller.features.discover.candidates import Greeting
    from homelab.controller.features.discover.proposal import SharedNetwork
    from homelab.controller.remote.ssh_login import HostKey

T = TypeVar("T")


def accepts_host_key(name: str, key: HostKey, *, yes: bool, hint: Hint, err: bool = False) -> bool:
    """Whether a new host key, shown with its fingerprint, is right. Raises InputError with this hint where nobody can say so."""
    from homelab.controller.remote import hostkeys

    terminal.echo(f"{name} ({key.host}:{key.port}) shows the host key {key.key.get_name()}", err=err)
    terminal.echo(f"  {hostkeys.fingerprint(key.key)}", err=err)  # on a line of its own: it is compared by eye
    terminal.echo("  compare it on the node's own screen: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub", err=err)
    ask = "  Is the fingerprint the same? Save this key?"
    return yes or asked(lambda: terminal.confirm(ask, err=err), "whether this key is right", f"node {name}", hint, err=err)


def asked(question: Callable[[], T], what: str, where: str, hint: Hint, *, err: bool = True) -> T:
    """The answer; `err`: the question stands on stderr. Raises InputError where standard input ends and is no terminal; Ctrl-C is Ctrl-C."""
    try:
        return question()
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        terminal.echo(err=err)  # the question has no end of line
        raise InputError(f"there is no terminal to ask {what}", where=f"{where}, standard input", hint=hint) from None


class InitQuestions:
    """The questions of `homelab init` (`homelab.controller.features.discover.initialise.Questions`): an option answers each, `yes` takes every default."""

    def __init__(self, yes: bool, user: str, network: str, this_machine: bool | None) -> None:
        self._yes, self._user, self._network, self._this_machine = yes, user, network, this_machine

    def which(self, offered: Sequence[Greeting]) -> list[Greeting]:
        """By number, host or name; by default those of ~/.ssh/config that are not on the internet."""
        expected = [number for number, greeting in enumerate(offered, 1) if greeting.is_expected]
        terminal.echo("machines that answer by SSH:", err=True)
        for number, greeting in enumerate(offered, 1):
            words = dict.fromkeys(word for word in (greeting.candidate.name, greeting.candidate.host, greeting.address) if word)
            terminal.echo(f"  {number:2}  {plain('  '.join(words))}  ({greeting.candidate.source})", err=True)
        default = " ".join(map(str, expected)) or "none"
        hint = Hint("name them: {}; or take the proposal: {}", homelab("init HOST ..."), homelab("init --yes"))
        while True:
            answer = (
                default
                if self._yes
                else self._text("Which of them are nodes? (numbers or names, all, none)", default, "which machines are nodes", hint)
            )
            chosen = _chosen(answer, offered)
            if chosen is not None:
                return chosen
            terminal.echo(f"  {answer!r}: one of these is not in the list", err=True)

    def user(self, name: str, refused: str) -> str:
        """Asked once for each node that refused the login."""
        if self._user or self._yes:
            return self._user or refused
        hint = Hint("name it: {}; or take what ssh uses: {}", homelab("init --user NAME"), homelab("init --yes"))
        return self._text(f"{name} refuses the login as {refused}. User name on this machine", refused, "for the user name", hint)

    def host_key(self, name: str, key: HostKey) -> bool:
        """As `homelab trust` asks."""
        hint = Hint("compare the fingerprint on the node, then: {}", homelab("init --yes"))
        return accepts_host_key(name, key, yes=self._yes, hint=hint, err=True)

    def network(self, shared: Sequence[SharedNetwork]) -> str:
        """The best one by default."""
        networks = [one.network for one in shared]
        if self._network in networks or self._yes:
            return self._network if self._network in networks else networks[0]
        terminal.echo("the nodes share several networks:", err=True)
        for one in shared:
            speed = f", {one.speed_mbit} Mbit/s" if one.speed_mbit else ""
            terminal.echo(f"  {one.network}  ({'wired' if one.is_wired else 'Wi-Fi'}{speed})", err=True)
        hint = Hint("name it: {}; or take the fastest: {}", homelab("init --network", networks[0]), homelab("init --yes"))
        while (
            answer := self._text("Which network is for the training?", networks[0], "which network is for the training", hint)
        ) not in networks:
            terminal.echo(f"  {answer!r}: not in the list", err=True)
        return answer

    def this_machine(self, default: bool) -> bool:
        """Whether it has a card is the default for a new file."""
        if self._this_machine is not None or self._yes or not own_machine.is_linux():
            return default if self._this_machine is None else self._this_machine
        hint = Hint(
            "say it: {} or {}; or take the proposal: {}",
            homelab("init --this-machine"),
            homelab("init --no-this-machine"),
            homelab("init --yes"),
        )
        return asked(
            lambda: terminal.confirm("Is this machine a node, too?", default=default, err=True),
            "whether this machine is a node, too",
            "homelab init",
            hint,
        )

    def _text(self, question: str, default: str, what: str, hint: Hint) -> str:
        return asked(lambda: terminal.prompt(question, default), what, "homelab init", hint).strip()


def _chosen(answer: str, offered: Sequence[Greeting]) -> list[Greeting] | None:
    """The machines that an answer names; None where a word of it names none."""
    words = re.split(r"[\s,]+", answer.strip())
    if words in (["all"], ["none"]):
        return list(offered) if words == ["all"] else []
    by_word = {str(number): greeting for number, greeting in enumerate(offered, 1)}
    for greeting in offered:
        for word in (greeting.address, greeting.candidate.host, greeting.candidate.name):
            by_word.setdefault(word, greeting)
    if not all(word in by_word for word in words):
        return None
    chosen = [by_word[word] for word in words]
    return [greeting for greeting in offered if greeting in chosen]
