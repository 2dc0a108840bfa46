"""`homelab bench`: the cells of a suite, each a run of the product, measured and shown side by side."""
