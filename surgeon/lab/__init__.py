"""The laboratory: evaluation, studies, continual runs, reports and the demonstration, built on the rest of surgeon."""
