"""The agent: shipped to every node, standard library only, Python >= 3.9."""
