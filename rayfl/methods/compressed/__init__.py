"""Few bytes: methods with a compression, or a theory of compression, of their own."""
