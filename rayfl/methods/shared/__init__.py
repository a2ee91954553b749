"""What several papers' methods use."""
