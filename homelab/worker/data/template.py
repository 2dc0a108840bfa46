"""A model's chat template: text from messages, and which of its characters the model is to learn where the template marks them.

Everything that the template reads of a row reaches it, in the shape in which it reads it: `template_traits` has tried that. The
rendering is that of transformers.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from homelab.worker.data import template_clock
from homelab.worker.data.chat_messages import Message
from homelab.worker.data.template_traits import Traits, probed
from homelab.worker.errors import WorkerError

_TRAINING = "_training"
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MOST_WORDS = 300  # characters of an error of the template's code
Span = tuple[int, int]


class TemplateRefusal(Exception):
    """The template does not take these messages. The text says why. `is_meant`: it says so itself, by raise_exception; else its code breaks."""

    def __init__(self, why: str, *, is_meant: bool) -> None:
        super().__init__(why)
        self.is_meant = is_meant


@contextmanager
def told() -> Iterator[None]:
    """Whatever a template's code raises, over a row's values or by itself, as a TemplateRefusal: it may be any error of Python."""
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        yield
    except (TemplateRefusal, WorkerError):
        raise
    except Exception as error:
        if type(error) is TemplateError:  # what transformers' raise_exception raises
            raise TemplateRefusal(str(error) or "it does not say why", is_meant=True) from error
        line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise TemplateRefusal(f"{type(error).__name__}: {error or 'no words'}"[:_MOST_WORDS] + line, is_meant=False) from error


_PROBED: dict[tuple[str, str], Traits] = {}  # by the template and the tokens that it writes


class Template:
    """The template of one tokenizer. `learns_answers`: it is asked for what the assistant says, and TRL's training template is taken where TRL has one."""

    def __init__(self, tokenizer: Any, *, learns_answers: bool) -> None:
        self._tokenizer = tokenizer
        self._learns_answers = learns_answers
        self._tokens = repr(sorted(tokenizer.special_tokens_map.items()))

    def source(self, options: Mapping[str, Any]) -> str:
        """The text of the template that renders rows with these options. Raises TemplateRefusal where the tokenizer has none for them."""
        with told():
            own = str(self._tokenizer.get_chat_template(tools=options.get("tools")))
        if not self._learns_answers or _MARKS.search(own):
            return own
        name = training_name(own)
        return own if name is None else training_template(name)

    @property
    def family(self) -> str | None:
        """TRL's name of the template that rows are rendered with, where it is not the model's own."""
        try:
            own = str(self._tokenizer.get_chat_template())
        except ValueError:  # several, and none of them for rows without tools
            return None
        return training_name(own) if self._learns_answers and not _MARKS.search(own) else None

    def has_marks(self, options: Mapping[str, Any]) -> bool:
        """Whether the template says which of its text the assistant says ({% generation %})."""
        return bool(_MARKS.search(self.source(options)))

    def asked_of(self, fields: Mapping[str, Any], used: frozenset[str]) -> dict[str, Any]:
        """Columns of a row that the template asks for by their name (enable_thinking, xml_tools, ...). `used` are read already."""
        own = {"messages", "tools", "documents", "add_generation_prompt", *self._tokenizer.special_tokens_map}
        asked = self.traits({}).variables - own - used
        return {name: fields[name] for name in sorted(asked) if fields.get(name) is not None}

    def traits(self, options: Mapping[str, Any]) -> Traits:
        """What this template reads, and in which shape. Raises TemplateRefusal for one that is no Jinja."""
        source = self.source(options)
        key = (source, self._tokens)
        if key not in _PROBED:
            with told():
                _PROBED[key] = probed(source, lambda messages, given: self._rendered(source, messages, given)[0])
        return _PROBED[key]

    def render(self, messages: Sequence[Message], options: Mapping[str, Any], *, generation_prompt: bool = False) -> str:
        """The text of the messages. Raises TemplateRefusal."""
        return self._fitted(messages, options, generation_prompt=generation_prompt)[0]

    def marked(self, messages: Sequence[Message], options: Mapping[str, Any]) -> tuple[str, list[Span]]:
        """The text of the messages, and the spans of characters that the assistant says. Raises TemplateRefusal."""
        return self._fitted(messages, options, marks=True)

    def _fitted(self, messages: Sequence[Message], options: Mapping[str, Any], **asked: bool) -> tuple[str, list[Span]]:
        traits = self.traits(options)
        with told():
            return self._rendered(self.source(options), traits.fit(messages), traits.fit_options(options), **asked)

    def _rendered(
        self, source: str, messages: Sequence[Message], options: Mapping[str, Any], *, generation_prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        with template_clock.held(self._tokenizer):
            texts, spans = render_jinja_template(
                conversations=[list(messages)],
                chat_template=source,
                add_generation_prompt=generation_prompt,
                return_assistant_tokens_mask=marks,
                **{**self._tokenizer.special_tokens_map, **options},
            )
        return str(texts[0]), [(int(start), int(end)) for start, end in (spans[0] if marks else ())]


def training_name(own: str) -> str | None:
    """TRL's name of a model's own template; None for one that TRL does not know, or trains with as it is. Raises WorkerError if TRL is not installed.

    TRL trains with templates of its own in the place of some: they mark what the assistant says, and keep what it thought in every turn. A template of
    a model that drops its earlier thoughts (Qwen3, DeepSeek-R1), or has the end of a turn in the next one (GLM-4-MoE), cannot say which tokens the model
    has to learn. TRL's package carries both (trl/chat_templates, NAME.jinja and NAME_training.jinja; tried with 1.16.0). They are read as files: TRL
    itself is not imported. Rows that another release would encode otherwise are refused by their digest, as any other change of them.
    """
    return _names().get(own)


def training_template(name: str) -> str:
    """The template to train with. Raises WorkerError if TRL is not installed."""
    return (_folder() / f"{name}{_TRAINING}.jinja").read_text(encoding="utf-8")


@functools.cache
def _names() -> dict[str, str]:
    """The model's own template -> its name. As in TRL, another text is another template."""
    names = [path.stem.removesuffix(_TRAINING) for path in sorted(_folder().glob(f"*{_TRAINING}.jinja"))]
    own = {name: _folder() / f"{name}.jinja" for name in names}
    return {path.read_text(encoding="utf-8"): name for name, path in own.items() if path.is_file()}


@functools.cache
def _folder() -> Path:
    found = importlib.util.find_spec("trl")
    folder = Path(found.origin).parent / "chat_templates" if found is not None and found.origin else None
    if folder is None or not folder.is_dir():
        raise WorkerError(
            "the package trl is not installed here, or has no chat templates: it decides which tokens of a chat are trained", where="[data] completion_only",
            hint="homelab setup installs it on the nodes; by hand: pip install 'trl>=1.15' in the environment that cluster.toml names",
        )  # fmt: skip
    return folder
