"""A card that is not there: programs and modules that answer from recorded replies what a real one would be asked.

    folder = lab node's `bin` folder, first on its PATH
    fake_gpu.nvidia_smi(folder, fake_gpu.reply("nvidia-smi-550-thermal.xml"))
    fake_gpu.torch(another folder, [...])       # first on its PYTHONPATH

The program refuses every question that the agent does not ask, so that a new question is noticed.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from homelab.node.probes import nvidia
from homelab.node.system import utilisation

REPLIES = Path(__file__).parent / "recorded" / "replies"
# All that the agent asks: in a poll the first (drivers before 510 refuse it, then the second), for facts the third.
POLL = f"--query-gpu={','.join(utilisation._GPU_FIELDS)} --format=csv,noheader,nounits"
POLL_OLD = f"--query-gpu={','.join(utilisation._GPU_FIELDS[: utilisation._OLD])} --format=csv,noheader,nounits"
FACTS = "-q -x"


def reply(name: str) -> str:
    """A recorded reply."""
    return (REPLIES / name).read_text(encoding="utf-8")


def nvidia_smi(folder: Path, xml: str, *, compute_capability: str = "8.6") -> Path:
    """Puts a `nvidia-smi` into `folder` that answers the agent's questions from one XML reply, the poll's too."""
    cards = nvidia.parse(xml)["cards"]
    rows = [_row(card, compute_capability) for card in cards]
    return program(
        folder,
        "nvidia-smi",
        {FACTS: xml, POLL: "".join(f"{row}\n" for row in rows), POLL_OLD: "".join(f"{row.rsplit(', ', 3)[0]}\n" for row in rows)},
    )


def failing_nvidia_smi(folder: Path, text: str, code: int) -> Path:
    """A `nvidia-smi` that says the same to every question and ends with `code` (9: no driver, 6: no card, 18: mismatch)."""
    return program(folder, "nvidia-smi", {FACTS: text, POLL: text, POLL_OLD: text}, code=code)


def program(folder: Path, name: str, answers: Mapping[str, str], *, code: int = 0) -> Path:
    """A shell script that knows these arguments and their answers, and refuses all others as nvidia-smi does, with status 2."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    lines = ["#!/bin/sh", 'case "$*" in']
    lines += [f"{shlex.quote(words)}) printf %s {shlex.quote(text)}; exit {code} ;;" for words, text in answers.items()]
    lines += ["*) echo \"Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\" >&2; exit 2 ;;", "esac"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def held(xml: str, holders: Iterable[tuple[int, str, str, int]]) -> str:
    """The reply with these processes on its first card: (process id, type "C" or "G", program, MiB). `used` and `free` follow."""
    entries, used = "", 0
    for pid, kind, name, mebibytes in holders:
        used += mebibytes
        entries += f"<process_info><pid>{pid}</pid><type>{kind}</type><process_name>{name}</process_name><used_memory>{mebibytes} MiB</used_memory></process_info>"
    xml = re.sub(r"<processes>.*?</processes>", f"<processes>{entries}</processes>", xml, count=1, flags=re.DOTALL)
    memory = re.search(r"<fb_memory_usage>.*?</fb_memory_usage>", xml, flags=re.DOTALL)
    assert memory is not None
    total = int(re.findall(r"<total>(\d+) MiB", memory.group())[0])
    changed = re.sub(r"<used>.*?</used>", f"<used>{used} MiB</used>", memory.group())
    reserved = sum(map(int, re.findall(r"<reserved>(\d+) MiB", memory.group())))
    changed = re.sub(r"<free>.*?</free>", f"<free>{total - used - reserved} MiB</free>", changed)
    return xml.replace(memory.group(), changed, 1)


def torch(
    folder: Path, devices: Iterable[tuple[str, tuple[int, int]]], *, cuda: str = "13.0",
    architectures: Iterable[str] = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"), error: str = "", four_bit_error: str = "",
    uuids: Iterable[str] = (),
) -> None:  # fmt: skip
    """Puts packages `torch` and `bitsandbytes` into `folder` that stand for a CUDA build with these cards (name, capability).

    They know only what the agent's question to torch uses. `error` is raised by the matmul, `four_bit_error` by a quantised layer. With `uuids`
    (none: an old torch) the order and the cards that it was told stand in `folder`/told.
    """
    (folder / "torch").mkdir(parents=True, exist_ok=True)
    (folder / "torch" / "version.py").write_text(f"cuda = {cuda!r}\n", encoding="utf-8")
    told = json.dumps([[name, list(capability)] for name, capability in devices])
    values: dict[str, Any] = {
        "devices": told,
        "architectures": list(architectures),
        "error": error,
        "uuids": list(uuids),
        "told": str(folder / "told"),
        "build": f"2.13.0+cu{cuda.replace('.', '')}",
    }
    (folder / "torch" / "__init__.py").write_text(_TORCH.format(**values), encoding="utf-8")
    (folder / "bitsandbytes.py").write_text(_BITSANDBYTES.format(error=four_bit_error), encoding="utf-8")


def _row(card: Mapping[str, Any], compute_capability: str) -> str:
    def mebibytes(key: str) -> str:
        return "[N/A]" if card[key] is None else str(card[key] >> 20)

    def number(key: str, digits: int = 0) -> str:
        return "[N/A]" if card[key] is None else f"{card[key]:.{digits}f}"

    return ", ".join(
        [
            str(card["index"]), card["name"], mebibytes("memory_total_bytes"), mebibytes("memory_used_bytes"), number("temperature_c"),
            number("utilization_percent"), number("power_w", 2), compute_capability, number("power_limit_w", 2),
            mebibytes("memory_reserved_bytes"),
        ]
    )  # fmt: skip


_TORCH = """
import contextlib
import json
import os
import types

__version__ = {build!r}
float16 = "float16"
_devices = json.loads({devices!r})


class _Result:
    def cpu(self):
        return self

    def __matmul__(self, other):
        if {error!r}:
            raise RuntimeError({error!r})
        return self

    def all(self):
        return True


class cuda:
    device = contextlib.nullcontext
    is_available = staticmethod(lambda: bool(_devices))
    device_count = staticmethod(lambda: len(_devices))
    get_arch_list = staticmethod(lambda: {architectures!r})
    get_device_name = staticmethod(lambda index: _devices[index][0])
    get_device_capability = staticmethod(lambda index: tuple(_devices[index][1]))

    @staticmethod
    def get_device_properties(index):
        with open({told!r}, "w") as stream:
            stream.write(os.environ["CUDA_DEVICE_ORDER"] + " " + os.environ["CUDA_VISIBLE_DEVICES"])
        return types.SimpleNamespace(uuid={uuids!r}[index])


def randn(*shape, **options):
    return _Result()


def allclose(first, second, atol):
    return True


def isfinite(values):
    return values
"""
_BITSANDBYTES = """
class nn:
    class Linear4bit:
        def __init__(self, *sizes, **options):
            pass

        def to(self, device):
            return self

        def __call__(self, values):
            if {error!r}:
                raise RuntimeError({error!r})
            return values

    class Linear8bitLt:
        def __init__(self, *sizes, **options):
            self.weight = self.SCB = self

        def to(self, device):
            if {error!r}:
                raise RuntimeError({error!r})
            return self

        def all(self):
            return True
"""
