"""What counts as a sign of a node's owner: tables of processes in the words of the real programs, one machine a file of machines/."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from homelab.node.run import house_signs
from homelab.node.run.house_signs import RunningProgram
from homelab.shared.protocol.house_messages import MOST_SIGNS, HouseSign

pytestmark = pytest.mark.timeout(30)
MACHINES = {file.stem: tomllib.loads(file.read_text()) for file in sorted((Path(__file__).parent / "machines").glob("*.toml"))}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_machines(machine: dict[str, Any]) -> None:
    processes = [RunningProgram(pid, (comm, Path(first).name)) for pid, comm, first in machine["processes"]]
    wanted = house_signs.named(processes, machine["yield_to"])
    signs = [f"program:{name}:{process.pid}" for name, process in wanted if process.pid not in machine["ours"]]
    uses = house_signs.computing(machine["compute"]) + house_signs.drawing(machine["draw"], machine.get("uuids", {}))
    strangers = house_signs.on_cards(uses, machine.get("cards", ()), {*machine["known"], *machine["ours"]})
    assert signs + [f"card:{use.pid}" for use in strangers] == machine["signs"]
    used = house_signs.used_memory(machine.get("memory", ""), machine.get("cards", ()))
    assert used == (machine["used_mib"] << 20 if "used_mib" in machine else None)


def test_what_is_new_and_draws_counts_by_its_memory_or_its_time() -> None:
    def counts(**use: Any) -> bool:
        return bool(house_signs.on_cards([house_signs.CardUse("GPU-a", 7, **use)], (), ()))

    assert not counts(kind="G", memory_bytes=500 << 20, percent=20.0)
    assert counts(kind="G", memory_bytes=501 << 20) and counts(kind="C+G", percent=21.0) and counts(kind="C")
    assert not counts(kind="G"), "of which nothing is told"


def test_a_name_is_that_of_the_kernel_or_of_the_command() -> None:
    def found(yield_to: str, *names: str) -> bool:
        return bool(house_signs.named([RunningProgram(7, names)], [yield_to]))

    assert found("blender", "blender") and found("blender", "AppRun", "blender") and found("BLENDER", "Blender")
    assert found("davinci-resolve-studio", "davinci-resolve"), "15 letters are kept of it (comm)"
    assert not found("steam", "steamwebhelper") and not found("blender", "blender-helper")


SESSION = "Remote={}\nClass={}\nType={}\nActive={}\nIdleHint={}\nIdleSinceHint=0\nLockedHint={}\n"


@pytest.mark.parametrize(
    ("sessions", "is_there"),
    [
        ([("no", "user", "wayland", "yes", "no", "no")], True),
        ([("no", "user", "x11", "yes", "yes", "no")], False),
        ([("no", "user", "x11", "yes", "no", "yes")], False),  # locked
        ([("no", "user", "x11", "no", "no", "no")], False),  # another one has the screen
        ([("yes", "user", "tty", "yes", "no", "no")], False),  # our own login
        ([("no", "greeter", "wayland", "yes", "no", "no")], False),
        ([("yes", "user", "tty", "yes", "no", "no"), ("no", "user", "wayland", "yes", "no", "no")], True),
        ([], False),
    ],
)
def test_somebody_at_the_keyboard(sessions: list[tuple[str, ...]], is_there: bool) -> None:
    assert house_signs.is_at_input("\n".join(SESSION.format(*session) for session in sessions)) == is_there


@pytest.mark.parametrize(
    "words", ["", "No devices were found", "a, b", "GPU-a, x, 1", "#\n# gpu pid\n0 x", "GPU-a, 1, 2, 3", "\x1b[31m", "0 7"]
)
def test_words_that_are_no_table(words: str) -> None:
    assert not house_signs.computing(words) and house_signs.used_memory(words, ()) is None and not house_signs.is_at_input(words)
    assert not house_signs.drawing(words, {})


def test_a_message_has_room_for_all_of_it() -> None:
    many = [HouseSign(kind="program", name=str(number // 2), pid=number + 1) for number in range(200)]
    bounded = house_signs.bounded(many)
    assert len(bounded) == MOST_SIGNS and bounded[0] == HouseSign(kind="program", name="0", pid=1)
