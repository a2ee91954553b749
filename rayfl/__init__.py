"""rayfl: federated-learning experiments as pure functions; `actors` runs them on Ray, `jobs` starts them."""

__version__ = "0.1.0"
