"""Cases of single instructions: each inline PTX wrapper against the manual."""
