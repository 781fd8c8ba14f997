"""The command line: arguments, environment and printing; it makes no decisions."""
