"""`python -m homelab.node VERB [MARK]`: one request (a JSON line on stdin), one answer (a JSON line on stdout).

A refusal is {"error": {"message", "kind"}} and exit code 1; nothing here prints a traceback for a request that cannot be.
Verbs with a body (receive-*) read it from stdin after the request line; send-* write raw bytes to stdout.
"""

import json
import os
import subprocess
import sys
import traceback

VERSION = 1


class Refusal(ValueError):
    """A refusal that knows more than its message: where, and what mends it."""

    def __init__(self, message, where=None, hint=None):
        super().__init__(message)
        self.where = where
        self.hint = hint


def main():
    """Dispatch one verb. Modules are imported where they are needed: an answer should cost milliseconds."""
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    if verb == "watch":  # our own detached part, not a question
        from homelab.node import watch

        watch.watch(sys.argv[2])
        return 0
    if len(sys.argv) > 2:  # a line to begin with: what this Python itself has printed on start (sitecustomize) comes before it
        sys.stdout.write(sys.argv[2] + "\n")
        sys.stdout.flush()
    if sys.version_info < (3, 9):  # noqa: UP036  (a node may have any)
        version = "%d.%d" % tuple(sys.version_info[:2])
        _refuse(
            "%s is Python %s, and homelab needs 3.9 or newer" % (sys.executable, version), "refused",
            hint="install a newer Python on this node, make an environment with it, then edit cluster.toml: python = ...",
        )  # fmt: skip
        return 1
    try:
        line = sys.stdin.buffer.readline()
        request = json.loads(line) if line.strip() else {}
        for whose in ("recipe_environment", "node_environment"):  # for all that runs here, probes too; cluster.toml goes before the recipe
            os.environ.update(request.get(whose) or {})
        answer = _answer(verb, request)
        if answer is not None:
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
        return 0
    except (ValueError, KeyError, OSError) as error:
        kind = "full" if getattr(error, "errno", None) == 28 else getattr(error, "kind", "refused")
        text = (
            "%s: %s" % (error.strerror, error.filename) if isinstance(error, OSError) and error.strerror else str(error)
        )
        _refuse(text, kind, where=getattr(error, "where", None), hint=getattr(error, "hint", None))
    except Exception as error:  # our mistake: the controller shows it as an internal error, with this text
        _refuse("%s: %s" % (type(error).__name__, error), "internal", traceback.format_exc())
    return 1


def _refuse(message, kind, trace=None, where=None, hint=None):
    error = {"message": message, "kind": kind, "trace": trace, "where": where, "hint": hint}
    sys.stdout.write(json.dumps({"error": error}) + "\n")
    sys.stdout.flush()


def _answer(verb, request):
    if verb == "facts":
        from homelab.node import facts

        return facts.collect(request)
    if verb in ("poll", "runs", "describe"):
        from homelab.node import poll

        return getattr(poll, verb)(request)
    if verb in ("claim", "release"):
        from homelab.node import claims

        return getattr(claims, verb)(request)
    if verb in ("start", "stop", "mark-stop", "undo"):
        from homelab.node import watch

        return getattr(watch, verb.replace("-", "_"))(request)
    if verb == "follow":
        from homelab.node import follow

        return follow.follow(request)
    if verb == "stacks":
        from homelab.node import stacks

        return stacks.stacks(request)
    if verb == "free-port":
        from homelab.node import ports

        return {"port": ports.free_port(int(request.get("low", 29501)))}
    if verb == "meet":
        from homelab.node import dials

        return dials.meet(request)
    if verb in ("collective", "collective-look", "collective-end", "collective-keep"):
        from homelab.node import collective

        return getattr(collective, verb.rpartition("-")[2])(request)
    if verb == "manifest":
        from homelab.node import manifest

        return manifest.manifest(request)
    if verb in ("has-file", "checkpoints", "verify-checkpoint"):
        from homelab.node import transfer

        return getattr(transfer, verb.replace("-", "_"))(request)
    if verb in ("receive-file", "receive-checkpoint"):
        from homelab.node import transfer

        return getattr(transfer, verb.replace("-", "_"))(request, sys.stdin.buffer)
    if verb in ("supervisor-needs", "supervisor-reach", "supervisor-start", "supervisor-look", "supervisor-end", "supervisor-discard"):
        from homelab.node import supervisor

        return getattr(supervisor, verb.rpartition("-")[2])(request)
    if verb == "supervisor-put":
        from homelab.node import supervisor

        return supervisor.put(request, sys.stdin.buffer)
    if verb == "sample-data":
        from homelab.node import sample

        return sample.sample_data(request, sys.stdin.buffer)
    if verb in ("send-checkpoint", "send-final"):
        from homelab.node import transfer

        return getattr(transfer, verb.replace("-", "_"))(request, sys.stdout.buffer)
    if verb == "chat":
        return _chat(request)
    if verb == "dry-run":
        return _dry_run(request)
    raise ValueError("this agent does not know %r" % verb)


def _chat(request):
    """Ask the worker's chat program; its answer is the last JSON line of its stdout."""
    from homelab.node import paths

    body = dict(request, run_dir=paths.run_dir(request["workdir"], request["run"]))
    limit_s = float(request.get("timeout_s", 300))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "homelab.worker.chat"],
            input=json.dumps(body),
            capture_output=True,
            text=True,
            timeout=limit_s,
            env=dict(os.environ, HF_HUB_DISABLE_PROGRESS_BARS="1", **_cards_of(body["run_dir"], request["node"])),
        )
    except subprocess.TimeoutExpired:
        raise ValueError("the model gave no answer within %.0f s" % limit_s) from None
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise _chat_error(done) from None


def _cards_of(run_folder, node):
    """The variables that name the cards of the newest attempt in which this node took part: others are not the run's, or are numbered otherwise."""
    from homelab.node import files, paths

    for attempt in reversed(paths.attempts(run_folder)):
        here = paths.node_dir(run_folder, attempt, paths.name_here(run_folder, attempt, node))
        started = files.read_object(os.path.join(here, "start.json"))
        if started:
            environment = started.get("environment") or {}
            return {name: environment[name] for name in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES") if name in environment}
    return {}


def _dry_run(request):
    """Ask the worker's dry run. It prints all results after each of them: when the time is over, those that are there are the answer."""
    limit_s = float(request.get("time_limit_s", 60))
    command = [sys.executable, "-m", "homelab.worker.dryrun"]
    try:
        done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=limit_s)
        said = done.stdout
    except subprocess.TimeoutExpired as late:
        done, said = None, late.stdout or ""
        said = said.decode(errors="replace") if isinstance(said, bytes) else said
    lines = [line for line in said.split("\n")[:-1] if line.strip()]
    try:
        return json.loads(lines[-1])
    except (ValueError, IndexError):
        if done is None:
            raise ValueError("the dry run did not end within %.0f s" % limit_s) from None
        raise _chat_error(done, "dry run") from None


def _chat_error(done, program="chat program"):
    """What the chat program said on stderr: its own three parts, or the last line of whatever went wrong."""
    parts = {}
    for line in done.stderr.splitlines():
        for label in ("error", "where", "fix"):
            if line.startswith(label + ": "):
                parts[label] = line[len(label) + 2 :]
    if "error" in parts:
        return Refusal(parts["error"], where=parts.get("where"), hint=parts.get("fix"))
    last = (done.stderr.strip().splitlines() or ["exit code %d" % done.returncode])[-1]
    return Refusal("the %s failed: %s" % (program, last[:500]))


if __name__ == "__main__":
    sys.exit(main())
