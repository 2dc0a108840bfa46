"""What a run has made comes to this machine, is merged, and becomes a file for others."""
