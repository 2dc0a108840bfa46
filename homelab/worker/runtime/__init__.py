"""The process of a rank: its task, its process group, its records."""
