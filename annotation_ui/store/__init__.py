"""Database: tables, transactions, leases, judgments, batches and their import. Independent of the web server."""
