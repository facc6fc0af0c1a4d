"""What was measured: records, figures, reports and their comparison."""
