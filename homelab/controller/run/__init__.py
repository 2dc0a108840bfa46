"""A run is a folder: its paths, its state, and atomic reading and writing."""
