"""Whether a node is wanted by its owner: what the controller asks it to look for, and the signs that it sees.

Whether the node leaves, and when it comes back, is decided in `homelab.controller.features.supervise.house_judge`.
"""

from __future__ import annotations

from typing import Annotated, Optional

from homelab.shared.markers import AtLeast, Below, Longest, Matches
from homelab.shared.protocol.marks import OR_NONE, PLAIN, Count
from homelab.shared.protocol.message import Message
from homelab.shared.protocol.request import Request, UsableName

MOST_SIGNS = 32
Programs = Annotated[tuple[Annotated[str, Longest(64)], ...], Longest(64)]
When = Annotated[str, Longest(16)]


class HouseSign(Message):
    """One sign. `kind`: "asked" (the file `homelab.shared.protocol.layout.YIELD`), "program" (of `yield_to`), "card" (a stranger's process on a card
    of ours), "memory" (a card's memory is taken, and it cannot be told by whom) or "input" (somebody is at the keyboard or the mouse). `name` of the
    program, and its `pid`; 0 for what is no process.
    """

    kind: Annotated[str, Matches(r"^(?:asked|program|card|memory|input)\z")]
    name: Annotated[str, Longest(64), PLAIN] = ""
    pid: Count = 0

    @property
    def words(self) -> str:
        """ "steam runs there"; the same for every process of this name."""
        return {
            "asked": "somebody at the machine asked for it",
            "program": f"{self.name} runs there",
            "card": f"{self.name or 'another program'} uses its card",
            "memory": "another program takes the memory of its card",
            "input": "somebody is at its keyboard",
        }[self.kind]


class House(Message):
    """All signs of one look. `minute`: of the day, by the node's own clock and time zone."""

    minute: Annotated[int, AtLeast(0), Below(24 * 60)]
    signs: Annotated[tuple[HouseSign, ...], Longest(MOST_SIGNS)] = ()


HouseOrNone = Annotated[Optional[House], OR_NONE]


class HouseRequest(Request):
    """`house`: one look. `run`: whose newest attempt here tells what was on the card before it; None: none."""

    run: Optional[UsableName] = None
    yield_to: Programs = ()
    yield_when: When = "never"
