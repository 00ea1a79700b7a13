"""Moving tokens to their experts and back: rows in the order of the experts."""
