"""`penstock chaos --bad-models`: damaged model files are refused in one line, or they run.

`good_models` makes small models, `mutations` damages one file of one of them, and `loader` loads it in a child that can
be killed, as far as the first step of the forward pass. `fuzz` counts what came of it.
"""
