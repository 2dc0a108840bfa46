"""The base model by its config.json: its shape, the models that are known by name, and what is refused."""
