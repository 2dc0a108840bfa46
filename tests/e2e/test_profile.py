"""The bytes of a profile against the counters of the nodes' interfaces: payload against payload, in the profiled steps."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.lab import Lab
from scripts.practice import tiny_model
from scripts.practice.desk import Desk

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.thorough, pytest.mark.timeout(500)]

FIRST, LAST = 4, 6  # the last of the run: after another one zero2 would gather at once, before the counters are read
HEADER_BYTES = 66  # of each packet: Ethernet 14, IPv4 20, TCP with timestamps 32
RECIPE = """
[model]
name = "{model}"
[data]
train = "chats.jsonl"
[method]
kind = "full"
[train]
global_batch = 6
steps = {steps}
learning_rate = 1e-4
seq_len = 64
precision = "bf16"
gradient_checkpointing = false
[parallel]
strategy = "{strategy}"
shares = "equal"
micro_batch = 1
[checkpoint]
every_steps = 1000
[tracking]
tensorboard = false
"""


class Counters:
    """What the interfaces of the nodes have sent, a hundred times a second: payload bytes of each, by node."""

    def __init__(self, lab: Lab) -> None:
        self._files = {node.name: f"/proc/{min(lab.processes_of(node.name))}/net/dev" for node in lab.nodes}  # of the node's own network
        self._seen: list[tuple[float, dict[str, int]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Counters:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def payload_between(self, begin: float, end: float) -> dict[str, int]:
        """Rather a little more than less."""
        before = max((seen for seen in self._seen if seen[0] <= begin), key=lambda seen: seen[0])
        after = min((seen for seen in self._seen if seen[0] >= end), key=lambda seen: seen[0])
        return {name: after[1][name] - before[1][name] for name in self._files}

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self._seen.append((time.time(), {name: _sent_payload(file) for name, file in self._files.items()}))


def _sent_payload(file: str) -> int:
    """Without the headers of each packet. See proc_pid_net(5): 8 columns of what came, then bytes and packets that were sent."""
    lines = [line.partition(":") for line in Path(file).read_text().splitlines()[2:]]
    fields = [rest.split() for name, _, rest in lines if name.strip() != "lo"]
    return sum(int(words[8]) - HEADER_BYTES * int(words[9]) for words in fields)


@pytest.fixture(scope="module")
def own_desk(lab: Lab, base: Path) -> Iterator[Desk]:
    desk = Desk(base / "desk of profiles", lab)
    desk.folder.mkdir()
    model = tiny_model.tiny_llama(base / "profiled", hidden=320, intermediate=896, layers=2)
    tiny_model.write_jsonl(desk.folder / "chats.jsonl", tiny_model.chat_rows(60))
    for strategy in ("ddp", "zero2"):
        desk.write(f"{strategy}.toml", RECIPE.format(model=model, strategy=strategy, steps=LAST))
    yield desk


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_bytes_are_those_of_the_interfaces(strategy: str, own_desk: Desk, lab: Lab) -> None:
    with Counters(lab) as counters:
        run = own_desk.launch(f"{strategy}.toml", "--profile", f"{FIRST}-{LAST}")
        run.wait_for_end(1, len(lab.nodes), timeout_s=300)
        found: dict[str, Any] = own_desk.json("profile", run.name)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2] and found["missing"] == []
    begin, end = min(rank["times"][0][0] for rank in found["ranks"]), max(rank["times"][-1][1] for rank in found["ranks"])
    counted = counters.payload_between(begin, end)
    for rank in found["ranks"]:
        sent, by_interface = sum(row["sent_bytes"] for row in rank["exchanges"]), counted[rank["node"]]
        print(
            f"{strategy}, {rank['node']}: {sent} bytes in the profile, {by_interface} of payload sent by its interface, {100 * (sent / by_interface - 1):+.2f} %"
        )
        assert sent > 20e6 and sent == pytest.approx(by_interface, rel=0.05)
    said = own_desk.homelab("profile", run.name).stdout
    assert f"steps {FIRST} to {LAST} on rank 0, 1, 2, {strategy}" in said and "Next: open https://ui.perfetto.dev" in said
    for file in found["traces"]:
        with gzip.open(own_desk.folder / file, "rt", encoding="utf-8") as stream:
            names = {event["name"] for event in json.load(stream)["traceEvents"]}
        assert {"input", "forward", "backward", "reduction", "optimizer"} <= names
    for rank in found["memory"]:
        assert rank["peak_bytes"] == pytest.approx(rank["predicted_bytes"], rel=0.2)
