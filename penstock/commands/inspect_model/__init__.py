"""`penstock inspect`: describes a model, and whether Penstock can serve it, from small files and tensor headers alone.

`config_fields` reads the dimensions of any architecture, `description` adds names, dtypes and shapes of the tensors;
`command` prints.
"""
