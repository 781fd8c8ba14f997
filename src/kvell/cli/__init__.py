"""The command line: arguments, environment and printing, without decisions."""
