"""Keeps responses, their messages and their events in memory or in an SQLite file that all workers share.

Endpoints call `store`. `state_files` chooses the directory, `database` opens the file and runs transactions,
`stored_messages` and `stored_events` write its parts. `owner` names the worker that generates a response, and `orphans`
finds those whose owner has died.
"""
