"""Step plans: who runs, and what a step computes."""
