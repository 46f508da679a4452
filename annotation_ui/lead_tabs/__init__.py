"""The tabs of the lead's page, three files of them and what they share."""
