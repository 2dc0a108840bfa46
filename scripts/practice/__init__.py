"""What tests and scripts share: a controller with a terminal on a practice cluster, a tiny model, and what can be wrong with a machine. No part of the product.

It imports neither tests nor other scripts (`tests/test_imports.py`).
"""
