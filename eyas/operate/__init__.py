"""Running it: plan, pipeline, forecasts, status, report and the command line."""
