"""A TOML text whose keys have thousands of parts: refused in three parts and at once; `tomllib` would take minutes for it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.config import lines, load

MANY = 60_000
DEEP = {
    "key": ("a." * MANY + "b = 1", 1), "header": ("[x]\n[" + "a." * MANY + "b]", 2), "tables": ("\n\n[[" + "a." * 40 + "b]]", 3), "inline": ("x = {" + "a." * MANY + "b = 1}", 1),
    "second in line": ("x = {c = 1, " + "a." * MANY + "b = 1}", 1), "quoted": ('"a".' * MANY + "b = 1", 1), "single": ("'a b'." * MANY + "b = 1", 1),
    "spaced": ("[d]\n  " + "a . " * MANY + "b = 1", 2), "no value": ("a." * MANY, 1),
}  # fmt: skip
FLAT = {
    "text": 'x = "' + "a." * 200 + '"', "list": 'x = ["' + "a." * 200 + '", "b"]', "comment": "# " + "1." * 200, "three": "a.b.c = 1",
    "many": "\n".join(f"a{n}.b.c = 1" for n in range(3000)),
}  # fmt: skip
SLOW = {
    "spaces": " " * 900_000,
    "brackets": "[" * 900_000,
    "braces": "{, " * 300_000,
    "quotes": '"' * 900_000,
    "commas": ",'" * 450_000,
    "almost": ("a." * 31 + "!,") * 14_000,
}


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    """Ten seconds of the processor: a regular expression hears no timeout of pytest's."""
    before = signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_VIRTUAL, 10.0)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    signal.signal(signal.SIGVTALRM, before)


@pytest.mark.parametrize("kind", DEEP)
@pytest.mark.parametrize("load_file", [load.load_recipe, load.load_cluster])
def test_a_deep_key_is_refused_at_once(kind: str, load_file: object, tmp_path: Path) -> None:
    text, line = DEEP[kind]
    file = tmp_path / "f.toml"
    file.write_text(text)
    with pytest.raises(InputError, match="a key of over 32 parts") as caught:
        load_file(file)  # type: ignore[operator]
    assert (
        caught.value.where == f"{file}, line {line}" and caught.value.hint.startswith("remove that line") and len(str(caught.value)) < 400
    )


@pytest.mark.parametrize("text", FLAT.values(), ids=FLAT)
def test_dots_elsewhere_are_no_key(text: str) -> None:
    assert lines.not_deep(text, "f.toml") == text


@pytest.mark.parametrize("text", SLOW.values(), ids=SLOW)
def test_the_look_itself_takes_no_time(text: str) -> None:
    assert lines.not_deep(text, "f.toml") == text
