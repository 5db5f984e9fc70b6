"""A fair model over the clients of a federation."""
