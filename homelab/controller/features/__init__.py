"""What a person can ask for: one folder a feature, its pure decisions and its sequence side by side."""
