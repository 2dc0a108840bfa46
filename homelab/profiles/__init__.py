"""What the profiled steps of a run show: operators, exchanges and memory. Pure."""
