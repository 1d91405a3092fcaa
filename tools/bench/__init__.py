"""`penstock bench`: a load generator for any OpenAI endpoint, and the comparisons that the figures in docs come from."""
