"""The programs that eaglex drafts for. Each module imports its own host and nothing imports them all."""
