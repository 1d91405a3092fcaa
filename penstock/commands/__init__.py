"""The commands beside `penstock serve`: look at a machine, a model, a running server or a recording; talk to a model.

Each command is a module, or a folder whose `command` module it is. `penstock.main` lists them.
"""
