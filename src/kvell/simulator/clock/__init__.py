"""Virtual time: events, links, and a network made of them."""
