"""Topics: what goes wrong with the programs, the model and the data."""

from __future__ import annotations

from homelab.diagnose.topic import Topic

TOPICS: tuple[Topic, ...] = (
    Topic(
        "different-versions",
        "The nodes have different versions",
        (
            "one node fails to import, or fails where the others do not",
            "Mismatched NCCL version detected : rank 1 version 22907 rank 0 version 22903; the loss is not that of a run on one node",
        ),
        "torch, NCCL and transformers must be the same everywhere: other versions speak other protocols, or compute a little differently. "
        "Each CUDA build of one torch brings an NCCL of its own, and two of them do not talk with each other. "
        "The CUDA toolkit of the system (nvcc) does not matter: torch brings its own; the driver only has to be new enough.",
        (
            "homelab preflight shows a table of what differs and offers the pip line for each node (--fix)",
            "then: homelab preflight --only python",
        ),
        checks=("python.same", "python.same_build", "python.version", "python.code"),
        rules=("nccl-version",),
        words=("version", "pip", "nvcc", "conda", "environment", "mismatch"),
    ),
    Topic(
        "missing-package",
        "A Python package is missing or broken",
        (
            "ModuleNotFoundError: No module named ...",
            "ImportError: cannot import name ...; undefined symbol; cannot open shared object file",
        ),
        "The Python that cluster.toml names for the node is not the one the packages were installed into, the packages do not fit each other "
        "after an upgrade of one, or there is no such Python. Or it is a module of your own [script] that was not shipped with it: what the script "
        "imports from beside it is, unless the import is written so that nobody sees it.",
        (
            "homelab preflight --only python names what is missing on which node and offers the pip line (--fix)",
            "another environment: python at the node in cluster.toml",
            "a recipe for Unsloth has one of its own (unsloth_python): homelab preflight RECIPE --only python names the command that makes it",
            "then: homelab recover RUN",
            "a module of your own: [script] files in the recipe, then homelab launch RECIPE",
        ),
        checks=("python.packages", "python.interpreter"),
        checks_too=("gpu.torch",),
        rules=("missing-package", "not-shipped", "import-error", "not-started"),
        words=("import", "module", "venv", "conda", "bitsandbytes", "torchrun", "interpreter", "undefined symbol", "unsloth"),
        says=r"needs the package|needs pyarrow",
    ),
    Topic(
        "crashed",
        "A program crashed inside native code",
        ("Segmentation fault (signal 11); Aborted (signal 6); Illegal instruction (signal 4); Bus error (signal 7)",),
        "Once may be chance. Again and again it is torch or a library that does not fit the machine (built for another processor, mixed from pip "
        "and conda), bad memory, or an unstable overclock.",
        (
            "homelab logs RUN: its last words before the crash, where it had some",
            "once: homelab recover RUN",
            "again on the same node: install torch anew there, and test its memory (memtest86+)",
            "again on all nodes: the program; homelab preflight --only python compares the versions",
        ),
        checks_too=("gpu.compute",),
        rules=("crashed", "aborted", "signal"),
        words=("segfault", "sigsegv", "sigabrt", "core dumped", "exit code -11", "139", "134"),
    ),
    Topic(
        "python-error",
        "The program itself failed",
        ("a Python traceback of your script; the worker's own error with where and fix; an exit code and no words",),
        "The program ended by itself: starting it again does the same again, so nothing is retried. A worker of homelab says what it saw, in "
        "which file and line, and what mends it.",
        (
            "homelab why RUN names the rank, the file and the line; homelab logs RUN has the whole of it",
            "an error in your script: correct your own file, that of the recipe, then: homelab launch RECIPE (to recover is to run it as it was)",
            "anything else: mend it, then: homelab recover RUN, or homelab launch RECIPE where [model], [data], [method] or [train] changed",
        ),
        rules=("python-error", "worker-error", "exit-code"),
        words=("traceback", "exception", "script", "bug", "exit code"),
    ),
    Topic(
        "missing-file",
        "A file is not on the node",
        ("FileNotFoundError: [Errno 2] No such file or directory: ...", "the data file is not on this node"),
        "A path that starts with / or ~/ must be there on every node; one relative to the recipe is sent from this machine. A [script] that "
        "opens files of its own must bring them, or find them on every node.",
        (
            "homelab preflight RECIPE --only data --only model names the node and the path, and offers to copy it (--fix)",
            "or write the data's path relative to the recipe: [data] train",
        ),
        checks=("data.there", "model.there"),
        rules=("missing-file",),
        words=("path", "FileNotFoundError", "nfs", "errno 2"),
        says=r"is not on this node",
    ),
    Topic(
        "gated-model",
        "The model is gated, or cannot be downloaded",
        ("401 Client Error; Access to model ... is restricted; GatedRepoError", "a node has no way to the Hub"),
        "Some models (Llama-2 among them) are given only to those who accepted a licence, and who show a token. The token of your machine is "
        "sent to the nodes for the run only, and is seen nowhere.",
        (
            "accept the licence on the model's page, then on this machine: export HF_TOKEN=hf_...",
            "a node without internet: copy the model's folder to every node and give its path as [model] name",
            "homelab preflight RECIPE --only model",
        ),
        checks=("model.licence", "model.hub"),
        words=("401", "403", "hf_token", "licence", "license", "llama", "hub", "offline", "huggingface", "restricted"),
        says=r"\bgated\b|HF_TOKEN|restricted|401 Client",
    ),
    Topic(
        "model-differs",
        "The model is damaged, or not the same on every node",
        (
            "the model cannot be loaded; the tokenizer cannot be loaded",
            "weights, config or tokenizer differ between nodes by digest",
            "the ranks do not hold the same base model: rank 2 (laptop) has another than rank 0 (tower), rank 1 (mini)",
        ),
        "A download that broke off, a copy that did not finish, or another revision; rarely memory that loses bits. Ranks that begin with different weights never train one "
        "model, whatever is added up; with another shape, NCCL fails or hangs.",
        (
            "homelab preflight RECIPE --deep --only model compares every file by its digest and names the nodes (without --deep: large files by samples)",
            "rsync -a --checksum MODEL/ NODE:MODEL/ from a node that has the right one; of the Hub: [model] revision in the recipe",
        ),
        checks=("model.same", "model.files", "model.tokenizer"),
        words=("weights", "revision", "safetensors", "RuntimeError: NCCL error", "tokenizer", "digest"),
        says=r"model cannot be loaded|the model folder|tokenizer cannot be loaded|do not hold the same base",
    ),
    Topic(
        "chat-template",
        "The tokenizer has no chat template",
        ("the data is chat, but the model's tokenizer has no chat template",),
        "A base model was never taught how a conversation looks. Its -Instruct or -Chat version was.",
        (
            "[model] name: the -Instruct or -chat version of the model",
            'or the data as prompt and completion: [data] format = "prompt-completion"',
        ),
        checks=("model.chat_template",),
        words=("instruct", "messages", "conversation"),
        says=r"no chat template",
    ),
    Topic(
        "data-differs",
        "The data is not the same on every node, or has changed",
        (
            "the data file differs from the one this run was launched with",
            "the ranks do not train on the same global batch",
            "the ranks do not have the same train rows; this data set was changed since the run began",
        ),
        "Every rank takes its rows by number from the same file. With another file on one node rows are trained twice and others never, so homelab "
        "compares contents (sha256) and refuses. Of the hub all load the revision of the launch; a node that does not reach it can only read "
        "what it has downloaded before.",
        (
            "a file that was sent (a path relative to the recipe): homelab recover RUN brings it again as it was at the launch",
            "a file that you have put on the nodes: homelab preflight RECIPE --only data.same names the node that differs",
            "copy the right file there: rsync -a --checksum FILE NODE:FILE; or let it be sent: a path relative to the recipe",
            "data of the hub: let the node reach it, then homelab recover RUN; [data] revision in the recipe names one for every launch",
            "data that was meant to change is a new training: homelab launch RECIPE",
        ),
        checks=("data.same",),
        words=("sha256", "dataset", "shard", "seed", "DistributedSampler"),
        says=r"data file differs|same global batch|not the one the run began with|the same (?:train|eval) rows|of this data set|data set was changed",
    ),
    Topic(
        "data-unreadable",
        "A row of the data cannot be used",
        ("this line is not JSON; a row is a JSON object; no token of the training data carries loss",),
        "A broken line, a column of another name, an empty file, or answers that are cut off because seq_len is too small for them.",
        (
            "homelab preflight RECIPE --only data names the file and the line",
            "answers cut off: [train] seq_len; a column of plain text: [data] text_column",
        ),
        checks=("data.parses", "data.truncated", "data.loss", "data.enough"),
        words=("json", "jsonl", "csv", "parquet", "column", "truncated", "seq_len", "utf-8"),
        says=r"is not JSON|is not CSV|no rows|carries loss|not UTF-8|row is a JSON object|Parquet file",
    ),
)
