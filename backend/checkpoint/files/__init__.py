"""Which files a model has, and the small ones: JSON, the tokenizer's, generation settings, progress of reading."""
