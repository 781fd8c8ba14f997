"""Images of a prompt: their content, their tensors, and the place of their embeddings."""
