"""Rules of the error feedback: what is added to a pseudo-gradient before it is encoded, and remembered after."""
