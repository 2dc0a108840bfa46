"""One model cut into stages: which layers each rank holds, what that takes of its memory, and how long a step is."""
