"""The two files a person writes: cluster.toml (who there is) and a recipe (what is trained)."""
