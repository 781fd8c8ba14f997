"""What concerns more than one instance, decided in one place."""
