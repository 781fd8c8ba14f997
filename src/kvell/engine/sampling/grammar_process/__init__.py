"""The processes beside an instance in which grammars are compiled and followed."""
