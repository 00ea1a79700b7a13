"""Looking inside a model: for now, which experts take which tokens."""
