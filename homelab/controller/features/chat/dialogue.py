"""What was said in a conversation so far: each model has it with its own answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from homelab.controller.features.chat.conversation import Message, NodeConversation


class Dialogue:
    """The turns of `conversation` with each of `models` ("trained", "base")."""

    def __init__(self, conversation: NodeConversation, models: Sequence[str]) -> None:
        self.conversation = conversation
        self._histories: dict[str, list[Message]] = {model: [] for model in models}

    def clear(self) -> None:
        """Begin anew: the models have heard nothing."""
        self._histories = {model: [] for model in self._histories}

    def ask(self, model: str, question: str, max_new_tokens: int, show: Callable[[str], None]) -> None:
        """Show the answer in pieces, and keep it with its question, also where Ctrl-C or a wish to stop has ended it.

        A question without an answer is not kept. Raises HomelabError where the model cannot answer this (the conversation goes on),
        UnreachableError where the node is gone.
        """
        asked: Message = {"role": "user", "content": question}
        pieces: list[str] = []
        try:
            for piece in self.conversation.answer([*self._histories[model], asked], model=model, max_new_tokens=max_new_tokens):
                pieces.append(piece)
                show(piece)
        except KeyboardInterrupt:
            self.conversation.stop()
            show(" ...")
        self._histories[model] += [asked, {"role": "assistant", "content": "".join(pieces).strip()}]
