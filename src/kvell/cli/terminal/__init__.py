"""What all commands share: options, environment, errors, progress, tables."""
