"""The imperative shell: sequences of steps over the fleet. Decisions are made in planning, checks, diagnose and runs.state."""
