"""The report: tables and figures recomputed from raw records."""
