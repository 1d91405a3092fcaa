"""How model families write tool calls, one module for each."""
