"""Resolution of ``--model`` to a local directory."""
