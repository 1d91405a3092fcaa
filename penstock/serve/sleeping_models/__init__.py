"""Several models behind one server: `penstock serve --model NAME=DIR …`, `--models-dir`, and models that sleep.

`named` reads the options, `sizes` estimates what models take, and `attendant` decides which wake and sleep, and starts
and ends their backends; `sleepers` puts these together. Workers see models through `shm.memory.model_table`. The
package may import `backend`, `frontend` and `shm`. Start with `attendant`.
"""
