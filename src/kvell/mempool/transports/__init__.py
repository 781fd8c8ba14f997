"""The transport of messages and pages between processes."""
