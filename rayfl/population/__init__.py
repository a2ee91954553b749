"""Who exists and who shows up: clients' traits, sampling, availability, distributions."""
