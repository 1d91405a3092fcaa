"""The findings of a run and its report: report.json and report.md.

No module imports torch at its top level, so the parent process of a run needs neither torch nor a GPU. Imports
no other package of gpu-check. Start with `results`, which every section writes to.
"""
