"""Access control: API keys, rate limits, host names, and CORS for browsers.

`admission` puts the four together; the application asks it before it reads a request's body. Imports only `transport`
and `penstock.shm`. Start with `admission`.
"""
