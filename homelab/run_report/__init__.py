"""The report of a run: one value made of the files of its folder, and one HTML file made of the value. Pure."""
