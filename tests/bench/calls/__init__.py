"""`bench calls`: request and reply on loopback, beside rivals."""
