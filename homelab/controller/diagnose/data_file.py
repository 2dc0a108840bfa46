"""The text files of this room: topics, rules and endings are TOML beside the code, part of the package."""

from __future__ import annotations

import pkgutil
import re
import tomllib
from typing import Any

from homelab.controller.base.torch_builds import BEFORE_TURING, FROM_TURING, TORCH
from homelab.controller.facts.node_commands import RESTART_OF_CARD_IN_WORDS

_VALUES = {
    "TORCH": TORCH,
    "RESTART_OF_CARD": RESTART_OF_CARD_IN_WORDS,
    **{f"FROM_TURING.{key}": str(getattr(FROM_TURING, key)) for key in ("cuda", "driver", "index", "tag")},
    **{f"BEFORE_TURING.{key}": str(getattr(BEFORE_TURING, key)) for key in ("cuda", "driver", "index", "tag")},
}
_NAME = re.compile(r"\{(" + "|".join(re.escape(name) for name in _VALUES) + r")\}")


def load(name: str) -> dict[str, Any]:
    """The TOML document homelab/controller/diagnose/NAME, with the values of `_VALUES` put in: {TORCH}, {RESTART_OF_CARD}, {FROM_TURING.cuda}, ..."""
    data = pkgutil.get_data(__package__, name)
    assert data is not None, name
    return tomllib.loads(_NAME.sub(lambda match: _VALUES[match[1]], data.decode()))
