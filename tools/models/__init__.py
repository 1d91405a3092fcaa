"""Several models behind one server: `penstock serve --model NAME=DIR …`.

`named` reads the options. The package may import `backend`, `frontend` and `shm`.
"""
