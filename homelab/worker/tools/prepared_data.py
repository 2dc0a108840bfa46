"""python -m homelab.worker.tools.prepared_data: fetch a data set of the hub and prepare it, in the cache of the library `datasets`.

Reads one JSON object from standard input, {"path", "config", "revision", "token"}, and prints {"folder", "cache"} as its last line: where it lies, and the
library's cache above it. The exit code is 1 for an error of the library, whose words are then the last line of standard error.
"""

from __future__ import annotations

import json
import sys


def main() -> int:
    """Read the question, fetch, print the place."""
    question = json.load(sys.stdin)
    try:
        from datasets import config, load_dataset_builder
        from datasets.utils import disable_progress_bars

        disable_progress_bars()
        builder = load_dataset_builder(question["path"], question["config"], revision=question["revision"], token=question["token"] or None)
        builder.download_and_prepare()
    except Exception as error:  # noqa: BLE001 - the library raises a dozen kinds
        print((str(error).splitlines() or [type(error).__name__])[0], file=sys.stderr)
        return 1
    print(json.dumps({"folder": str(builder.cache_dir), "cache": str(config.HF_DATASETS_CACHE)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
