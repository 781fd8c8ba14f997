"""From logits to tokens: penalties, grammars, draws, and how likely the tokens were."""
