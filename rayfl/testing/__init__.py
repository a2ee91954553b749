"""The contract of a method, over one of your own: `pytest --pyargs rayfl.testing --method my_methods.py:FullLength`.

Each of its tests is a function of rayfl/testing/contracts.py, which our own tests call for every method of rayfl.
"""
