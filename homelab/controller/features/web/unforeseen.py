"""An error that no code has foreseen, in front of a page: whoever looks at the page has to know, and the server's log has all of it."""

from __future__ import annotations

import logging
import traceback

from homelab.controller.base import secrets
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.sanitize import shortened

_MOST_TEXT = 1000


def as_homelab_error(error: Exception) -> HomelabError:
    """One of ours as it is; another one in three parts, with its traceback in the log."""
    if isinstance(error, HomelabError):
        return error
    logging.getLogger(__name__).error(secrets.hide("".join(traceback.format_exception(error))))
    hint = Hint(
        "load this page again, or {}; it is a fault of homelab: please report it with the words in that terminal", homelab("status")
    )
    message = shortened(secrets.hide(f"internal error: {type(error).__name__}: {error}"), _MOST_TEXT)
    return HomelabError(message, where="the terminal in which homelab web runs has all of it", hint=hint)
