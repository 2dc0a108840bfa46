"""What of a run's metrics a tracker gets, and what it has got already. Pure."""
