"""Memory that one instance lends to another: whole sections of a request's pages, read in place."""
