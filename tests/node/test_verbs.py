"""The table of verbs: every entry names a function that is there."""

from __future__ import annotations

import importlib

import pytest

from homelab.node import facts, verbs


@pytest.mark.parametrize("verb", verbs.VERBS)
def test_every_verb_has_its_function(verb: str) -> None:
    module, function, stream = verbs.VERBS[verb]
    assert callable(getattr(importlib.import_module(f"homelab.node.{module}"), function))
    assert stream in ("", "stdin", "stdout")


@pytest.mark.parametrize("probe", facts.PROBES)
def test_every_probe_reads(probe: str) -> None:
    assert callable(importlib.import_module(f"homelab.node.probes.{probe}").read)
