"""`homelab init` as a sequence: look for machines, ask the person, ask the machines, write cluster.toml."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.example import is_example
from homelab.controller.config.load import parse_cluster
from homelab.controller.facts.node import Facts
from homelab.controller.features.discover import cluster_file, proposal, sources
from homelab.controller.features.discover.candidates import SCAN, Candidate, Greeting, distinct, from_argument, moved, one_each
from homelab.controller.features.discover.draft import Draft
from homelab.controller.features.discover.greet import Greeted, as_candidate, greet, own_fingerprints
from homelab.controller.features.discover.proposal import SharedNetwork
from homelab.controller.features.preflight import gather
from homelab.controller.features.preflight.preflight import DEFAULT_PORT
from homelab.controller.remote import reach, ssh_login
from homelab.controller.remote.fanout import Fleet
from homelab.controller.remote.local import refuse_as_node


class Questions(Protocol):
    """The five kinds of questions. Each may raise InputError where there is nobody to ask."""

    def which(self, offered: Sequence[Greeting]) -> list[Greeting]:
        """The machines that are to be nodes."""
        ...

    def user(self, name: str, refused: str) -> str:
        """Another user name for this node; `refused` again where there is none."""
        ...

    def host_key(self, name: str, key: ssh_login.HostKey) -> bool:
        """Whether a new host key is right."""
        ...

    def network(self, shared: Sequence[SharedNetwork]) -> str:
        """The LAN, of several that all nodes share."""
        ...

    def this_machine(self, default: bool) -> bool:
        """Whether this machine trains too."""
        ...


@dataclass(frozen=True)
class InitResult:
    """What came of it. `updated`: node -> keys; `left_out`: node -> why; `greetings`: every machine that was asked, once."""

    cluster: Cluster
    greetings: tuple[Greeting, ...]
    facts: dict[str, Facts]
    added: tuple[str, ...]
    updated: dict[str, tuple[str, ...]]
    left_out: dict[str, HomelabError]
    same: dict[str, str]
    is_written: bool


@dataclass
class _Talk:
    """Who is asked and told, and what is not taken into the file, with the reason."""

    questions: Questions
    say: Say
    note: Say
    left_out: dict[str, HomelabError] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)


def initialise(path: Path, hosts: Sequence[str], questions: Questions, *, scan: bool = False, say: Say, note: Say) -> InitResult:
    """Find machines (those in `hosts`, else by all sources), gather their facts, and add them to the file of `path`.

    The file is replaced in one act at the end, and only where it changes. Raises InputError where nothing can be written or nobody be asked,
    UnreachableError where no machine could be asked.
    """
    talk = _Talk(questions, say, note)
    before = cluster_file.read(path)
    if before is not None and is_example(before.content):
        note(f"{path} was the example file of homelab; the machines that were found replace its nodes")
        kept = None
    else:
        kept = before.text if before is not None else None
    old = parse_cluster(kept, path) if kept is not None else None
    draft = Draft(path, kept, old)
    taken = {(node.host, node.port) for node in old.nodes} if old else set()
    found = [from_argument(word) for word in hosts] or sources.search(say, note) + (_scanned(say) if scan else [])
    draft, candidates = draft.with_candidates(distinct(found, taken))
    draft, greetings, greeted = _choose(draft, candidates, bool(hosts), talk)
    draft, asked = _with_this_machine(draft, talk)
    asked += _accepted(draft, greeted, talk)
    if not asked:
        _raise_nothing(talk, path)
    draft, facts = _facts(draft, asked, talk)
    talk.same |= proposal.same_machines([*draft.old_names, *draft.new], facts)
    draft = draft.only(set(facts) - set(talk.same))
    if not draft.new and old is None:
        _raise_nothing(talk, path)
    network = _network(draft, facts, talk)
    changes = draft.changes(facts)
    described = draft.described(facts)
    text = described.render(changes, network)
    cluster = parse_cluster(text, path)
    is_written = before is None or text != before.text
    if is_written:
        cluster_file.replace(path, before, text)
    names = dict(zip(described.new, draft.new, strict=True))
    return InitResult(
        cluster, tuple(greetings), {node.name: facts[place] for node in cluster.nodes if (place := names.get(node.name, node.name)) in facts},
        tuple(described.new), {name: tuple(keys) for name, keys in changes.items()}, talk.left_out, talk.same, is_written,
    )  # fmt: skip


def _scanned(say: Say) -> list[Candidate]:
    networks = sources.own_networks()
    say(f"trying port 22 in {', '.join(networks) or 'no network'}")
    return [Candidate(address, SCAN) for network in networks for address in sources.listening(network)]


def _choose(draft: Draft, candidates: dict[str, Candidate], all_named: bool, talk: _Talk) -> tuple[Draft, list[Greeting], Greeted]:
    """(the draft with the nodes that were chosen, all machines that were asked, what their servers showed)."""
    old = {node.name: as_candidate(node) for node in draft.old.nodes if node.host != "local"} if draft.old else {}
    if not old and not candidates:
        return draft, [], Greeted({}, {}, {}, {})
    talk.say("asking the SSH servers for their host keys")
    greeted = greet(draft.cluster(), {**old, **candidates})
    draft, candidates = _with_moved(draft, candidates, greeted, talk)
    names = {id(greeting): name for name, greeting in greeted.greetings.items()}
    kept, same = one_each(greeted.greetings.values())
    own = own_fingerprints(sources.own_host_keys())
    here = [greeting for greeting in kept if greeting.fingerprint in own and names[id(greeting)] in candidates]
    talk.same |= same | {greeting.candidate.host: "this machine" for greeting in here}
    new = [greeting for greeting in kept if names[id(greeting)] in candidates and greeting not in here]
    if all_named:
        chosen = new
    else:
        offered = [greeting for greeting in new if not greeting.problem]
        chosen = talk.questions.which(offered) if offered else []
    chosen_names = [names[id(greeting)] for greeting in chosen]
    return draft.only([*chosen_names, *(name for name in draft.new if name not in candidates)]), kept, greeted


def _with_moved(draft: Draft, candidates: dict[str, Candidate], greeted: Greeted, talk: _Talk) -> tuple[Draft, dict[str, Candidate]]:
    """The draft with the new places of old nodes, and the candidates without these. A host key that was accepted once is the machine, wherever it is."""
    for name, place in moved(
        greeted.remembered, {place: greeted.greetings[place] for place in candidates if place in greeted.greetings}
    ).items():
        candidate, key = candidates[place], greeted.keys[place]
        talk.note(f"{name} is at {candidate.host} now: it has the same host key")
        draft = draft.with_place(name, candidate).only(set(draft.new) - {place})
        key.remember(draft.cluster())
        greeted.greetings[name], greeted.keys[name] = greeted.greetings.pop(place), replace(greeted.keys.pop(place), is_known=True)
        del greeted.errors[name]
        candidates = {other: entry for other, entry in candidates.items() if other != place}
    return draft, candidates


def _with_this_machine(draft: Draft, talk: _Talk) -> tuple[Draft, list[str]]:
    """(the draft, the nodes that need no SSH)."""
    local = [node.name for node in draft.old.nodes if node.host == "local"] if draft.old else []
    if local or not talk.questions.this_machine(draft.old is None and sources.has_nvidia_card()):
        return draft, local
    refuse_as_node("this machine", "homelab init --this-machine")
    draft, name = draft.with_this_machine(socket.gethostname())
    return draft, [name]


def _accepted(draft: Draft, greeted: Greeted, talk: _Talk) -> list[str]:
    """The nodes whose host keys are known or were accepted, old ones first; the others are left out."""
    accepted: list[str] = []
    if not draft.old_names and not draft.new:  # no file has no nodes
        return accepted
    cluster = draft.cluster()
    for name in (*draft.old_names, *draft.new):
        key = greeted.keys.get(name)
        if name in greeted.errors:
            talk.left_out[name] = greeted.errors[name]
        elif name in greeted.greetings and key is not None and not key.is_known:
            if talk.questions.host_key(name, key):
                key.remember(cluster)
                accepted.append(name)
            else:
                again = homelab("init", cluster.node(name).host)
                talk.left_out[name] = HomelabError(
                    "its host key was not accepted",
                    where=f"node {name} ({key.host}:{key.port})",
                    hint=Hint("compare the fingerprints, then: {}", again),
                )
        elif name in greeted.greetings:
            accepted.append(name)
    return accepted


def _facts(draft: Draft, asked: list[str], talk: _Talk) -> tuple[Draft, dict[str, Facts]]:
    """The facts of the nodes that let us in, by another user name where the first was refused; the others are left out."""
    facts, errors = _ask(draft, asked, talk)
    again = []
    for name in [name for name, error in errors.items() if reach.is_login_refused(error)]:
        refused = ssh_login.resolve(draft.cluster().node(name)).user or ""
        user = talk.questions.user(name, refused)
        if user != refused:
            draft = draft.with_user(name, user)
            again.append(name)
    if again:
        more, failed = _ask(draft, again, talk)
        facts, errors = {**facts, **more}, {**errors, **failed}
    refused_again = {name: error for name, error in errors.items() if name not in facts}
    talk.left_out |= refused_again
    for name in refused_again:
        draft = draft.without_user(name)
    return draft, facts


def _ask(draft: Draft, names: list[str], talk: _Talk) -> tuple[dict[str, Facts], dict[str, HomelabError]]:
    with Fleet(draft.cluster().only(tuple(names))) as fleet:
        seen = gather.facts(fleet, recipe=None, material=[], port=DEFAULT_PORT, say=talk.say)
    return dict(seen.facts), dict(seen.unreachable)


def _network(draft: Draft, facts: dict[str, Facts], talk: _Talk) -> str | None:
    """The network to be written; None where the file says one already, or the nodes share none."""
    if draft.old is not None and draft.old.network:
        return None
    shared = proposal.shared_networks([facts[name] for name in (*draft.old_names, *draft.new) if name in facts])
    if not shared:
        return None
    return shared[0].network if len(shared) == 1 else talk.questions.network(shared)


def _raise_nothing(talk: _Talk, path: Path) -> None:
    for error in talk.left_out.values():
        raise error
    raise InputError(
        "no machine was chosen, and a cluster needs at least one", where=str(path),
        hint=Hint("name a machine that `ssh HOST` reaches: {}; or use this machine alone: {}", homelab("init HOST"), homelab("init --this-machine")),
    )  # fmt: skip
