"""Measuring a student: one function per question, typed results."""
