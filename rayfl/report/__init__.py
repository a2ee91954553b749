"""From run directories to one self-contained page."""
