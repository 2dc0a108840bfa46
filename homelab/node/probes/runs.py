"""Runs of ours that are alive here, and those that are over whose secrets were still here."""

from homelab.node import leftovers, processes


def read(request):
    """Their names."""
    alive = sorted(processes.of_runs(request["workdir"], request["node"]))
    return {"runs_alive": alive, "secrets_removed": leftovers.remove_secrets(request["workdir"])}
