"""Views of a report: the JSON document, tables and advice. Numbers are rounded only here."""
