"""A report of what presets do, what transfers and what a wrong rule costs, from the committed records: build/report.pdf."""
