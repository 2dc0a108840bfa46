"""Whether a program can compile a part of itself here: Triton makes the launcher of its kernels in C when the first one runs.

It takes CC, else gcc, else clang, and the headers of the Python that runs it (triton/runtime/build.py).
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from typing import TYPE_CHECKING

from homelab.node.system import programs

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject

_SOURCE = "#include <stdlib.h>\n#include <Python.h>\nvoid *homelab_answer(void) { return PyLong_FromLong(1); }\n"
_LIMIT_S = 30.0


def read() -> JsonObject:
    """{"compiler": path or None, "headers": the folder that should hold Python.h, "error": what the compiler said of a small program, None: it compiled}."""
    compiler = programs.path_of(os.environ["CC"]) if "CC" in os.environ else programs.path_of("gcc") or programs.path_of("clang")
    # Debian's own scheme names /usr/local, where its packages put no header.
    headers = sysconfig.get_paths(scheme="posix_prefix")["include"]
    return {"compiler": compiler, "headers": headers, "error": _error(compiler, headers) if compiler else None}


def _error(compiler: str, headers: str) -> str | None:
    folder = tempfile.mkdtemp(prefix="homelab-compiler-")
    source = os.path.join(folder, "answer.c")
    try:
        with open(source, "w") as stream:
            stream.write(_SOURCE)
        words = [compiler, source, "-O3", "-shared", "-fPIC", "-o", os.path.join(folder, "answer.so"), "-I" + headers]
        status, _, errors = programs.answer_of(words, _LIMIT_S, dict(os.environ, LC_ALL="C"))
    except OSError as error:  # TimeoutError is one
        return str(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    said = next((line for line in lines if "error:" in line), (lines or [f"exit code {status}"])[0])
    return said.replace(folder + "/", "")[:300] if status else None
