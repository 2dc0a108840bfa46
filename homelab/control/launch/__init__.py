"""Start a run: inputs, the run folder, torchrun on every node."""
