"""A model's text, sorted into answer, reasoning and tool calls while it comes."""
