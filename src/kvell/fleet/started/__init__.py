"""Instances kept together: started, restarted, added and drained, for a front or a manager."""
