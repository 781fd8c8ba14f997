"""Images of a prompt: their content, their tensors, and where their embeddings lie."""
