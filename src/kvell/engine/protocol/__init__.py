"""Everything that a front and an instance say to each other, and the loop that answers."""
