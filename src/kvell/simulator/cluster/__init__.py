"""Many instances and their front in virtual time, with the engine's own code for all decisions."""
