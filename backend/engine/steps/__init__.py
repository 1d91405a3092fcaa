"""Steps: a plan becomes a batch of arrays (`batch_builder`), which the device's thread (`executor`) launches and
finishes (`launched_step`). `vectors` collects the results of pooled rows, and `step_timing` says when the next plan is
due. `draft_desk` asks a `draft_model` for guesses where `model_drafting` wants them. May import what the engine may,
but no other part of it.
"""
