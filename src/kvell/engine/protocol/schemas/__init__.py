"""Pure rewriting of clients' JSON schemas and patterns into the form that the grammar supports."""
