"""Stands in for MindStudio's msprobe where something has to go wrong; STANDIN says what."""
