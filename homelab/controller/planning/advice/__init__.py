"""What a person may consider beside the plan."""
