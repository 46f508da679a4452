"""Checkpoints to resume from."""
