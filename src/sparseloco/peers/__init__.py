"""Peers that come and go: what they keep in a store, and how they agree on a round over it."""
