"""llama.cpp's files for a node: from a checkout, and a library that is only taken when its digest is the tested one."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import homelab
from homelab.controller.features.results import llama_cpp

AGAIN = homelab("gguf")


def names(data: bytes) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return set(archive.getnames())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("convert_hf_to_gguf.py", "conversion/llama.py", "gguf-py/gguf/__init__.py", "models/large.bin"):
        path = tmp_path / "llama.cpp" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return tmp_path / "llama.cpp"


def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: str = "") -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in ("libllama.v1.so", "libggml.v1.so", "libggml-base.so", "libggml-cpu-haswell.so", "llama-addon.node"):
            archive.addfile(tarfile.TarInfo(f"package/bins/linux-x64/{name}"), io.BytesIO())
    (tmp_path / "linux-x64.tgz").write_bytes(buffer.getvalue())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(llama_cpp, "_LIBRARY", (tmp_path / "linux-{machine}.tgz").as_uri().replace("%7B", "{").replace("%7D", "}"))
    monkeypatch.setattr(llama_cpp, "_LIBRARY_SHA512", {"x64": digest or hashlib.sha512(buffer.getvalue()).hexdigest(), "arm64": "0" * 128})


def test_of_a_checkout_only_the_converter_is_sent(checkout: Path) -> None:
    digest, data = llama_cpp.archive(None, checkout, AGAIN)
    assert names(data) == {"convert_hf_to_gguf.py", "conversion/llama.py", "gguf-py/gguf/__init__.py"}
    (checkout / "conversion/llama.py").write_text("y")
    assert llama_cpp.archive(None, checkout, AGAIN)[0] != digest
    with pytest.raises(InputError, match="no convert_hf_to_gguf"):
        llama_cpp.archive(None, checkout / "models", AGAIN)


def test_the_library_comes_without_what_single_processors_need(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(tmp_path, monkeypatch)
    for _ in range(2):  # fetched, and from the cache
        assert {name for name in names(llama_cpp.archive("x86_64", checkout, AGAIN)[1]) if name.startswith("lib/")} == {
            "lib/libllama.v1.so", "lib/libggml.v1.so", "lib/libggml-base.so",
        }  # fmt: skip
        (tmp_path / "linux-x64.tgz").unlink(missing_ok=True)


def test_another_library_is_refused_and_nothing_is_kept(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(tmp_path, monkeypatch, "1" * 128)
    with pytest.raises(HomelabError, match="its digest differs"):
        llama_cpp.archive("x86_64", checkout, AGAIN)
    assert not list((tmp_path / "cache/homelab/setup").glob("*.tgz"))
    with pytest.raises(HomelabError, match="cannot be fetched") as refused:
        llama_cpp.archive("aarch64", checkout, AGAIN)
    assert "--quantise q8_0 needs none" in str(refused.value.hint)
    with pytest.raises(HomelabError, match=r"no llama\.cpp library for riscv64"):
        llama_cpp.archive("riscv64", checkout, AGAIN)
