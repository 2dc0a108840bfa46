"""The limits of what a message may say, as marks in the types of its fields; and the types that many messages share.

A mark says what is allowed; `homelab.controller.facts.reading` enforces it. In `Annotated[str, Longest(400), PLAIN]` the limits come before the cleaning.
"""

from __future__ import annotations

from typing import Annotated, Any, Optional

from homelab.shared.markers import Above, AtLeast, AtMost, Below, Longest, Mark, Matches
from homelab.shared.protocol.layout import USABLE_NAME


class NamedMark(Mark):
    """What needs more than a comparison; `value` is its name."""

    def admits(self, value: Any) -> bool:
        return -INFINITE < value < INFINITE if self == FINITE else super().admits(value)


INFINITE = float("inf")
FINITE = NamedMark("finite")  # no NaN, no infinity
FINITE_OR_NONE = NamedMark("finite or none")  # those become None
PLAIN = NamedMark("plain")  # a line that a terminal may get: without escape sequences and control characters
PLAIN_LINES = NamedMark("plain lines")
OR_NONE = NamedMark("or none")  # a damaged file on a node gives no value; the rest of the answer stays
OR_EMPTY = NamedMark("or empty")
READABLE = NamedMark("readable")  # without the entries that are damaged
ADDRESS = NamedMark("address")
PROCESS = NamedMark("process")  # process 0 and below are groups of processes to kill(1): None
FEW_LINES = NamedMark("few lines")  # of a run: not more ranks and lines of metrics than this program keeps

LATEST = 32_503_680_000.0
"""The year 3000: no run of ours was then, and no calendar has to show what a damaged file says."""
MOST_RANKS = 4096
MOST_LINES = 50_000  # of metrics: twice what a node sends at once (`homelab.node.run.poll`), and some
MOST_STEPS, MOST_FILES = 100_000, 100_000
MOST_RUNS, MOST_NODES, MOST_ATTEMPTS = 20_000, 1000, 10_000

Json = dict[str, Any]
Count = Annotated[int, AtLeast(0), Below(2**63)]
PortNumber = Annotated[int, AtLeast(1), AtMost(65535)]
Rank = Annotated[int, AtLeast(0), Below(65536)]
Attempt = Annotated[int, AtLeast(0), Below(10**9)]
Step = Annotated[int, AtLeast(0), Below(10**12)]
Steps = Annotated[tuple[Step, ...], Longest(MOST_STEPS)]
Seconds = Annotated[float, FINITE]
Duration = Annotated[float, AtLeast(0), FINITE]
Moment = Annotated[float, AtLeast(0), Below(LATEST), FINITE]
Number = Annotated[Optional[float], FINITE_OR_NONE]
CountOrNone = Annotated[Optional[Count], OR_NONE]
MomentOrNone = Annotated[Optional[Moment], OR_NONE]
Line = Annotated[str, PLAIN]
Lines = Annotated[str, PLAIN_LINES]
LineOrEmpty = Annotated[str, OR_EMPTY, PLAIN]
Tail = Annotated[tuple[Line, ...], Longest(50_000)]
RunName = Annotated[str, Matches(f"^(?:{USABLE_NAME})\\z"), Longest(200)]
FileName = Annotated[str, Longest(300)]
NodeName = Annotated[str, Longest(200)]
StepName = Annotated[str, Matches(r"^[0-9]{1,12}\z")]
Words = Annotated[str, Longest(4000)]
Path = Annotated[str, Longest(4096)]
Pid = Annotated[Optional[int], PROCESS]
Pids = Annotated[tuple[Annotated[int, Above(0), Below(2**31)], ...], Longest(10_000)]
Run = Annotated[str, Matches(r"^\w"), Longest(200)]  # never an option of `homelab stop`
