"""The release of this installation."""

RELEASE = "0.1.0.dev0"
