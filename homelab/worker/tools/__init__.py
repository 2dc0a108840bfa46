"""Programs beside the training: chat, tests and dry runs."""
