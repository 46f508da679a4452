"""The database: tables, transactions, leases, judgments, batches and their import. No module knows the web server."""
