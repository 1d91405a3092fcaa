"""How each endpoint words its answer: one module per endpoint, all behind `Format`."""
