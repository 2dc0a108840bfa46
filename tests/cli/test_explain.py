"""`homelab explain`: a list, one topic, several to choose from, and what nobody knows; without a cluster."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from homelab.cli import guide
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
    pages = [out.index(f"\n  {page} ") for page in guide.pages()]
    assert out.startswith("the guide") and pages == sorted(pages) and pages[-1] < places[0], "the pages of the guide come first"
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
    assert 'topics mention "nccl"' in out and "\n  timeout " in out and "\n  disk-full " not in out
    assert len(json.loads(explain("nccl", "--json")[0])["topics"]) > 2
    assert len(json.loads(explain("--json")[0])["topics"]) == len(topic_index.TOPICS)


@pytest.mark.parametrize(
    ("asked", "near"),
    [("firewal", "firewall"), ("cuda-out-of-memroy", "cuda-out-of-memory"), ("interfase", "interface"), ("instal", "install")],
)
def test_did_you_mean(explain: Said, asked: str, near: str) -> None:
    _, err = explain(asked, code=2)
    assert (
        f'there is no page or topic "{asked}". Did you mean "{near}"?' in err and "fix:   homelab explain lists all pages and topics" in err
    )
    error = json.loads(explain(asked, "--json", code=2)[0])["error"]
    assert error["exit_code"] == 2 and (topic_index.find(near) or near in guide.pages())


def test_what_was_typed_is_only_text(explain: Said) -> None:
    out, _ = explain("[NCCL]")
    assert 'topics mention "[NCCL]"' in out
    _, err = explain("[bold]$(x)\n", code=2)
    assert "[bold]$(x)" in err and "Did you mean" not in err


def test_a_page_of_the_guide_is_its_markdown_in_a_pipe(explain: Said) -> None:
    for name, page in guide.pages().items():
        assert explain(name)[0].startswith(page.text.rstrip()), name
    out, _ = explain("Plan")
    assert out.startswith("# The plan\n") and "\nProblems that mention it (homelab explain NAME): " in out
    assert "number of threads, kind of card" in explain("law")[0]


def test_a_page_as_json(explain: Said) -> None:
    law = json.loads(explain("law", "--json")[0])
    assert [page["text"] for page in law["pages"]] == [guide.pages()["law"].text] and len(law["law"]) > 10
    listed = json.loads(explain("--json")[0])["pages"]
    assert [page["name"] for page in listed] == list(guide.pages()) and all(set(page) == {"name", "title", "summary"} for page in listed)


def test_a_word_of_a_heading_finds_its_page(explain: Said) -> None:
    assert explain("exit", "codes")[0].startswith("# Files, JSON and exit codes\n")
    out, _ = explain("gpu")
    assert "\n  install " in out and out.index("\n  install ") < out.index("\n  gpu-lost ")


def test_a_page_on_a_terminal_is_eighty_columns_wide_and_its_commands_stay_whole() -> None:
    file = io.StringIO()
    for page in guide.pages().values():
        console = Console(file=file, force_terminal=True, color_system=None, width=200)
        guide.show(console, page)
    out = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())
    assert (
        "\n  homelab plan recipes/llama7b-lora.toml --what-if-nodes 1..10   # where do more machines stop paying, and what limits them?\n"
        in out
    )
    assert (
        "the law (homelab explain law)" in re.sub(r"\s+", " ", out).replace("The law", "the law")
        and ".md)" not in out
        and "<!--" not in out
    )
    commands = "\n".join(f"  {line.strip()}" for page in guide.pages().values() for line in page.text.splitlines() if len(line) > 80)
    assert [line for line in out.splitlines() if len(line.rstrip()) > 80 and line.strip() not in commands] == []
