"""Cases of norms, rotary embedding with the cache write, gates, embeddings, gathers and page copies."""
