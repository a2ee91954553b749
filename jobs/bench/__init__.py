"""`rayfl bench`: round times and memory beside a bare PyTorch loop, in the same call."""
