"""The operations in torch: the reference for the native ones, and what runs where these do not."""
