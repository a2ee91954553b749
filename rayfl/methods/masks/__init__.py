"""Subnetworks: each client trains, keeps or sends a part of the weights."""
