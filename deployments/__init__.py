"""Registration of deployments, schedules and automations; run configs in YAML."""
