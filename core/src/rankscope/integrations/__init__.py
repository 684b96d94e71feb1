"""Other frameworks: each module imports its framework, so import the one that you use."""
