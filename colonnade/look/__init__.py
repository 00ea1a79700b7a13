"""Model inspection: for now, which experts take which tokens."""
