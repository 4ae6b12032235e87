"""The `pagetrie` command."""
