"""Files of a run on this node: checkpoints, digests, transfer."""
