"""Where new pages go, and who holds them."""
