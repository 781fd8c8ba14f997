"""From what the user wrote after ``--model`` to a local directory."""
