"""A measured number stands in homelab/docs/evidence.md, with its command, machine and date; other pages name it only with a link to its place there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import english

pytestmark = pytest.mark.timeout(20)
EVIDENCE = english.DOCS / "evidence.md"
# 10 to 15 minutes, 409 MB, 110 to 125 MB/s, 5 %, 1.2 times, 1e-5, 0.81
QUANTITY = re.compile(
    r"(?<![\w.:/+-])(?:\d+(?:\.\d+)? (?:to|and|:) )*(?:\d+e-\d+"
    r"|\d+(?:[.,]\d+)?\s?(?:%|ms|s|seconds?|minutes?|hours?|days?|times|[KMG]i?B(?:/s)?|[MG]bit/s|tokens/s|kWh|W|characters|steps)(?![\w/])"
    r"|\d+\.\d+(?!\.?\w))"
)
# Numbers that nobody measures: limits and defaults of ours, versions, sizes of other people's things.
DECIDED = {
    "export": {"22.05": "a version"},
    "install": {"3.11": "a version", "3.9": "a version", "2.13": "a version", "13.0": "a version", "3.12": "a version"},
    "measure": {"5 %": "40 bytes of headers in 1500, with acknowledgements"},
    "new": dict.fromkeys(("8 GB", "12 GB", "16 GB", "24 GB", "12 and 8 GB", "24 and 24 GB"), "a card") | {"1 Gbit/s": "a wire"},
    "own-program": {"64 MB": "a limit of homelab run"},
    "plan": {"15 %": "TIGHT", "5 %": "TIGHT after a dry run; the gain of one machine more"},
    "preflight": {"6 GB": "an example", "15 minutes": "torch's default"},
    "recipe": {"8 GB": "a card", "15 %": "the least that an old card must add", "0.0001": "the least gain", "1.16": "a version"},
    "recovery": {
        "3.5 %": "the most that checkpoints may take",
        "3.11": "a version",
        "20 seconds": "_STANDBY_AFTER_S",
        "90 seconds": "PREPARE_S, until a node that comes back is taken as it is",
        "1 GB": "RANK_BYTES, TAKEN_BYTES",
        "500 MB": "DRAWS_BYTES",
        "20 %": "DRAWS_PERCENT",
    },
    "web": {"10 minutes": "SILENT_S"},
    "too-large": {"8 and 8 GB": "cards", "12 GB": "a card", "4 GB": "a card", "1 Gbit/s": "a wire"},
}


def sections() -> dict[str, str]:
    """Anchor -> text of the sections of evidence.md."""
    parts = re.split(r"^## (.+)$", EVIDENCE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {heading.lower().replace(" ", "-"): text for heading, text in zip(parts[::2], parts[1::2], strict=True)}


def without_outputs(text: str) -> str:
    """A page without the outputs of commands that it shows between marks: other tests hold them against these commands."""
    return re.sub(r"<!-- homelab .*?<!-- end -->", "", text, flags=re.DOTALL)


def unproved(page: str, text: str) -> list[str]:
    """Quantities of a page that are neither decided nor in the section of evidence.md to which their paragraph links."""
    faults = []
    for block in english.blocks(without_outputs(text)):
        proof = "\n".join(sections().get(anchor, "") for anchor in re.findall(r"evidence\.md#([\w-]+)\)", block))
        found = QUANTITY.findall(english.plain(block))
        faults += [f"{page}: {quantity}: {block}" for quantity in found if quantity not in DECIDED.get(page, {}) and quantity not in proof]
    return faults


@pytest.mark.parametrize("page", [page for page in english.PAGES if page != EVIDENCE], ids=lambda page: page.stem)
def test_every_number_is_decided_or_proved(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert unproved(page.stem, text) == [], "a measured number: into evidence.md, with a link to it; a number of our own: into DECIDED"
    found = {quantity for block in english.blocks(without_outputs(text)) for quantity in QUANTITY.findall(english.plain(block))}
    assert DECIDED.get(page.stem, {}).keys() - found == set(), "no longer on the page: take it out of DECIDED"


@pytest.mark.parametrize(
    "sentence",
    [
        "It is ready in 3.3 minutes.", "It is ready in [3.3 minutes](evidence.md#the-whole-way).", "It is ready in 3.2 minutes.",
        "It is ready in [3.2 minutes](evidence.md#nowhere).", "Losses differ by 1e-9.", "It has 0.95 of the speed.", "It is 2 times as fast.",
    ],
)  # fmt: skip
def test_a_number_without_proof_is_seen(sentence: str) -> None:
    assert unproved("plan", sentence) and not unproved("plan", "It is ready in [3.2 minutes](evidence.md#the-whole-way).")


def test_every_measurement_has_its_command_machine_and_date() -> None:
    measured = {anchor: text for anchor, text in sections().items() if anchor not in ("the-machines", "withdrawn")}
    assert len(measured) >= 12
    for anchor, text in measured.items():
        table, _, source = text.strip().partition("\n\n")
        assert table.startswith("| number | meaning |\n") and table.count("\n") >= 2, anchor
        assert re.search(r"`[^`]+`", source) and re.search(r"\b\d{1,2} [A-Z][a-z]+ 20\d\d\b", source), f"{anchor}: command and date"
        assert re.search(r"two cores|one H[12]00|published measurements|sizes of", source), f"{anchor}: the machine"


def test_withdrawn_numbers_are_claimed_nowhere() -> None:
    gone = [cells.split("|")[1] for cells in sections()["withdrawn"].splitlines() if cells.startswith("| ")][1:]
    assert len(gone) > 5
    measured = "\n".join(text for anchor, text in sections().items() if anchor != "withdrawn")
    for quantity in ("0.85", "1.42", "1035", "503"):
        assert quantity in "".join(gone) and not re.search(rf"\b{quantity}\b", measured)
