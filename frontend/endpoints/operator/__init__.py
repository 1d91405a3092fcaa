"""Endpoints for the operator of the server, who has the admin key."""
