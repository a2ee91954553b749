"""Code that the methods of several papers use."""
