"""The clock and the chance that a chat template can reach: the moment of the launch, and one stream that begins anew with every text.

transformers gives a template `strftime_now`, by the local clock of the node (utils/chat_template_utils.py); Jinja itself gives it `random` and
`lipsum`. The rows of a run would be other ones on every node, and after every midnight.
"""

from __future__ import annotations

import contextlib
import functools
import random
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from homelab.worker.errors import WorkerError

MOMENT = "moment"  # key of run.json: when the run was launched, UTC, ISO 8601
_EPOCH_SECONDS = re.compile(r"(?<!%)((?:%%)*)%s")  # strftime computes it by the node's time zone
_WHOLE = "%Y-%m-%d %H:%M:%S"
_PROBE = "{% if strftime_now is defined %}{{ strftime_now('" + _WHOLE + "') }}{% endif %}"


def moment_of(run: Mapping[str, Any]) -> datetime:
    """When this run was launched, without a time zone as transformers has it: by UTC. Raises WorkerError for a moment that is none."""
    try:
        return datetime.fromisoformat(run[MOMENT]).astimezone(UTC).replace(tzinfo=None)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        hint = "launch it as a new run: run.json is written by `homelab launch`"
        raise WorkerError(f"run.json does not say when the run was launched: {error}", where=f"run.json, {MOMENT}", hint=hint) from error


class _Clock:
    """Replaces `datetime` where transformers reads it for a template: it stands at one moment, and notes what was written of it."""

    def __init__(self, moment: datetime) -> None:
        self.moment = moment
        self.written: list[str] = []

    def now(self) -> _Clock:
        return self

    def strftime(self, form: str) -> str:
        seconds = int(self.moment.replace(tzinfo=UTC).timestamp())
        text = self.moment.strftime(_EPOCH_SECONDS.sub(rf"\g<1>{seconds}", form))
        if text not in self.written:
            self.written.append(text)
        return text


def bind(tokenizer: Any, moment: datetime) -> Any:
    """The same tokenizer, whose chat template is told `moment` for the time; `written_dates` has what it has written of it. Raises WorkerError where
    this version of transformers takes the time from elsewhere."""
    clock = _Clock(moment)
    plain: Callable[..., Any] = tokenizer.apply_chat_template

    @functools.wraps(plain)
    def apply_chat_template(*arguments: Any, **options: Any) -> Any:
        with _held(clock):
            return plain(*arguments, **options)

    tokenizer.apply_chat_template = apply_chat_template
    if getattr(tokenizer, "chat_template", None):
        told = apply_chat_template([{"role": "user", "content": ""}], chat_template=_PROBE, tokenize=False)
        if told not in ("", f"{moment:{_WHOLE}}"):
            raise WorkerError(
                "the chat templates of this transformers take the time from this node's clock: rows would depend on the time of day",
                where="the node's environment, package transformers", hint="homelab setup installs the version that homelab was tested with",
            )  # fmt: skip
        clock.written.clear()
    tokenizer.written_dates = clock.written
    tokenizer.template_clock = clock
    return tokenizer


def held(tokenizer: Any) -> contextlib.AbstractContextManager[None]:
    """While this lasts, chat templates are told the time that `tokenizer` is bound to; one that is not bound changes nothing."""
    clock = getattr(tokenizer, "template_clock", None)
    return contextlib.nullcontext() if clock is None else _held(clock)


@contextlib.contextmanager
def _held(clock: _Clock) -> Iterator[None]:
    """While this lasts, templates see this clock, and what they draw begins anew."""
    from transformers.utils import chat_template_utils

    drawn, name = random.getstate(), "datetime"
    real = getattr(chat_template_utils, name)
    random.seed("homelab chat template")
    setattr(chat_template_utils, name, clock)
    try:
        yield
    finally:
        setattr(chat_template_utils, name, real)
        random.setstate(drawn)


def note_of(tokenizer: Any) -> str | None:
    """The line for a person where the chat template has written a date or a time into the rows."""
    written = getattr(tokenizer, "written_dates", [])
    if not written:
        return None
    return f"law: the chat template writes {', '.join(map(repr, written))} into the rows: the time of the launch, on every node and after every recovery"
