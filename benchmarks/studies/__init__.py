"""Studies that docs/studies/ reports: one command each; a repeated command continues where the last one stopped."""
