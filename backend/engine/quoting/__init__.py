"""Quotes: predictions of when a request would start and finish, from the history of steps and answers.

`quoter` makes a quote when one is asked for, and now and then for a request that did not ask, to measure the errors.
`forecast` runs the sequences ahead through a coarse model of the scheduler. `history` knows how long answers become
and how wrong past quotes were. Nothing here runs per token.
"""
