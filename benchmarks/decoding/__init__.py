"""Parts of flash_decoding.py: cells, peers, and one module per table."""
