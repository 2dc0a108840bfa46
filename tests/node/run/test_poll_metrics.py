"""The metrics that a node sends: those that are new, and no more of the file is read than these."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homelab.node.run.poll import _metrics

pytestmark = pytest.mark.timeout(60)
ALL_LINES = 1 << 60


def line(step: int) -> str:
    return json.dumps({"kind": "train", "step": step, "compute_s": 0.25}) + "\n"


def bytes_read() -> int:
    """By this process so far."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.parametrize("asked", ["by its place", "none"])
def test_a_poll_of_a_long_run_reads_what_is_new(tmp_path: Path, asked: str) -> None:
    costs = []
    for count in (1000, 20_000):
        file = tmp_path / "metrics.jsonl"
        file.write_text("".join(map(line, range(count))))
        _, end = _metrics(str(file), 0, count, True)
        assert end == file.stat().st_size
        with file.open("a") as stream:
            stream.write(line(count))
        before = bytes_read()
        if asked == "none":
            assert _metrics(str(file), ALL_LINES, 500) == ([], 0)
        else:
            new, end = _metrics(str(file), count, 500, True, end)
            assert [entry["step"] for entry in new] == [count] and end == file.stat().st_size
        costs.append(bytes_read() - before)
    assert max(costs) < 2000 and abs(costs[1] - costs[0]) < 100


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["append", "half", "anew", "broken"]), st.integers(0, 9)), max_size=12), st.integers(1, 6))
def test_asked_by_their_place_all_lines_come_once(acts: list[tuple[str, int]], most: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, step, end = os.path.join(folder, "metrics.jsonl"), 0, 0
        known: list[int] = []
        for act, count in [*acts, ("append", 1)]:
            # "anew": somebody types the commands of the attempt once more, and fewer steps are made at first
            with open(file, "w" if act == "anew" else "a") as stream:
                stream.write({"append": "\n", "half": "{"[:count], "anew": "", "broken": "\n[5]\n"}[act])
                if act == "append":
                    stream.writelines(map(line, range(step, step + count)))
                    step += count
            known = [] if act == "anew" else known
            before = -1
            while end != before:
                before = end
                new, end = _metrics(file, len(known), most, True, end)
                known += [entry["step"] for entry in new]
            whole = [text for text in Path(file).read_text().split("\n")[:-1] if text.startswith('{"')]
            assert known == [json.loads(text)["step"] for text in whole]
