"""Studies reported in docs/studies/, each with one command. A repeated command continues where the last one stopped."""
