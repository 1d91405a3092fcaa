"""Open streams of a client: one, the table of all, and how their readers take turns."""
