"""`homelab explain`: a list, one topic, several to choose from, and what nobody knows; without a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from homelab.cli.main import run
from homelab.controller.diagnose import topic_index

pytestmark = pytest.mark.timeout(200)
Said = Callable[..., tuple[str, str]]


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    monkeypatch.setenv("COLUMNS", "80")

    def said(*arguments: str, code: int = 0) -> tuple[str, str]:
        assert run(["explain", *arguments]) == code
        captured = capsys.readouterr()
        return captured.out, captured.err

    return said


def test_all_topics_grouped_by_id_and_title(explain: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    out, _ = explain()
    places = [out.index(f"\n  {topic.id} ") for topic in topic_index.TOPICS]
    assert places == sorted(places) and all(heading in out for heading in topic_index.GROUPS)
    assert all(topic.title in out for topic in topic_index.TOPICS)
    assert out.rstrip().endswith("homelab explain hang-at-start")


def test_one_topic_has_all_four_parts(explain: Said) -> None:
    out, _ = explain("mtu")
    parts = [out.index(f"\n{heading}\n") for heading in ("what is seen", "why", "what to do", "checks that find it")]
    assert parts == sorted(parts) and "(mtu)" in out.splitlines()[0]
    assert "  homelab preflight --only network.path_mtu\n" in out
    assert "  the same size everywhere, on each node: sudo ip link set INTERFACE mtu 1500\n" in out, "a command is not broken"
    why = out[parts[1] : parts[2]]
    assert max(len(line) for line in why.splitlines()) <= 80


@pytest.mark.parametrize(
    ("asked", "command"),
    [
        ("mtu", "homelab preflight --only network.mtu"),
        ("supervisor", "homelab status"),
        ("python-error", "homelab why"),
        ("frozen", "homelab why"),
    ],
)
def test_a_page_ends_with_the_next_command(explain: Said, asked: str, command: str) -> None:
    assert explain(asked)[0].endswith(f"\nNext: {command}\n")
    assert json.loads(explain(asked, "--json")[0])["topics"][0]["next"] == command


def test_checks_that_need_more_say_so(explain: Said) -> None:
    assert "  homelab preflight RECIPE --only fit.memory\n" in explain("cuda-out-of-memory")[0]
    assert "  homelab preflight --deep --only collective.works\n" in explain("hang-at-start")[0]
    assert "checks that find it" not in explain("python-error")[0]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (["network.mtu"], "mtu"), (["oom-killer"], "host-out-of-memory"), (["WiFi"], "wifi"), (["CLOCK", "skew"], "clock-skew"),
        (["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 MiB."], "cuda-out-of-memory"),
    ],
)  # fmt: skip
def test_what_finds_a_topic(explain: Said, asked: list[str], expected: str) -> None:
    assert f"({expected})" in explain(*asked)[0].splitlines()[0]
    found = json.loads(explain(*asked, "--json")[0])["topics"]
    assert [topic["id"] for topic in found] == [expected]
    assert set(found[0]) == {"id", "title", "seen", "cause", "do", "checks", "rules", "next"}


def test_several_to_choose_from(explain: Said) -> None:
    out, _ = explain("nccl")
    assert 'topics speak of "nccl"' in out and "\n  timeout " in out and "\n  disk-full " not in out
    assert len(json.loads(explain("nccl", "--json")[0])["topics"]) > 2
    assert len(json.loads(explain("--json")[0])["topics"]) == len(topic_index.TOPICS)


@pytest.mark.parametrize(
    ("asked", "near"), [("firewal", "firewall"), ("cuda-out-of-memroy", "cuda-out-of-memory"), ("interfase", "interface")]
)
def test_did_you_mean(explain: Said, asked: str, near: str) -> None:
    _, err = explain(asked, code=2)
    assert f'there is no topic "{asked}". Did you mean "{near}"?' in err and "fix:   homelab explain lists all topics" in err
    error = json.loads(explain(asked, "--json", code=2)[0])["error"]
    assert error["exit_code"] == 2 and topic_index.find(near)


def test_what_was_typed_is_only_text(explain: Said) -> None:
    out, _ = explain("[NCCL]")
    assert 'topics speak of "[NCCL]"' in out
    _, err = explain("[bold]$(x)\n", code=2)
    assert "[bold]$(x)" in err and "Did you mean" not in err
