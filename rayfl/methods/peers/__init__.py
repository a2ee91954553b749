"""Without a server: peers mix their models along a graph."""
