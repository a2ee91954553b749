"""Who talks to whom among peers: graphs, graph files, statistics."""
