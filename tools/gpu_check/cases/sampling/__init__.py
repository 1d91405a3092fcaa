"""Cases of sampling and of log probabilities."""
