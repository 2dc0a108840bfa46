"""The table of verbs: every entry names a function that is there."""

from __future__ import annotations

import importlib

import pytest

from homelab.node import facts
from homelab.shared.protocol.verb_table import VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_its_function(verb: str) -> None:
    declared = VERBS[verb]
    assert callable(getattr(importlib.import_module(f"homelab.node.{declared.module}"), declared.function))
    assert declared.stream in ("", "stdin", "stdout")


@pytest.mark.parametrize("probe", facts.PROBES)
def test_every_probe_reads(probe: str) -> None:
    assert callable(importlib.import_module(f"homelab.node.probes.{probe}").read)
