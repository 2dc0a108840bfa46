"""What the house promises of its own shape, measured over the syntax trees of the product. `python -m tests.limits` lists what breaks a limit."""

from __future__ import annotations

import ast
import functools
import graphlib
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import homelab
from tests import english

ROOT = Path(homelab.__file__).parent
MOST_PARAMETERS = 7
MOST_FUNCTION_LINES = 60
MOST_MODULE_LINES = 300
MOST_FIRST_LEVEL = 8
# A module this short that one other imports is a part of it, except where a table of programs or a proof of purity keeps it apart.
SMALL_MODULE_LINES = 40
MOST_SMALL_MODULES = 11
# A private function this short that one place calls is a part of that place, except where its name says what its lines do not.
SMALL_FUNCTION_LINES = 4
MOST_SMALL_FUNCTIONS = 282
# Most of them are a message of the node and what the controller reads of it.
MOST_SHARED_CLASS_NAMES = 10
# Folders whose children import each other: to be opened, and none to be added.
OPEN_CIRCLES = set[str]()
# From the ground up: the three programs, and below the rooms of the controller. A room imports from the rooms before it, and from no other.
PROGRAMS = ("shared", "node", "worker", "controller", "lab", "cli", "__main__")
ROOMS = ("base", "config", "facts", "planning", "launchers", "remote", "run", "diagnose", "checks", "dashboard", "attempt", "features")
# What runs on a node is shipped: it imports what is shared, and the controller imports none of it.
SHIPPED = {"node": {"shared"}, "worker": {"shared"}, "shared": set[str]()}
# One name, one meaning: the modules that share a name, and the meaning that they share.
SHARED_NAMES = {
    "answer": "the first line of what a command prints",
    "base": "the class that everything in its folder derives from",
    "card_memory": "the memory of a graphics card",
    "chat": "one question to the trained model",
    "claims": "the claim on a run and its nodes",
    "collective_check": "the all-reduce over all nodes before a launch",
    "connectivity": "connections between nodes",
    "conversation": "questions to a run's model, and answers as they are computed",
    "curves": "the curves of a run",
    "data": "the training data",
    "data_sample": "a look into the training data before a launch",
    "errors": "errors in three parts",
    "fetch": "a result that comes to this machine",
    "firewall": "the firewall of a node",
    "fit": "whether a training fits into memory",
    "gpu": "what a node says of its cards",
    "hub": "the Hugging Face hub",
    "inputs": "what a plan or a launch is made from",
    "lab": "the practice cluster",
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
    "plan": "who computes what",
    "power": "what lets a node sleep or restart",
    "preflight": "all checks before a run",
    "push": "the trained model goes to the hub",
    "python": "the Python of a node and its packages",
    "recipe": "what is trained and how",
    "registry": "what can be chosen by its name",
    "run": "a training from its start to its end",
    "runs": "the runs of a machine",
    "schema": "the JSON Schema of a file",
    "speed_profiles": "the files of measured speeds",
    "ssh": "SSH",
    "stage_chat": "one question to a model in stages",
    "stop": "the end of a run by hand",
    "tensorboard": "the curves for TensorBoard",
    "training": "what is trained",
    "xid": "the NVIDIA driver's error reports",
    "wake": "switching on a machine that sleeps",
}
# Folders of tests that mirror no folder of the product, and what they are about.
TESTS_OF_THEIR_OWN = {"worker/cards": "ranks that play by NCCL's rules without a card"}
# JSON is read or written here; what comes out goes into a type before it leaves the room.
READS_JSON = (
    "shared/protocol/message.py", "controller/config/schema.py",
    "shared/protocol/files.py", "shared/protocol/manifest.py", "controller/run/event_log.py", "controller/run/fingerprint.py",
    "controller/remote/poll_reply.py", "controller/run/process_owner.py", "controller/run/store.py", "controller/planning/model/architecture.py",
    "controller/planning/render/time_table.py",
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
    """The room of a module: its program, or below the controller its folder there. A module that stands at the top is its own room."""
    parts = path.relative_to(ROOT).parts
    return parts[0].removesuffix(".py") if parts[0] != "controller" else f"controller/{parts[1]}" if len(parts) > 2 else "controller"


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, tree in trees().items():
        yield from ((path, node) for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@functools.cache
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


def shared_class_names() -> dict[str, list[str]]:
    """Public class name -> the modules that have one of it, where they are several."""
    holders: dict[str, list[str]] = {}
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                holders.setdefault(node.name, []).append(label(path))
    return {name: places for name, places in holders.items() if len(places) > 1}


def too_many_shared_class_names() -> list[Breach]:
    """One class name, one meaning."""
    shared = shared_class_names()
    return [Breach(", ".join(places), name) for name, places in shared.items()] if len(shared) > MOST_SHARED_CLASS_NAMES else []


def small_modules() -> dict[str, str]:
    """Module -> the one module that imports it, of modules that are short."""
    importers: dict[str, list[str]] = {}
    for source, target in file_arrows():
        importers.setdefault(target, []).append(source)
    return {
        name: importers[name][0]
        for name, count in line_counts().items()
        if count < SMALL_MODULE_LINES and len(importers.get(name, ())) == 1 and not Path(name).stem.startswith("__")
    }


def too_many_small_modules() -> list[Breach]:
    """Modules that are a part of another: the eye finds no rest in files of a few lines."""
    small = small_modules()
    return [Breach(name, f"only {user} imports it") for name, user in small.items()] if len(small) > MOST_SMALL_MODULES else []


def small_functions() -> list[str]:
    """Private functions that are short and named once in their module: `file:line name`."""
    small = []
    for path, tree in trees().items():
        named = Counter(node.id for node in nodes(tree) if isinstance(node, ast.Name))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("_") and not node.decorator_list and named[node.name] == 1:
                first = node.body[1 if ast.get_docstring(node, clean=False) and len(node.body) > 1 else 0]
                if (node.end_lineno or 0) - first.lineno < SMALL_FUNCTION_LINES:
                    small.append(f"{label(path)}:{node.lineno} {node.name}")
    return small


def too_many_small_functions() -> list[Breach]:
    """Functions that are a part of their caller: the eye goes away from it and comes back with a line or two."""
    small = small_functions()
    return [Breach(*entry.split(" ")) for entry in small] if len(small) > MOST_SMALL_FUNCTIONS else []


def mean_function_lines() -> float:
    return statistics.mean(length(function) for _, function in functions())


def allowed_from(room: str) -> set[str]:
    """The rooms that `room` may import."""
    if room in SHIPPED:
        return SHIPPED[room]
    if room.startswith("controller/"):
        return {"shared", *(f"controller/{below}" for below in ROOMS[: ROOMS.index(room.partition("/")[2])])}
    below = set(PROGRAMS[: PROGRAMS.index(room)]) - set(SHIPPED) | {"shared"}
    return below | ({f"controller/{name}" for name in ROOMS} if "controller" in below else set())


def against_the_arrows() -> list[Breach]:
    """Imports of a room that lies above, or of a room that is shipped elsewhere."""
    breaches = []
    for (source, target), line in file_arrows().items():
        room, other = room_of(ROOT / source), room_of(ROOT / target)
        if other != room and room != "__init__" and other not in allowed_from(room):
            breaches.append(Breach(f"{source}:{line}", f"{room} imports {target}"))
    return breaches


@functools.cache
def file_arrows() -> dict[tuple[str, str], int]:
    """{(importing file, imported file): line of one import}, lazy imports and those for type checkers too; an `__init__` is no target."""
    known = {f"homelab.{label(path)[:-3].replace('/', '.')}": label(path) for path in trees()}
    arrows = {}
    for path, tree in trees().items():
        for node in nodes(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [name if (name := f"{node.module}.{alias.name}") in known else node.module for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            arrows.update({(label(path), known[name]): node.lineno for name in names if name in known and known[name] != label(path)})
    return arrows


def circles() -> list[Breach]:
    """What imports each other at any level: the files of a folder, its sub-folders, and the folders of the first level."""
    graphs: dict[str, dict[str, set[str]]] = {}
    for source, target in file_arrows():
        ours, theirs = (("homelab", *Path(name).parts) for name in (source, target))
        # The folder that holds both, and what they are in it: at every other level they are the same, or one of them is not there.
        depth = next(level for level, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other)
        if ours[depth] != "__init__.py":
            graphs.setdefault("/".join(ours[:depth]), {}).setdefault(ours[depth], set()).add(theirs[depth])
    breaches = []
    for folder, graph in sorted(graphs.items()):
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            if folder not in OPEN_CIRCLES:
                breaches.append(Breach(folder, " imports ".join(reversed(error.args[1]))))
    return breaches


def first_level() -> list[str]:
    return sorted(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(("_", ".")))


def too_many_at_first_sight() -> list[Breach]:
    """Folders of the first level: who opens the package sees the programs."""
    return [Breach("homelab", f"{len(first_level())} folders")] if len(first_level()) > MOST_FIRST_LEVEL else []


def unmirrored_tests() -> list[Breach]:
    """Folders of tests whose path is no folder of the product."""
    tests = ROOT.parent / "tests"
    folders = {str(file.parent.relative_to(tests)) for program in PROGRAMS for file in (tests / program).rglob("test_*.py")}
    return [
        Breach(f"tests/{name}", f"there is no homelab/{name}")
        for name in sorted(folders - TESTS_OF_THEIR_OWN.keys())
        if not (ROOT / name).is_dir()
    ]


def sequence_of(path: Path) -> str:
    """Its room; a run, its attempts and the features that act on them are one sequence."""
    room = room_of(path)
    return "controller/run" if room in ("controller/attempt", "controller/features") else room


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
                used += [(node.module, alias.name) for alias in node.names]
                modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        for node in nodes(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                used.append((modules[node.value.id], node.attr))
        for key in used:
            if key in untyped and sequence_of(untyped[key][0]) != sequence_of(path):
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
        f"lines of a function: {mean_function_lines():.1f} on average; of a module: {statistics.mean(line_counts().values()):.0f}",
        f"modules under {SMALL_MODULE_LINES} lines with one importer: {len(small_modules())}; limit {MOST_SMALL_MODULES}",
        f"functions of {SMALL_FUNCTION_LINES} lines with one caller: {len(small_functions())}; limit {MOST_SMALL_FUNCTIONS}",
        f"class names in several modules: {len(shared_class_names())}; limit {MOST_SHARED_CLASS_NAMES}",
        f"module names with two meanings: {len(names_with_two_meanings())}; {len(SHARED_NAMES)} names are shared by modules of one meaning",
        f"imports against the arrows: {len(against_the_arrows())} of {len(file_arrows())}",
        f"folders on the first level: {len(first_level())}; limit {MOST_FIRST_LEVEL}",
        f"circles of files or folders: {len(circles())}",
        f"dict[str, Any] between rooms: {len(untyped_between_rooms())}",
        f"README: {len(english.PAGES[0].read_text(encoding='utf-8').split())} words; limit {english.README_WORDS}",
        f"sentences of README and guide: {english.longest()} words at most; limit {english.MOST_WORDS}",
    ]


LIMITS = (
    too_many_parameters, too_long_functions, too_long_modules, names_with_two_meanings, against_the_arrows, too_many_at_first_sight, circles,
    untyped_between_rooms, too_many_shared_class_names, too_many_small_modules, too_many_small_functions,
    unmirrored_tests,
)  # fmt: skip

if __name__ == "__main__":
    for limit in LIMITS:
        print(*(f"{limit.__name__}: {breach}" for breach in limit()), sep="\n")
    print(*summary(), sep="\n")
