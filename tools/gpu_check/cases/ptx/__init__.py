"""Cases of single instructions: each inline PTX wrapper against what the manual says."""
