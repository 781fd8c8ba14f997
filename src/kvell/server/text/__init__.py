"""Text of prompts and answers: token ids, stop strings, usage."""
