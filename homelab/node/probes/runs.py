"""Runs of ours that are alive here."""

from homelab.node import processes


def read(request):
    """Their names."""
    return {"runs_alive": sorted(processes.of_runs(request["workdir"], request["node"]))}
