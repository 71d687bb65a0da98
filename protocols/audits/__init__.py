"""What the verdicts in final sets say: which work has weight, and who has shown enough of it to decide rounds."""
