"""What the house promises of its own shape, measured over the syntax trees of the product. `python -m tests.limits` lists what breaks a limit."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import homelab

ROOT = Path(homelab.__file__).parent
MOST_PARAMETERS = 7
MOST_FUNCTION_LINES = 60
MOST_MODULE_LINES = 300
# From the ground up: a room imports from the rooms before it, and from no other.
ROOMS = (
    "protocol", "law", "node", "worker", "text", "shell", "models", "data_sheets", "hardware", "torch_builds", "errors", "config", "facts", "node_commands", "provision", "results",
    "planning", "discovery", "launchers", "runs", "tracking", "diagnose", "supervision", "checks", "remote", "dashboard", "profiles", "run_report", "benchmark", "control",
    "lab", "cli", "__main__",
)  # fmt: skip
# What runs on a node is shipped: it imports these rooms, and the controller imports none of it.
SHIPPED = {"node": {"protocol"}, "worker": {"protocol", "law"}}
# One name, one meaning: the modules that share a name, and the meaning that they share.
SHARED_NAMES = {
    "base": "the class that everything in its folder derives from",
    "card_memory": "the memory of a graphics card",
    "cards": "graphics cards",
    "chat": "one question to the trained model",
    "claims": "the claim on a run and its nodes",
    "clock": "the time of a node",
    "collective_test": "the all-reduce over all nodes before a launch",
    "connectivity": "connections between nodes",
    "conversation": "questions to a run's model, and answers as they are computed",
    "curves": "the curves of a run",
    "data": "the training data",
    "data_sample": "a look into the training data before a launch",
    "ddp": "the strategy in which every rank holds the whole model",
    "errors": "errors in three parts",
    "fetch": "a result that comes to this machine",
    "firewall": "the firewall of a node",
    "fit": "whether a training fits into memory",
    "gpu": "what a node says of its cards",
    "hub": "the Hugging Face hub",
    "inputs": "what a plan or a launch is made from",
    "lab": "the practice cluster",
    "leftovers": "what is left of a run that is over",
    "logs": "what the ranks printed",
    "memory_dry_run": "a training step on fake tensors",
    "gguf": "a model as one GGUF file",
    "merge": "the adapter put into its base",
    "model": "the base model as files",
    "model_build": "the base model without its weights, before a launch",
    "network": "the network of a node",
    "ownership": "who may end a run",
    "packet_loss": "packets that are lost between two nodes",
    "page": "one HTML file",
    "paths": "the paths of a run",
    "pipeline": "the strategy in which every rank holds some of the layers",
    "plan": "who computes what",
    "power": "what lets a node sleep or restart",
    "preflight": "all checks before a run",
    "push": "the trained model goes to the hub",
    "python": "the Python of a node and its packages",
    "recipe": "what is trained and how",
    "registry": "what can be chosen by its name",
    "resources": "disk, memory and open files of a machine",
    "run": "a training from its start to its end",
    "runs": "the runs of a machine",
    "sharded": "the strategies in which the ranks divide the model",
    "speed_profiles": "the files of measured speeds",
    "ssh": "SSH",
    "stage_chat": "one question to a model in stages",
    "stop": "the end of a run by hand",
    "tensorboard": "the curves for TensorBoard",
    "training": "what is trained",
    "xid": "the NVIDIA driver's error reports",
    "wake": "switching on a machine that sleeps",
}
# JSON is read or written here; what comes out goes into a type before it leaves the room.
READS_JSON = (
    "protocol/files.py", "protocol/manifest.py", "runs/event_log.py", "runs/fingerprint.py", "runs/poll_reply.py", "runs/process_owner.py", "runs/store.py",
    "planning/memory/architecture.py", "planning/render/time_table.py",
)  # fmt: skip


@dataclass(frozen=True)
class Breach:
    """One place that breaks a limit: `file:line`, and what is there."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Every module of the product, parsed."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}


@functools.cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a module; the rules ask for them six times over."""
    return tuple(ast.walk(tree))


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(path: Path) -> str:
    """The room of a module: its top folder, or its own name where it stands at the top."""
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else path.stem


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, tree in trees().items():
        yield from ((path, node) for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def parameter_count(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters without `self` and `cls`. The functions that Typer calls have none: theirs are the options of a command line."""
    arguments = function.args
    parameters = [
        argument for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if argument.arg not in ("self", "cls")
    ]
    if room_of(path) == "cli" and parameters and all(is_option(parameter) for parameter in parameters):
        return 0
    return len(parameters)


def is_option(parameter: ast.arg) -> bool:
    """Whether its type is what Typer reads: Annotated with an option or an argument, or one of those that the commands share."""
    words = ast.unparse(parameter.annotation) if parameter.annotation else ""
    return "typer." in words or words.endswith(("Option", "Argument")) or words == "Folder"


def too_many_parameters() -> list[Breach]:
    return [
        Breach(f"{label(path)}:{function.lineno}", f"{function.name} has {parameter_count(path, function)} parameters")
        for path, function in functions()
        if parameter_count(path, function) > MOST_PARAMETERS
    ]


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function; those of its signature are not counted where Typer reads its options there."""
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    first = function.body[0].lineno if arguments and all(map(is_option, arguments)) else function.lineno
    return (function.end_lineno or function.lineno) - first + 1


def too_long_functions() -> list[Breach]:
    return [
        Breach(f"{label(path)}:{function.lineno}", f"{function.name} has {length(function)} lines")
        for path, function in functions()
        if length(function) > MOST_FUNCTION_LINES
    ]


def line_counts() -> dict[str, int]:
    return {label(path): len(path.read_text(encoding="utf-8").splitlines()) for path in trees()}


def too_long_modules() -> list[Breach]:
    return [Breach(name, f"{count} lines") for name, count in line_counts().items() if count > MOST_MODULE_LINES]


def names_with_two_meanings() -> list[Breach]:
    """Modules that share a file name, unless the name is listed with the meaning that they share."""
    holders: dict[str, list[str]] = {}
    for path in trees():
        if not path.stem.startswith("__"):
            holders.setdefault(path.stem, []).append(label(path))
    return [Breach(", ".join(places), "one name") for name, places in holders.items() if len(places) > 1 and name not in SHARED_NAMES]


def imported(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(module of ours, line) of every import, those for type checkers too."""
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "homelab":
            names = [f"homelab.{alias.name}" for alias in node.names] if node.module == "homelab" else [node.module]
            yield from ((name, node.lineno) for name in names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.startswith("homelab."))


def against_the_arrows() -> list[Breach]:
    """Imports of a room that lies above, or of a room that is shipped elsewhere."""
    breaches = []
    for path, tree in trees().items():
        room = room_of(path)
        if room == "__init__":
            continue
        for module, line in imported(tree):
            target = module.split(".")[1]
            if target == room or target.startswith("__"):
                continue
            allowed = SHIPPED[room] if room in SHIPPED else set(ROOMS[: ROOMS.index(room)]) - set(SHIPPED)
            if target not in allowed:
                breaches.append(Breach(f"{label(path)}:{line}", f"{room} imports {module}"))
    return breaches


def untyped_between_rooms() -> list[Breach]:
    """Functions with `dict[str, Any]` in their signature that another room uses."""
    untyped = {}
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                signature = ast.unparse(node.args) + (ast.unparse(node.returns) if node.returns else "")
                if "dict[str, Any]" in signature:
                    untyped[(f"homelab.{label(path)[:-3].replace('/', '.')}", node.name)] = (path, node.lineno)
    breaches: dict[tuple[str, str], set[str]] = {}
    for path, tree in trees().items():
        modules: dict[str, str] = {}
        used: list[tuple[str, str]] = []
        for node in nodes(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    used.append((node.module, alias.name))
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        for node in nodes(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                used.append((modules[node.value.id], node.attr))
        for key in used:
            if key in untyped and room_of(untyped[key][0]) != room_of(path):
                breaches.setdefault(key, set()).add(label(path))
    return [
        Breach(f"{label(untyped[key][0])}:{untyped[key][1]}", f"{key[1]} gives or takes dict[str, Any], used by {', '.join(sorted(users))}")
        for key, users in breaches.items()
        if not label(untyped[key][0]).startswith(READS_JSON)
    ]


def summary() -> list[str]:
    """The limits and what is reached, a line each, as `scripts/test` prints them."""
    parameters = max((parameter_count(path, function), f"{function.name} in {label(path)}") for path, function in functions())
    lines = max((length(function), f"{function.name} in {label(path)}") for path, function in functions())
    module = max((count, name) for name, count in line_counts().items())
    return [
        f"parameters of a function: at most {parameters[0]} ({parameters[1]}); limit {MOST_PARAMETERS}",
        f"lines of a function: at most {lines[0]} ({lines[1]}); limit {MOST_FUNCTION_LINES}",
        f"lines of a module: at most {module[0]} ({module[1]}); limit {MOST_MODULE_LINES}",
        f"module names with two meanings: {len(names_with_two_meanings())}; {len(SHARED_NAMES)} names are shared by modules of one meaning",
        f"imports against the arrows: {len(against_the_arrows())} of {sum(1 for tree in trees().values() for _ in imported(tree))}",
        f"dict[str, Any] between rooms: {len(untyped_between_rooms())}",
    ]


LIMITS = (too_many_parameters, too_long_functions, too_long_modules, names_with_two_meanings, against_the_arrows, untyped_between_rooms)

if __name__ == "__main__":
    for limit in LIMITS:
        print(*(f"{limit.__name__}: {breach}" for breach in limit()), sep="\n")
    print(*summary(), sep="\n")
