#!/bin/sh
# server: the Prefect server on Postgres; worker: registers everything, then takes up runs.
set -eu
case "${1:-worker}" in
server)
    password=$(cat /run/secrets/postgres_password)
    export PREFECT_API_DATABASE_CONNECTION_URL="postgresql+asyncpg://eyas:${password}@postgres:5432/eyas"
    exec prefect server start --host 0.0.0.0 --port 4200
    ;;
worker)
    python -m deployments register --runs-home /runs
    exec prefect worker start --pool eyas --type process --name "$(hostname)"
    ;;
*)
    exec "$@"
    ;;
esac
