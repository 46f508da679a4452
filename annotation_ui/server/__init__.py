"""Web server: access control, sign-in, the routes of the labelers' page, uploads, and the probed model."""
