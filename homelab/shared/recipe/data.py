"""`[data]`: where the samples come from. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from homelab.shared.markers import AtLeast, AtMost, Holds, Shortest
from homelab.shared.protocol.row_forms import CHAT, LABELLED, PAIR, PREFERENCE, TEXT


@dataclass(frozen=True)
class HubData:
    """A data set of the hub: its id, a configuration (None: it has one alone), a split, and a commit, tag or branch (None: the newest)."""

    path: str
    config: str | None
    split: str
    revision: str | None

    @property
    def identity(self) -> str:
        """Tells what is loaded from anything else; where `revision` is a commit, from every other content too."""
        return f"{self.path}:{self.config or ''}:{self.split}@{self.revision or ''}"


Word = Annotated[str, Shortest(1)]


@dataclass(frozen=True)
class Columns:
    """Which column of the data is which part of a row, where its name does not say it. Parts that are left out are found by their usual names.

    `messages` is a conversation, with `role` and `content` the keys of its messages; or `prompt` (with a further `input`) and `completion`;
    or `text`; or two answers, `chosen` and `rejected`, with `prompt` where it stands alone. `label` says whether the one answer of a row is good.
    `system`, `history`, `tools`, `documents` and `chat_template_kwargs` go to the chat template with them.
    """

    messages: Word | None = None
    role: Word | None = None
    content: Word | None = None
    prompt: Word | None = None
    input: Word | None = None
    completion: Word | None = None
    chosen: Word | None = None
    rejected: Word | None = None
    label: Word | None = None
    text: Word | None = None
    system: Word | None = None
    history: Word | None = None
    tools: Word | None = None
    documents: Word | None = None
    chat_template_kwargs: Word | None = None

    @property
    def kind(self) -> str | None:
        """The format that these columns are of; None where they leave it open."""
        if self.chosen or self.rejected:
            return PREFERENCE
        if self.label:
            return LABELLED
        if self.messages or self.role or self.content:
            return CHAT
        if self.prompt or self.input or self.completion or self.history:
            return PAIR
        return TEXT if self.text else None

    def fits(self, kind: str) -> bool:
        """Whether rows of this format can have these columns."""
        if kind == PREFERENCE:
            return not any((self.messages, self.role, self.content, self.input, self.completion, self.text, self.label))
        if kind == LABELLED:
            return not any((self.chosen, self.rejected, self.text))
        return self.kind in (None, kind)

    def __post_init__(self) -> None:
        kinds = [name for name, parts in (
            ("chosen and rejected (with prompt)", (self.chosen, self.rejected)), ("messages (with role, content)", (self.messages, self.role, self.content)),
            ("prompt and completion (with input, history)", (*((self.prompt, self.history) if not (self.chosen or self.rejected) else ()), self.input, self.completion)),
            ("text", (self.text,)),
        ) if any(parts)]  # fmt: skip
        if self.label and (self.chosen or self.rejected):
            kinds.append("label (of one answer)")
        if len(kinds) > 1:
            raise ValueError(f"`columns` names {' beside '.join(kinds)}: a row is one of them")
        named = [column for part, column in vars(self).items() if column and part not in ("role", "content")]
        twice = sorted({column for column in named if named.count(column) > 1})
        if twice:
            raise ValueError(f"`columns` names {', '.join(twice)} twice")


def _names_something(place: str | None) -> str | None:
    if place is not None and not place.removeprefix("hub:").strip():
        raise ValueError("a path relative to the recipe, a path on every node (/ or ~/), or hub:org/name")
    return place


@dataclass(frozen=True)
class Data:
    """Where the samples come from: a path relative to the recipe (shipped to the nodes), a path on every node, or hub:org/name.

    Of data from the hub, `config` names one of several configurations, `split` what is trained on, `eval_split` what is evaluated on, and
    `revision` a commit, tag or branch (left out: the newest at the launch, and from then on that one). `config` and `revision` hold for
    `eval` where that is the same data set; another one has its `eval_config`. `template` "none": plain prompts and completions are joined
    as they stand, and do not go into the chat template of a model that has one. `columns` says which column of the data is which, where it cannot be known.
    """

    train: Annotated[str, Shortest(1), Holds(_names_something)]
    eval: Annotated[str | None, Holds(_names_something)] = None
    eval_fraction: Annotated[float, AtLeast(0), AtMost(0.5)] = 0.0
    format: Literal["auto", "chat", "prompt-completion", "text", "preference", "labelled"] = "auto"
    completion_only: bool = True
    packing: bool = False
    config: Word | None = None
    revision: Word | None = None
    split: Word = "train"
    eval_config: Word | None = None
    eval_revision: Word | None = None
    eval_split: Word = "validation"
    text_column: str = "text"
    template: Literal["auto", "none"] = "auto"
    columns: Columns | None = None

    def __post_init__(self) -> None:
        self._hub_keys_need_the_hub()
        self._eval_is_not_train()
        self._template_and_columns_are_of_the_format()

    def _hub_keys_need_the_hub(self) -> None:
        for key in ("config", "revision", "eval_config", "eval_revision"):
            role = "eval" if key.startswith("eval_") else "train"
            if getattr(self, key) is not None and not (getattr(self, role) or "").startswith("hub:"):
                raise ValueError(f'`{key}` is for data from the hub: {role} = "hub:org/name"')

    def _eval_is_not_train(self) -> None:
        of_train, of_eval = self.hub("train"), self.hub("eval")
        if of_train is not None and of_train == of_eval:
            raise ValueError(
                "`eval` would be the same rows as the training: name others with `eval_split`, or hold some out with `eval_fraction`"
            )

    def _template_and_columns_are_of_the_format(self) -> None:
        kind = self.columns.kind if self.columns is not None else None
        if self.template == "none" and CHAT in (self.format, kind):
            raise ValueError('`template` = "none" is for plain prompts and completions: a chat needs its chat template')
        if self.columns is not None and self.format != "auto" and not self.columns.fits(self.format):
            raise ValueError(f'`columns` names the columns of format = "{kind}", and `format` is "{self.format}"')
        if self.columns is not None and self.columns.text and self.text_column not in ("text", self.columns.text):
            raise ValueError("`text_column` and `columns` name different columns of text: leave one out")

    def hub(self, role: str) -> HubData | None:
        """What `role` ("train" or "eval") names on the hub; None for a file, and where there is no such data."""
        place = self.train if role == "train" else self.eval
        if place is None or not place.startswith("hub:"):
            return None
        same = place == self.train
        if role == "train":
            return HubData(place.removeprefix("hub:"), self.config, self.split, self.revision)
        of_train = (self.config, self.revision) if same else (None, None)
        return HubData(place.removeprefix("hub:"), self.eval_config or of_train[0], self.eval_split, self.eval_revision or of_train[1])
