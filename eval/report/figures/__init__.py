"""The figures of the report, one file each: results in, an inline SVG with its caption out."""
