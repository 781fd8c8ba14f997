"""The placement of new pages, and the holders of pages."""
