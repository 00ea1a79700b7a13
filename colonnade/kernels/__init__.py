"""Pure tensor functions: a plain reference of each, and its fast twins with the same signature."""
