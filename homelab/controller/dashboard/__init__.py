"""What a run looks like: collected into one Snapshot, drawn by a pure view, repeated by a small loop."""
