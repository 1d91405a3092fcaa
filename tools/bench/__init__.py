"""`penstock bench`: a load generator for any OpenAI endpoint, and the comparisons behind the figures in docs."""
