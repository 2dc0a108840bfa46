"""A model goes to the hub: the right to it first, one commit, and no folder of a node in it. The hub is a server on loopback that knows these questions."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.features.results import hub, push
from homelab.controller.run import hub_token, run_folder
from homelab.controller.run.paths import RunPaths
from tests.fakes import FakeFleet

RUN = "2026-01-01-0000-x"
CARD = '---\nbase_model: "smollm2"\nlibrary_name: peft\n---\n\n# x\n\n`smollm2` fine-tuned with lora.\n'
FINAL = {
    "adapter_model.safetensors": (2).to_bytes(8, "little") + b"{}", "README.md": CARD.encode(),
    "adapter_config.json": json.dumps({"base_model_name_or_path": "/home/me/models/smollm2", "r": 8}).encode(),
}  # fmt: skip


class FakeHub:
    """`status`: path's end -> the status that it answers with instead. `files`: what was committed."""

    def __init__(self) -> None:
        self.status: dict[str, int] = {}
        self.asked: list[str] = []
        self.created: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(b"")

            def do_POST(self) -> None:
                self._answer(self.rfile.read(int(self.headers["Content-Length"] or 0)))

            def _answer(self, body: bytes) -> None:
                path = self.path.partition("?")[0]
                outer.asked.append(f"{self.command} {path}")
                status = next((status for end, status in outer.status.items() if path.endswith(end)), 200)
                if self.headers.get("Authorization") != "Bearer hf_planted":
                    status = 401
                answer = {"error": "You don't have the rights to do this \x1b[31m"} if status != 200 else outer.answer(path, body)
                text = json.dumps({"error": "not found"} if answer is None else answer).encode()
                self.send_response(404 if answer is None else status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str, body: bytes) -> Any:
        """As huggingface_hub 2.4 asks (hf_api.py, _commit_api.py); None for a question that it does not know."""
        if path == "/api/whoami-v2":
            return {"name": "me", "type": "user"}
        if path == "/api/repos/create":
            self.created = json.loads(body)
            return {"url": f"{self.address}/me/x"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path == "/api/models/me/x/preupload/main":
            return {
                "files": [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                    for file in json.loads(body)["files"]
                ]
            }
        if path == "/api/models/me/x/commit/main":
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            return {"commitUrl": f"{self.address}/me/x/commit/1", "commitOid": "1" * 40, "success": True}
        return None


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    from huggingface_hub import constants

    fake = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", fake.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_token, "_token", "hf_planted")
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFleet:
    folder = tmp_path / "tower/runs" / RUN / "final"
    folder.mkdir(parents=True)
    for name, content in FINAL.items():
        (folder / name).write_bytes(content)
    described = SimpleNamespace(recipe=SimpleNamespace(model=SimpleNamespace(name="~/models/smollm2", is_folder=True)))
    monkeypatch.setattr(run_folder, "description_of", lambda paths: described)
    monkeypatch.setattr(run_folder, "plan_of", lambda paths: SimpleNamespace(nodes=[SimpleNamespace(name="tower")]))
    return FakeFleet(tmp_path, ("tower",))


def pushed(fleet: FakeFleet, tmp_path: Path, **changes: Any) -> push.Pushed:
    wanted = push.PushRequest(**{"repository": "me/x", "base_model": "org/smollm2-135m", **changes})
    return push.push(fleet, RunPaths(tmp_path / RUN), tmp_path / "models/x", wanted, lambda text: None)


def is_private(server: FakeHub) -> bool:
    """huggingface_hub 2.4 asks with `visibility`, older ones with `private`."""
    said: bool = server.created["private"] if "private" in server.created else server.created["visibility"] == "private"
    return said


def test_the_files_are_there_and_name_the_base_as_the_hub_does(fleet: FakeFleet, server: FakeHub, tmp_path: Path) -> None:
    done = pushed(fleet, tmp_path)
    assert done.files == tuple(sorted(FINAL)) == tuple(sorted(server.files)) and is_private(server)
    assert json.loads(server.files["adapter_config.json"]) == {"base_model_name_or_path": "org/smollm2-135m", "r": 8}
    assert (
        b'base_model: "org/smollm2-135m"\n' in server.files["README.md"] and b"`org/smollm2-135m` fine-tuned" in server.files["README.md"]
    )
    assert server.files["adapter_model.safetensors"] == FINAL["adapter_model.safetensors"]
    assert json.loads((tmp_path / "models/x/adapter_config.json").read_bytes())["base_model_name_or_path"] == "/home/me/models/smollm2", (
        "the copy here is as fetched"
    )
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["x"]
    assert pushed(fleet, tmp_path, is_public=True).files == done.files and is_private(server) is False, "once more"


def test_what_a_program_has_saved_in_folders_is_uploaded_in_them(tmp_path: Path) -> None:
    place, folder = tmp_path / "x", tmp_path / "model"
    texts = {
        "fetched.json": json.dumps({"files": dict.fromkeys(["notes.txt", "step-10/fetched.json", "step-10/tokenizer/vocab.json"], "0" * 64)}),
        "notes.txt": "n", "step-10/tokenizer/vocab.json": "/m/base", "step-10/fetched.json": "{}", ".cache/a.json": "{}", "step-10/.lock": "",
        "private-questions.jsonl": "{}", "step-10/mine.txt": "mine",
    }  # fmt: skip
    for name, text in texts.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    names = push._copy(place, folder, "/m/base", "org/base")
    assert names == ["notes.txt", "step-10/fetched.json", "step-10/tokenizer/vocab.json"]
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == set(names)
    assert (folder / "step-10/tokenizer/vocab.json").read_text() == "org/base"


def test_an_adapter_of_an_earlier_version_names_its_base_on_the_hub_all_the_same(
    fleet: FakeFleet, server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It named the quantised base that its node had kept."""
    settings = tmp_path / "tower/runs" / RUN / "final" / "adapter_config.json"
    settings.write_text(json.dumps({"base_model_name_or_path": "/home/me/homelab/bases/x-nf4-0123456789abcdef-float32", "r": 8}))
    described = SimpleNamespace(recipe=SimpleNamespace(model=SimpleNamespace(name="gpt2", is_folder=False)))
    monkeypatch.setattr(run_folder, "description_of", lambda paths: described)
    pushed(fleet, tmp_path, base_model=None)
    assert json.loads(server.files["adapter_config.json"])["base_model_name_or_path"] == "gpt2"


@pytest.mark.parametrize(
    ("status", "words", "fix"),
    [
        ({"/whoami-v2": 401}, "the hub does not know this token", "hf auth login"),
        ({"/create": 403}, "this token may not write to me/x", "choose a name below your own"),
        ({"/create": 500}, "the hub refuses it with status 500", "run the command again"),
    ],
)
def test_without_rights_nothing_is_fetched(
    fleet: FakeFleet, server: FakeHub, tmp_path: Path, status: dict[str, int], words: str, fix: str
) -> None:
    server.status = status
    with pytest.raises(HomelabError) as refused:
        pushed(fleet, tmp_path)
    assert words in refused.value.message and fix in str(refused.value.hint) and "me/x" in str(refused.value.where)
    assert not (tmp_path / "models").exists() and server.files == {} and "hf_planted" not in str(refused.value)


def test_a_commit_that_is_refused_leaves_nothing_behind(fleet: FakeFleet, server: FakeHub, tmp_path: Path) -> None:
    server.status = {"/commit/main": 403}
    with pytest.raises(HomelabError, match="may not write"):
        pushed(fleet, tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["x"] and server.files == {}


def test_no_hub_no_token_no_name(fleet: FakeFleet, server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="which nobody on the hub has") as unnamed:
        pushed(fleet, tmp_path, base_model=None)
    assert f"homelab push --base-model ORGANISATION/MODEL {RUN} me/x" in str(unnamed.value.hint)
    server.server.shutdown()
    server.server.server_close()
    with pytest.raises(HomelabError, match="the hub cannot be reached"):
        pushed(fleet, tmp_path)
    monkeypatch.setattr(hub_token, "_token", "")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(HomelabError, match="there is no token"):
        pushed(fleet, tmp_path)
    assert server.asked == []


@pytest.mark.parametrize(
    "name", ["x", "", "me/x/y", "me/..", "me/a--b", "/x", "me/", "-me/x", "me/" + "x" * 96, "me/x.git", "me/$(touch y)", "me/x "]
)
def test_names_that_the_hub_does_not_take(name: str) -> None:
    with pytest.raises(InputError, match="is not a repository name of the hub"):
        hub.checked_name(name)


def test_folders_are_replaced_the_longest_first() -> None:
    assert (
        push.with_hub_name('{"a": "/m/base-large", "b": "/m/base"}', ["/m/base", "/m/base-large"], "org/b")
        == '{"a": "org/b", "b": "org/b"}'
    )
    assert push.in_card("no front matter", "org/b") == "no front matter"
