"""Tabs of the lead's page, one module per subject, and their shared parts (`common`)."""
