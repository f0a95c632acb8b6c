"""The page of one report: its parts as functions that return markup."""
