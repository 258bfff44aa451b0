"""The publish of a task."""
