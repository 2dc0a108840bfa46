"""The settings that must be made before torch and the Hugging Face libraries are imported, and the handling of their messages."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any


def prepare(run: dict[str, Any], *, bitsandbytes: bool, unsloth: bool = False) -> None:
    """Keep imports lean and the hub out of it. `bitsandbytes`: whether this process needs it; `unsloth`: it imports both by itself.

    transformers and PEFT import bitsandbytes and datasets whenever they are installed: 1.0 s of 3.8 s until the Trainer is there
    (measured, two cores). None in sys.modules is Python's own way to say "not installed".
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if not unsloth:  # nothing else of ours compiles; bitsandbytes loads the compiler at its import: 1.1 s of 5.3 s (measured, two cores)
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    hub_model = not run["recipe"]["model"]["name"].startswith(("/", "~"))
    hub_data = any(source["kind"] == "hub" for source in run["data"].values() if source)
    if not hub_model and not hub_data:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing of this run is on the hub: no request is needed
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    needed = {"datasets": unsloth or hub_data, "bitsandbytes": bitsandbytes}
    hidden = {name: None for name, is_needed in needed.items() if not is_needed and name not in sys.modules}
    sys.modules.update(hidden)  # type: ignore[arg-type]
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of kernels that only inference would use


def quiet() -> None:
    """No progress bars in log files, no warnings about the libraries' own future; and one warning becomes an error."""
    import warnings

    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    for library in ("accelerate", "transformers", "peft"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=library)
    # An operator without a gradient would train wrongly without an error.
    warnings.filterwarnings("error", message=".*autograd kernel was not registered")
