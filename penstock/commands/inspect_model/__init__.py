"""`penstock inspect`: describes a model, and whether Penstock can serve it, from small files and tensor headers alone.

`headers` reads names, dtypes and shapes of the tensors; `config_fields` the dimensions of any architecture;
`description` combines them; `command` prints.
"""
