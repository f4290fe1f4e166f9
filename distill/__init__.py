"""Training and measuring a student."""
