"""python -m homelab.worker.tools.gguf_quantise LIBRARIES SOURCE RESULT: a GGUF file in 4 bits (Q4_K_M), by llama.cpp's own library.

A process of its own: a fault in the library ends this one. The structure of the parameters is that of include/llama.h; only its first two
fields are written, and the rest is as the library gives it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_Q4_K_M = 15  # LLAMA_FTYPE_MOSTLY_Q4_K_M


class _Parameters(ctypes.Structure):
    # Larger than any release's: the library writes and reads as much as it knows.
    _fields_ = [("nthread", ctypes.c_int32), ("ftype", ctypes.c_int), ("rest", ctypes.c_char * 1016)]


def quantise(libraries: Path, source: str, result: str) -> int:
    """0, or the library's own code. Raises OSError where it cannot be loaded."""
    library = ctypes.CDLL(str(next(libraries.glob("libllama.*"))))
    library.llama_model_quantize_default_params.restype = _Parameters
    library.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(_Parameters)]
    library.llama_model_quantize.restype = ctypes.c_uint32
    library.llama_backend_init()
    parameters = library.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = _Q4_K_M, len(os.sched_getaffinity(0))
    return int(library.llama_model_quantize(os.fsencode(source), os.fsencode(result), ctypes.byref(parameters)))


if __name__ == "__main__":
    sys.exit(quantise(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
