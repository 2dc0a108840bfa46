"""Which lines of the logs meet the recipe's own log_policies: looked for with a bound, for a pattern can take longer than a life."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from homelab.shared.recipe import LogPolicy

PATTERN_S = 1.0  # of processor time, so that a busy machine has no effect; a normal pattern takes milliseconds
_ALL_S = 15.0
_LONGEST_LINE = 4096
# A process of its own: nothing ends the matching of a pattern inside of one but its end. The system ends it when the time is
# over (setitimer(2), SIGPROF), whatever becomes of us.
_PROGRAM = """
import json, re, signal, sys
request = json.load(sys.stdin)
for pattern in request["patterns"]:
    signal.setitimer(signal.ITIMER_PROF, request["pattern_s"])
    search = re.compile(pattern).search
    met = [node for node, lines in request["logs"].items() if any(map(search, lines))]
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps(met), flush=True)
"""


def met(logs: Mapping[str, Sequence[str]], policies: Sequence[LogPolicy]) -> tuple[list[tuple[str, LogPolicy]], list[LogPolicy]]:
    """(node, policy) for each node with a line that a policy means, and the policies that took too long: those count as not met.

    `logs`: node -> lines; of a longer line only the first 4096 characters count.
    """
    lines = {node: [line[:_LONGEST_LINE] for line in log_lines] for node, log_lines in logs.items() if log_lines}
    matches: list[tuple[str, LogPolicy]] = []
    slow: list[LogPolicy] = []
    rest = list(policies)
    ends_at = time.monotonic() + _ALL_S
    while lines and rest:
        answers = _ask(lines, rest, ends_at - time.monotonic())
        matches += [(node, policy) for policy, nodes in zip(rest, answers, strict=False) for node in nodes]
        slow += rest[len(answers) :][:1]
        rest = rest[len(answers) + 1 :]
    return matches, slow


def _ask(lines: Mapping[str, Sequence[str]], policies: Sequence[LogPolicy], left_s: float) -> list[list[str]]:
    """The nodes that meet each policy, up to the first that takes too long."""
    if left_s <= 0:
        return []
    request = {"patterns": [policy.pattern for policy in policies], "logs": lines, "pattern_s": PATTERN_S}
    try:
        completed = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=left_s,
            check=False,
        )
        output = completed.stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
    except OSError:  # no process can be had
        output = b""
    return [json.loads(line) for line in output.splitlines(keepends=True) if line.endswith(b"\n")]
