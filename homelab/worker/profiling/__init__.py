"""Some steps of a run under torch.profiler. Imported only where the launch asks for it."""
