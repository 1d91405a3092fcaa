"""The import namespace: `penstock.frontend`, `penstock.backend`, `penstock.shm` and `penstock.tools`.

The four are links to the folders of the same names at the top of the repository. Nothing of ours is imported as
`frontend` or `tools`: those names belong to other people's projects.
"""
