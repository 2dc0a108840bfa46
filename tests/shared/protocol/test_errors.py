"""The three parts of an error, from one program to another."""

from __future__ import annotations

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.shared.protocol.errors import Refusal, ThreePartError, parts_of


@pytest.mark.parametrize("kind", [ThreePartError, HomelabError, Refusal])
def test_what_one_program_prints_another_reads(kind: type[ThreePartError]) -> None:
    error = kind("the disk is full", where="node tower", hint="df -h")
    assert parts_of(f"a warning\n{error.text}\n") == error.as_dict()


def test_parts_that_are_not_there_are_left_out() -> None:
    assert parts_of(ThreePartError("only this").text) == {"message": "only this"}


def test_a_traceback_is_no_error_in_three_parts() -> None:
    assert parts_of("Traceback (most recent call last):\nwhere: x\nValueError: y") == {}


def test_a_refusal_is_a_value_error_with_a_kind() -> None:
    refusal = Refusal("no", kind="full")
    assert isinstance(refusal, ValueError)
    assert refusal.kind == "full"
