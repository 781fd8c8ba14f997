"""What all commands share: options, environment, errors, files, progress, tables."""
