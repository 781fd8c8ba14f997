"""An instance as a child process: started, watched, restarted."""
