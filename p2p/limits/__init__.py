"""A host under the user's limits: rates, schedules and the monthly quota of all protocols; and bounded tables."""
