"""Every rank holds the whole model, and gradients are summed."""
