"""Messages and pages between hosts: authenticated, checked, and not encrypted."""
