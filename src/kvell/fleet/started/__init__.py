"""Instances that this process owns: started, restarted, added and drained."""
