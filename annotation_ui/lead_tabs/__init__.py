"""The tabs of the lead's page, four files of them and what they share."""
