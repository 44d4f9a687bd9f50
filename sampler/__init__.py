"""Items to tokens, tokens to outputs; keeps a run's state alive across a tool call."""
