"""Models by name, one file per family. The `build` of a frozen `Architecture` makes the module for a dataset."""
