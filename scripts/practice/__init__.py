"""What tests and scripts share: a controller with a terminal on a practice cluster, and a tiny model. No part of the product.

It imports neither tests nor other scripts (`tests/test_imports.py`).
"""
