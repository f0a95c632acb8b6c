"""Derivations of a report, and topics of sizing with their rules of thumb, in English and Chinese."""
