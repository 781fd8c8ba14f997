"""The release of this installation."""

RELEASE = "0.4.0"
