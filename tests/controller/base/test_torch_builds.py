"""The table of torch's CUDA builds: which one a node is told to install, and that nobody writes of one that never existed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from homelab.controller.base import hardware
from homelab.controller.base.torch_builds import BEFORE_TURING, BUILDS, FROM_TURING, TORCH, Build, build_for, builds_of, has_kernels

ROOT = Path(__file__).parents[3]
PASCAL, VOLTA, TURING, ADA, HOPPER, BLACKWELL = (6, 1), (7, 0), (7, 5), (8, 9), (9, 0), (12, 0)


@pytest.mark.parametrize(
    ("release", "cards", "driver_cuda", "tag"),
    [
        ("2.13.0", [BLACKWELL], "13.0", "cu130"),
        ("2.13.0", [BLACKWELL], None, "cu130"),
        ("2.13.0", [BLACKWELL], "12.8", "cu130"),  # which needs a newer driver: there is no other
        ("2.13.0+cu126", [TURING, ADA], "13.1", "cu130"),
        ("2.13.0", [ADA], "12.4", "cu126"),
        ("2.13.0", [PASCAL], "13.0", "cu126"),
        ("2.13.0", [VOLTA], "12.8", "cu126"),
        ("2.13.0", [PASCAL, TURING], "13.0", "cu126"),
        ("2.13.0", [PASCAL, BLACKWELL], "13.0", None),
        ("2.13.0", [(3, 5)], "11.4", None),
        ("2.13.0", [], "13.0", "cu130"),
        ("2.11.0", [BLACKWELL], "12.8", "cu128"),
        ("2.5.1", [ADA], "12.8", None),
        ("", [ADA], "12.8", None),
    ],
)
def test_the_build_for_a_nodes_cards_and_driver(
    release: str, cards: list[tuple[int, int]], driver_cuda: str | None, tag: str | None
) -> None:
    build = build_for(release, cards, driver_cuda)
    assert (build.tag if build else None) == tag


def test_whether_the_driver_runs_it() -> None:
    assert FROM_TURING.suits("13.0") and FROM_TURING.suits("13.2") and FROM_TURING.suits(None) and not FROM_TURING.suits("12.9")
    assert BEFORE_TURING.suits("12.2") and BEFORE_TURING.suits("13.0") and not BEFORE_TURING.suits("11.8")


def test_what_is_told_in_general_is_of_the_release_that_is_pinned() -> None:
    assert f"\ntorch=={TORCH}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert {FROM_TURING, BEFORE_TURING} <= set(builds_of(TORCH))
    without_code = ("K80", "Thor", "AGX Thor")  # of Kepler and of Jetson: torch on PyPI has none for them
    cards = {card.compute_capability for card in hardware.CARDS if card.name not in without_code}
    none = {card.compute_capability for card in hardware.CARDS if card.name in without_code}
    assert none and not any(build.runs_on([card]) for card in none for build in builds_of(TORCH))
    assert FROM_TURING.runs_on(card for card in cards if card >= TURING)
    assert BEFORE_TURING.runs_on(card for card in cards if card < TURING) and not BEFORE_TURING.runs_on([BLACKWELL])


@pytest.mark.parametrize(
    ("entry", "card", "runs"),
    [
        ("sm_86", (8, 9), True), ("sm_86", (8, 0), False), ("sm_86", (9, 0), False), ("compute_80", (12, 0), True), ("compute_90", (8, 9), False),
        ("sm_90a", (9, 0), True), ("sm_90a", (9, 1), False), ("sm_120", (12, 1), True), ("gfx1100", (11, 0), False),
    ],
)  # fmt: skip
def test_which_code_runs_on_which_card(entry: str, card: tuple[int, int], runs: bool) -> None:
    assert has_kernels([entry], *card) is runs


def test_nobody_writes_of_a_build_that_never_existed() -> None:
    """ "2.13.0+cu128" stood in hints and in recorded answers."""
    names = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.toml", "*.txt"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    tags: set[tuple[str, str]] = set()
    for name in names:
        if (ROOT / name).is_file() and name != "tests/controller/base/test_torch_builds.py":
            tags |= set(re.findall(r"\b(2\.\d+\.\d+)\+(cu\d+)", (ROOT / name).read_text(encoding="utf-8", errors="replace")))
    known = {(release, tag) for release, tag in tags if builds_of(release)}
    assert known and not [entry for entry in known if entry[1] not in {build.tag for build in builds_of(entry[0])}]


def test_a_release_never_offers_a_build_twice() -> None:
    for builds in BUILDS.values():
        assert len({build.tag for build in builds}) == len(builds) and all(isinstance(build, Build) for build in builds)
