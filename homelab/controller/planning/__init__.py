"""Pure decisions: facts and a recipe in, a plan out. Nothing here reads a file, a clock or a network."""
