"""Model families: those that are served, their code, and the reasons why others are refused."""
