"""python -m homelab.worker.tools.conversation {"run_dir", "models": ["trained", "base"], "silent_s"}: questions as JSON lines on stdin, answers as they are computed.

A question is {"messages": [{"role", "content"}], "model": "trained" or "base", "max_new_tokens"}; {"stop": true} ends the answer that is being given.
Prints {"loading": text} on the memory that it takes, {"ready": {"notes"}} when the models are loaded, {"piece": text} while it answers and
{"end": {"tokens", "stopped"}} after it, or {"error": {"message", "where", "hint"}}, with {"kind": "no-room"} where there is no memory. Ends when
stdin is closed, also while it loads, and where nothing was asked for `silent_s` seconds (None: for any time).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any

from homelab.shared.recipe import Method
from homelab.worker.errors import WorkerError
from homelab.worker.runtime import imports
from homelab.worker.runtime.recipe import section
from homelab.worker.tools import chat, footprint, run_model

_FIRST_TOKENS = 2048  # of a conversation, for the estimate of the memory


class Conversation:
    """The models, loaded once, in the precision in which they were trained."""

    def __init__(self, run_dir: Path, models: list[str], stop: threading.Event) -> None:
        self.run, self.stop = run_model.read_run(run_dir), stop
        with chat.trained_folder(self.run, run_dir, is_base="trained" not in models) as trained:
            self._load(run_dir, models, trained)

    def _load(self, run_dir: Path, models: list[str], trained: Path | None) -> None:
        imports.prepare(self.run, bitsandbytes=section(Method, self.run["recipe"]).quantisation is not None)
        from homelab.worker.model.pretrained import load_tokenizer, model_path

        imports.quiet()
        path = model_path(self.run)
        self.tokenizer = load_tokenizer(self.run, path)
        place = chat.place(self.run, run_dir, path, trained, _FIRST_TOKENS, beside_base=len(models) > 1)
        self.notes = [place.note] if place.note else []
        _print({"loading": place.room})
        self.model = chat.load(self.run, run_dir, path, trained, place.card).eval()
        # An adapter is left out for the base's answers; wholly trained weights need the base beside them.
        self.has_adapter = hasattr(self.model, "disable_adapter")
        self.base = chat.load(self.run, run_dir, path, None, place.card).eval() if len(models) > 1 and not self.has_adapter else None

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """{"tokens", "stopped"}; the text is printed on the way. Raises WorkerError for a conversation that is too long, or no memory."""
        import torch
        from transformers import StoppingCriteriaList

        tokens = chat.encode(self.run, self.tokenizer, question["messages"])
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
        count = tokens["input_ids"].shape[1]
        if count >= most:
            raise WorkerError(
                f"the conversation has {count} tokens, but the model reads at most {most}",
                where="this conversation",
                hint="/new begins another one",
            )
        is_base = question["model"] == "base"
        model = self.base if is_base and self.base is not None else self.model
        without_adapter = model.disable_adapter() if is_base and self.has_adapter else contextlib.nullcontext()
        tokens = tokens.to(next(model.parameters()).device)
        try:
            with torch.no_grad(), without_adapter:
                output = chat.generate(
                    model, tokens, self.tokenizer, min(int(question["max_new_tokens"]), most - count), streamer=_streamer(self.tokenizer),
                    stopping_criteria=StoppingCriteriaList([lambda *_, **__: torch.tensor([self.stop.is_set()], device=model.device)]),
                )  # fmt: skip
        except torch.OutOfMemoryError as error:
            raise chat.no_memory(error, "this conversation") from error
        return {"tokens": int(output.shape[1]) - count, "stopped": self.stop.is_set()}


def _streamer(tokenizer: Any) -> Any:
    from transformers import TextStreamer

    class Printed(TextStreamer):
        """Whole words, as lines of JSON."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                _print({"piece": text})

    return Printed(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _print(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _listen(questions: queue.Queue[dict[str, Any]], stop: threading.Event) -> None:
    for line in sys.stdin:
        question = json.loads(line)
        if question.get("stop"):
            stop.set()
        else:
            stop.clear()  # here: a wish to stop that comes before the answer has begun counts
            questions.put(question)
    os._exit(0)  # nobody reads the answer any more


def _error(error: WorkerError) -> dict[str, Any]:
    kind = {"kind": "no-room"} if isinstance(error, footprint.NoRoom) else {}
    return {"error": {"message": error.message, "where": error.where, "hint": str(error.hint), **kind}}


def main() -> int:
    """Load, then answer until stdin is closed or nobody asks any more. Returns 1 where it cannot begin."""
    request = json.loads(sys.argv[1])
    questions, stop = queue.Queue[dict[str, Any]](), threading.Event()
    threading.Thread(target=_listen, args=(questions, stop), daemon=True).start()  # who leaves while it loads does not leave it behind
    try:
        conversation = Conversation(Path(request["run_dir"]), request["models"], stop)
    except WorkerError as error:
        _print(_error(error))
        return 1
    _print({"ready": {"notes": conversation.notes}})
    while True:
        try:
            _print({"end": conversation.answer(questions.get(timeout=request.get("silent_s")))})
        except queue.Empty:
            return 0
        except WorkerError as error:
            _print(_error(error))


if __name__ == "__main__":
    os._exit(main())  # all is printed, and the thread that waits for stdin would be in the way of an ordinary end
