"""Views of a report: the JSON document, tables, advice. Rounding happens here alone."""
