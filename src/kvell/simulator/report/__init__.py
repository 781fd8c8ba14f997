"""What a replay measured, and its pictures."""
