"""Feed-forward networks of several experts on rows that stand in the order of the experts."""
