"""A driver and its actors, whatever framework brings calls to them; `rankscope.integrations.ray` is the one for Ray."""
